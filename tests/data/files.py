"""Texts as files of every format, and as stores of bytes."""

import bz2
import gzip
import io
import json
import lzma
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import zstandard

from tests.data.corpora import random_texts
from trellis.data import FileSource, Store, find_files, tokenize

TEXTS = [*random_texts(np.random.default_rng(7), 25), 'with "quotes", commas\nand a line end', "last"]


def as_jsonl(path, texts):
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))


def as_json(path, texts):
    path.write_text(json.dumps([{"text": t} for t in texts]))


def as_csv(path, texts):
    import csv

    with open(path, "w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(["id", "text"])
        writer.writerows(enumerate(texts))


def as_parquet(path, texts):
    table = pa.table({"id": list(range(len(texts))), "text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=10)


def as_arrow(path, texts):
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)


def as_arrow_stream(path, texts):
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)


def as_tar(path, texts):
    members = {}
    for i, text in enumerate(texts):
        members[f"part/{i:05}.txt"] = text.encode()
        members[f"part/{i:05}.json"] = json.dumps({"id": i}).encode()
        members[f"part/{i:05}.jpg"] = b"\xff\xd8"
    as_tar_of(path, members)


def as_tar_of(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


WRITERS = {
    "in.jsonl": as_jsonl, "in.json": as_json, "in.csv": as_csv, "in.tsv": as_csv, "in.parquet": as_parquet,
    "in.arrow": as_arrow, "in2.arrow": as_arrow_stream, "in.feather": as_arrow, "in.tar": as_tar,
}  # fmt: skip
COMPRESSORS = {
    "": lambda data: data, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress, ".bz2": bz2.compress,
    ".GZ": gzip.compress,
}  # fmt: skip


def tokens_of(paths, out, **options) -> Store:
    source_options = {k: options.pop(k) for k in ("field", "separator", "format") if k in options}
    options = {"use_bytes": True, "workers": 0, "chunk_tokens": 256, "chunk_offsets": 16} | options
    return tokenize(FileSource(files=find_files(paths), **source_options), out, **options)
