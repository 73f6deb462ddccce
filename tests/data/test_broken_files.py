"""What is wrong with a file is one clear message, and nothing of it is left out in silence."""

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from tests.data.corpora import stream
from tests.data.files import COMPRESSORS, TEXTS, WRITERS, as_tar_of, tokens_of
from trellis.data import open_store
from trellis.data.tokenizing import json_files
from trellis.errors import UserError


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("in.jsonl.gz", "A compressed file must be complete, and of the kind that its name says."),
        ("in.jsonl.xz", "A compressed file must be complete, and of the kind that its name says."),
        ("in.jsonl.bz2", "A compressed file must be complete, and of the kind that its name says."),
        ("in.jsonl.zst", "A compressed file must be complete, and of the kind that its name says."),
        ("in.parquet", "A Parquet or Arrow file must be complete."),
        ("in.arrow", "A Parquet or Arrow file must be complete."),
        ("in.tar", "A .tar file must be one complete tar archive."),
        ("in.json", "A .json file must contain one array of objects, one object, or an object on each line."),
    ],
)
def test_files_cut_short(tmp_path, name, rule):
    plain, suffix = (name.rsplit(".", 1)[0], "." + name.rsplit(".", 1)[1]) if name.count(".") > 1 else (name, "")
    WRITERS[plain](tmp_path / plain, TEXTS)
    data = COMPRESSORS[suffix]((tmp_path / plain).read_bytes())
    (tmp_path / name).write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(UserError) as raised:
        tokens_of(tmp_path / name, tmp_path / "out")
    assert raised.value.rule == rule and name in raised.value.where
    with pytest.raises(UserError):
        open_store(tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('[{"text": "a"},\n{"text": "b"]', "Expecting ',' delimiter: line 2 (char 28)"),
        ('[{"text": "a"},\n]', "Expecting value: line 2 (char 16)"),
        ('[{"text": "a"}]\n x', "Extra data: line 2 (char 17)"),
        ('[{"text": "a"} {"text": "b"}]', "Expecting ',' delimiter: line 1 (char 15)"),
        ('[{"text": "a"}', "Expecting ',' delimiter: line 1 (char 14)"),
        ('{"text": "a"\n}\nwhat', "Expecting value: line 3 (char 15)"),
    ],
)
def test_a_json_file_that_is_none(tmp_path, text, seen, monkeypatch):
    for read in (3, 1 << 20):
        monkeypatch.setattr(json_files, "BLOCK_BYTES", read)
        (tmp_path / "in.json").write_text(text)
        with pytest.raises(UserError, match="one array of objects, one object, or an object on each line") as raised:
            tokens_of(tmp_path / "in.json", tmp_path / "out")
        assert raised.value.seen == seen


def test_a_gz_that_is_none(tmp_path):
    (tmp_path / "in.jsonl.gz").write_bytes(b'{"text": "a"}\n')
    with pytest.raises(UserError, match="A compressed file must be complete"):
        tokens_of(tmp_path / "in.jsonl.gz", tmp_path / "out")


def test_a_row_of_a_csv_with_more_fields_than_columns(tmp_path):
    """A comma that nobody quoted would cut its text."""
    (tmp_path / "in.csv").write_text('text\ngood\nhello, world, all\n"one, two"\n')
    with pytest.raises(UserError, match="Every document must be readable") as raised:
        tokens_of(tmp_path / "in.csv", tmp_path / "out")
    assert raised.value.seen == "2 more fields than columns: [' world', ' all']"
    assert raised.value.where.endswith("in.csv, record 2")
    store = tokens_of(tmp_path / "in.csv", tmp_path / "out", on_error="skip", restart=True)
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(["good", "one, two"]))
    assert store.about["skipped"] == 1


@pytest.mark.parametrize(
    "name, text", [("in.csv", 'text,label\n"open,1\nplain,2\n'), ("in.tsv", 'text\n"Who" is it?\n')]
)
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_quote_of_a_csv_that_is_not_closed(name, text, on_error, tmp_path):
    """What follows would be one document."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="every quoted field must end with a closing quote"):
        tokens_of(tmp_path / name, tmp_path / "out", on_error=on_error)


@pytest.mark.parametrize("name", ["in.csv", "in.parquet", "in.arrow"])
def test_columns_with_one_name(tmp_path, name):
    table = pa.Table.from_arrays([pa.array([text]) for text in "abcd"], ["id", "text", "id", "text"])
    if name == "in.csv":
        (tmp_path / name).write_text("text,text\na,b\n")
    elif name == "in.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        pyarrow.feather.write_feather(table, tmp_path / name)
    with pytest.raises(UserError, match="cannot have two columns of the same name") as raised:
        tokens_of(tmp_path / name, tmp_path / "out")
    where = f"{tmp_path / name}, line 1" if name == "in.csv" else str(tmp_path / name)
    assert raised.value.seen == "'text' twice" and raised.value.where == where


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
def test_strings_of_a_table_that_are_not_utf8(tmp_path, name):
    ends = np.array([0, 1, 3, 4], np.int32)
    texts = pa.StringArray.from_buffers(3, pa.py_buffer(ends), pa.py_buffer(b"ab\xffc"))
    write = pyarrow.parquet.write_table if name == "in.parquet" else pyarrow.feather.write_feather
    write(pa.table({"text": texts}), tmp_path / name)
    with pytest.raises(UserError, match="Every document must be readable") as raised:
        tokens_of(tmp_path / name, tmp_path / "out")
    assert raised.value.seen == "not UTF-8: byte 0xff at 1" and raised.value.where.endswith("record 2")
    store = tokens_of(tmp_path / name, tmp_path / "out", on_error="skip", restart=True)
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(["a", "c"])) and store.about["skipped"] == 1


@pytest.mark.parametrize("name", ["in.parquet", "in2.arrow"])
def test_a_table_that_is_damaged_inside(tmp_path, name):
    WRITERS[name](tmp_path / name, TEXTS)
    data = bytearray((tmp_path / name).read_bytes())
    (tmp_path / name).write_bytes(data[:4] + bytes(200) + data[204:] if name == "in.parquet" else data[:-100])
    with pytest.raises(UserError, match="A Parquet or Arrow file must be complete"):
        tokens_of(tmp_path / name, tmp_path / "out")


def test_a_tar_that_does_not_end_after_its_last_file(tmp_path):
    """A damaged header or an archive joined to another would end it, and what follows would be lost."""
    path = tmp_path / "in.tar"
    as_tar_of(path, {f"{i}.txt": bytes([97 + i]) * 512 for i in range(3)})
    data = path.read_bytes()
    damaged = data[:1024] + b"?" + data[1025:]
    for broken, at in ((damaged, 1024), (data + data, 3072), (data[:3072], 3072), (data[:2048], 2048)):
        path.write_bytes(broken)
        with pytest.raises(UserError, match="one complete tar archive") as raised:
            tokens_of(path, tmp_path / "out")
        assert raised.value.seen == f"no end at byte {at:,}, after the last file that can be read"
    path.write_bytes(data[:3584])  # one block of zeros is enough
    assert tokens_of(path, tmp_path / "out").num_documents == 3


def test_csv_that_is_not_utf8(tmp_path):
    (tmp_path / "in.csv").write_bytes(b"text\ngood\nbad \xff\n")
    with pytest.raises(UserError, match="A CSV file must be UTF-8") as raised:
        tokens_of(tmp_path / "in.csv", tmp_path / "out")
    assert raised.value.seen == "byte 0xff"


@pytest.mark.parametrize(
    ("name", "data", "seen"),
    [
        ("1.txt", b"\xff", "file 1.txt: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        ("1.json", b"{", "file 1.json: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("0.txt", b"two", "two files 0.txt"),
    ],
)
def test_files_of_a_tar_that_make_no_record(tmp_path, name, data, seen):
    as_tar_of(tmp_path / "in.tar", [("0.txt", b"one"), (name, data), ("2.txt", b"three")])
    with pytest.raises(UserError, match="Every document must be readable") as raised:
        tokens_of(tmp_path / "in.tar", tmp_path / "out")
    assert raised.value.seen == seen
    assert raised.value.where.endswith(f"in.tar, record {1 if name == '0.txt' else 2}")
    store = tokens_of(tmp_path / "in.tar", tmp_path / "out", on_error="skip", restart=True)
    kept = ["three"] if name == "0.txt" else ["one", "three"]
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(kept))
