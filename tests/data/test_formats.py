"""Every format, compression and kind of path gives the same documents; every broken input one clear message."""

import codecs
import gzip
import io
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from tests.data.corpora import END, stream
from tests.data.files import COMPRESSORS, TEXTS, WRITERS, as_jsonl, as_parquet, as_tar_of, tokens_of
from trellis.data import FileSource, Tokenizer, byte_tokenizer, find_files, open_store
from trellis.data.tokenizing import formats, json_files
from trellis.errors import UserError


@pytest.mark.parametrize("name", WRITERS)
def test_formats(tmp_path, name):
    WRITERS[name](tmp_path / name, TEXTS)
    store = tokens_of(tmp_path / name, tmp_path / "out")
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(TEXTS))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst", ".bz2", ".GZ"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.tar", "in.txt"])
def test_compressions(tmp_path, name, suffix):
    WRITERS.get(name, lambda path, texts: path.write_text(texts[0]))(tmp_path / name, TEXTS)
    (tmp_path / (name + suffix)).write_bytes(COMPRESSORS[suffix]((tmp_path / name).read_bytes()))
    store = tokens_of(tmp_path / (name + suffix), tmp_path / "out")
    expected = TEXTS if name != "in.txt" else TEXTS[:1]
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(expected))


@pytest.mark.parametrize("name", ["in.jsonl", "in.json", "in.csv", "in.txt", "in.jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, name):
    plain, compressed, _ = name.partition(".gz")
    WRITERS.get(plain, lambda path, texts: path.write_text(texts[0]))(tmp_path / plain, TEXTS)
    marked = codecs.BOM_UTF8 + (tmp_path / plain).read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(marked) if compressed else marked)
    store = tokens_of(tmp_path / name, tmp_path / "out")
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(TEXTS if plain != "in.txt" else TEXTS[:1]))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst", ".bz2"])
def test_several_frames_in_a_file(tmp_path, suffix):
    """With zeros between them, as after xz's padding, too. A frame is not left out because its beginning is damaged."""
    frames = [COMPRESSORS[suffix](json.dumps({"text": t}).encode() + b"\n") for t in TEXTS]
    path = tmp_path / f"in.jsonl{suffix}"
    for i, between in enumerate((b"", bytes(4))):
        path.write_bytes(b"".join(frame + between for frame in frames))
        store = tokens_of(path, tmp_path / f"out{i}")
        assert np.array_equal(store.tokens(0, store.num_tokens), stream(TEXTS))
    for data in (b"", frames[0] + b"?" + frames[1][1:], frames[0] + frames[1][:3], frames[0] + b"what"):
        path.write_bytes(data)
        with pytest.raises(UserError, match="A compressed file must be complete, and of the kind that its name says"):
            tokens_of(path, tmp_path / "broken")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst", ".bz2"])
@pytest.mark.parametrize("name", ["in.parquet", "in.arrow", "in2.arrow"])
def test_compressed_tables(tmp_path, name, suffix):
    WRITERS[name](tmp_path / name, TEXTS)
    (tmp_path / (name + suffix)).write_bytes(COMPRESSORS[suffix]((tmp_path / name).read_bytes()))
    store = tokens_of(tmp_path / (name + suffix), tmp_path / "out")
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(TEXTS))


@pytest.mark.parametrize(
    "name", [*WRITERS, "in.jsonl.gz", "in.csv.xz", "in.tar.zst", "in.jsonl.bz2", "in.txt", "lines.txt", "one_line.txt"]
)
def test_reading_goes_on_from_every_block(tmp_path, name, monkeypatch):
    """The documents after a block's end are those that a fresh reader finds from there."""
    monkeypatch.setattr(formats, "BLOCK_BYTES", 150)
    monkeypatch.setattr(formats, "PIECE_BYTES", 40)
    plain, _, suffix = name.partition(".gz") if name.endswith(".gz") else (name, "", "")
    for ending in COMPRESSORS:
        if ending and name.endswith(ending):
            plain, suffix = name[: -len(ending)], ending
    if plain.endswith(".txt"):
        (tmp_path / plain).write_text("a" * 500 + " " * 9 if plain == "one_line.txt" else "\n".join(TEXTS))
    else:
        WRITERS[plain](tmp_path / plain, TEXTS)
    if suffix:
        (tmp_path / name).write_bytes(COMPRESSORS[suffix]((tmp_path / plain).read_bytes()))
    separator = "\n" if name == "lines.txt" else None
    source = FileSource(files=find_files(tmp_path / name), separator=separator)
    blocks = list(source.blocks(0, (0, 1), all_fields=True))
    assert len(blocks) > 1 or name == "in.json"
    for i, block in enumerate(blocks):
        rest = list(source.blocks(0, block.end, all_fields=True))
        if block.kind == "records":
            flat = lambda blocks: [record for b in blocks for record in b.payload]
            assert flat(rest) == flat(blocks[i + 1 :])
        elif block.kind == "piece":  # pieces are part of the format: they may not depend on where a reader began
            assert [(b.payload, b.first, b.end, b.closed) for b in rest] == [
                (b.payload, b.first, b.end, b.closed) for b in blocks[i + 1 :]
            ]
        else:
            flat = lambda blocks: [(b.first + i, t) for b in blocks for i, t in enumerate(b.payload.split(b"\n"))]
            assert flat(rest) == flat(blocks[i + 1 :])


def test_a_long_text_is_one_document_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "BLOCK_BYTES", 64)
    monkeypatch.setattr(formats, "PIECE_BYTES", 50)
    for i, text in enumerate(["short", "é" * 500, "line\n" * 60, "a" * 99 + "\n" + "b" * 300, " " * 200 + "\n\n"]):
        (tmp_path / "in.txt").write_text(text)
        store = tokens_of(tmp_path / "in.txt", tmp_path / f"out{i}")
        assert store.num_documents == 1
        assert np.array_equal(store.tokens(0, store.num_tokens), stream([text]))


@pytest.mark.parametrize(
    ("text", "separator", "expected"),
    [
        ("a\nb\n\nc", "\n", ["a", "b", "c"]),
        ("a\r\nb\r\n", "\n", ["a", "b"]),
        ("one\ntwo<|endoftext|>three<|endoftext|>\n", "<|endoftext|>", ["one\ntwo", "three"]),
        ("x\n\ny\nz\n\n\n", "\n\n", ["x", "y\nz"]),
    ],
)
def test_texts_with_something_between_them(tmp_path, text, separator, expected):
    (tmp_path / "in.txt").write_bytes(text.encode())
    store = tokens_of(tmp_path / "in.txt", tmp_path / "out", separator=separator)
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(expected))


def test_nested_fields(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"a": {"b": "x"}}\n{"a": {"b": "y"}}\n')
    store = tokens_of(tmp_path / "in.jsonl", tmp_path / "out", field="a.b")
    assert store.tokens(0, 4).tolist() == [ord("x"), END, ord("y"), END]


def test_a_field_whose_own_name_has_dots(tmp_path):
    pyarrow.parquet.write_table(pa.table({"a.b": ["x"], "a": [{"b": "y"}]}), tmp_path / "1.parquet")
    pyarrow.parquet.write_table(pa.table({"a": [{"b": "y"}]}), tmp_path / "2.parquet")
    as_tar_of(tmp_path / "3.tar", {"0.a.b.md": b"no", "0.a.b": b'"z"', "0.json": b'{"a.b": "z"}'})
    store = tokens_of([tmp_path / f for f in ("1.parquet", "2.parquet", "3.tar")], tmp_path / "out", field="a.b")
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(["x", "y", "z"]))


def test_fields_of_a_tar(tmp_path):
    as_tar_of(tmp_path / "in.tar", {"0.json": b'{"caption": "seen"}'})
    store = tokens_of(tmp_path / "in.tar", tmp_path / "out", field="caption")
    assert np.array_equal(store.tokens(0, 5), stream(["seen"]))


def test_folders_patterns_and_lists(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "a.txt", ".hidden.txt", "b/.git/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    names = lambda paths: [f.name.removeprefix(f"{tmp_path}/") for f in find_files(paths)]
    assert names(tmp_path) == ["a.txt", "b/1.txt", "b/2.txt"]
    assert names(str(tmp_path / "**" / "*.txt")) == ["a.txt", "b/1.txt", "b/2.txt"]
    assert names([tmp_path / "b", tmp_path / "a.txt"]) == ["b/1.txt", "b/2.txt", "a.txt"]
    assert names(f"file://{tmp_path}/a.txt") == ["a.txt"]


@pytest.mark.parametrize("read", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"text": t, "n": [1.5e3, -2]} for t in TEXTS]),
        json.dumps([{"text": t} for t in TEXTS], indent=2, ensure_ascii=False) + "\n",
        "\n".join(json.dumps({"text": t}, indent=1) for t in TEXTS),
        json.dumps({"text": TEXTS[0]}),
        json.dumps(TEXTS),
    ],
)
def test_a_json_file_is_read_in_parts(tmp_path, text, read, monkeypatch):
    monkeypatch.setattr(json_files, "BLOCK_BYTES", read)
    monkeypatch.setattr(formats, "BLOCK_BYTES", 100)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        (tmp_path / "in.json").write_bytes(text.encode(encoding))
        store = tokens_of(tmp_path / "in.json", tmp_path / "out", restart=True)
        expected = TEXTS[:1] if text == json.dumps({"text": TEXTS[0]}) else TEXTS
        assert np.array_equal(store.tokens(0, store.num_tokens), stream(expected))


def test_numbers_of_a_json_file_are_read_to_their_end(monkeypatch):
    monkeypatch.setattr(json_files, "BLOCK_BYTES", 1)
    for text in ("[12.5e3, -70 ,0.25]", "12.5 7\n8", "[]", " [ ] ", "", "[true,null]"):
        expected = {"12.5 7\n8": [12.5, 7, 8], "": []}.get(text)
        found = list(json_files.Values(io.StringIO(text)).elements())
        assert found == (json.loads(text) if expected is None else expected)


def test_a_store_in_a_folder_is_no_part_of_it(tmp_path):
    """So a command that writes one there finds the same files when it is started again."""
    as_jsonl(tmp_path / "1.jsonl", TEXTS)
    first = tokens_of(tmp_path, tmp_path / "deep" / "out")
    (tmp_path / "deep" / "zarr.json").write_text('{"text": "of another kind"}')
    names = [file.name for file in find_files(tmp_path)]
    assert names == [str(tmp_path / name) for name in ("1.jsonl", "deep/zarr.json")]
    with pytest.raises(UserError, match="seen:  a token store"):
        find_files(tmp_path / "deep" / "out")
    assert tokens_of(tmp_path / "*.jsonl", tmp_path / "deep" / "out").num_tokens == first.num_tokens
    (tmp_path / "deep" / "zarr.json").unlink()
    assert tokens_of(tmp_path, tmp_path / "deep" / "out").num_tokens == first.num_tokens


def test_links_are_followed(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.txt").write_text("1")
    (tmp_path / "2.txt").write_text("2")
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "file.txt").symlink_to(tmp_path / "2.txt")
    found = [file.name.removeprefix(f"{tmp_path}/") for file in find_files(tmp_path / "in")]
    assert found == ["in/file.txt", "in/folder/1.txt"]


@pytest.mark.parametrize("again", ["in/1.txt", "in/../in", "in/*", "link.txt", "round/**/*.txt", "round"])
def test_a_text_is_named_once(tmp_path, again):
    for folder in ("in", "round"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.txt").write_text("1")
    (tmp_path / "link.txt").symlink_to(tmp_path / "in" / "1.txt")
    (tmp_path / "round" / "back").symlink_to(tmp_path / "round")
    with pytest.raises(UserError) as raised:
        find_files([tmp_path / "in", tmp_path / again])
    assert raised.value.rule == "A text must be named once." and "which is the same" in raised.value.seen


@pytest.mark.parametrize("named", ["in", "in/pipe"])
def test_a_pipe_is_refused_and_not_waited_for(named, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.txt").write_text("one")
    os.mkfifo(tmp_path / "in" / "pipe")
    with pytest.raises(UserError, match="Every input must be a file") as error:
        find_files(tmp_path / named)
    assert error.value.seen == f"{tmp_path / 'in' / 'pipe'}, a pipe, socket or device"


def test_a_link_that_leads_nowhere(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "none")
    for inputs in (tmp_path, tmp_path / "*.txt"):
        with pytest.raises(FileNotFoundError, match=r"b\.txt"):
            find_files(inputs)


@pytest.mark.parametrize("path", ["none.txt", "*.none", "empty"])
def test_nothing_found(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as raised:
        find_files(tmp_path / path)
    assert raised.value.rule == "Every input must exist." and raised.value.where == str(tmp_path / path)
    assert raised.value.fix == "check the path"


def test_no_path_given():
    with pytest.raises(UserError, match="A corpus must have at least one file"):
        find_files([])


BAD_LINES = [
    ("broken JSON", b'{"text": "a"', "not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)"),
    ("missing field", b'{"body": "a"}', "no field 'text' among 'body'"),
    ("field of another type", b'{"text": 7}', "field 'text' is int, not a string"),
    ("null", b'{"text": null}', "field 'text' is null, not a string"),
    ("not an object", b"[1]", "not an object: '[1]'"),
    ("invalid UTF-8", b'{"text": "a\xff"}', "not UTF-8: byte 0xff at 11"),
    ("half a surrogate pair", b'{"text": "\\ud800"}', "not UTF-8: half of a surrogate pair"),
]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("what", "line", "seen"), BAD_LINES)
def test_bad_lines_stop_the_run_or_are_counted(tmp_path, what, line, seen, workers):
    if workers and what not in ("broken JSON", "missing field", "half a surrogate pair"):
        workers = 0
    good = [b'{"text": "first"}', b"", b'{"text": "third"}']
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([*good, line, b'{"text": "fifth"}', line]))
    with pytest.raises(UserError) as raised:
        tokens_of(tmp_path / "in.jsonl", tmp_path / "out", workers=workers)
    assert raised.value.rule == "Every document must be readable." and raised.value.seen == seen
    assert raised.value.where == f"{tmp_path / 'in.jsonl'}, line 4"
    name_it = "name the field of the text with --field, " if what == "missing field" else ""
    assert raised.value.fix == f"{name_it}fix the document, or skip such documents with --on-error skip"
    assert not (tmp_path / "out").exists()
    store = tokens_of(tmp_path / "in.jsonl", tmp_path / "out", on_error="skip", workers=workers)
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(["first", "third", "fifth"]))
    assert store.about["skipped"] == 2
    assert store.about["skipped_examples"] == [f"{tmp_path / 'in.jsonl'}, line {n}: {seen}" for n in (4, 6)]
    with pytest.raises(UserError, match="2 skipped earlier"):
        tokens_of(tmp_path / "in.jsonl", tmp_path / "out")


def test_lines_are_counted_over_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "BLOCK_BYTES", 100)
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n' * 57 + "broken\n" + '{"text": "a"}\n' * 20)
    with pytest.raises(UserError) as raised:
        tokens_of(tmp_path / "in.jsonl", tmp_path / "out")
    assert raised.value.where.endswith("in.jsonl, line 58")
    with pytest.raises(UserError) as raised:
        open_store(tmp_path / "out")
    assert raised.value.rule == "A store must be complete before it is read."
    assert raised.value.seen.endswith("documents so far") and "it continues where it left off" in raised.value.fix
    store = tokens_of(tmp_path / "in.jsonl", tmp_path / "out", on_error="skip")
    assert store.num_documents == 77


def test_invalid_utf8_in_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "BLOCK_BYTES", 40)
    monkeypatch.setattr(formats, "PIECE_BYTES", 40)
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.txt").write_bytes(b"bad \xfe")
    with pytest.raises(UserError, match="not UTF-8: byte 0xfe at 4"):
        tokens_of(tmp_path, tmp_path / "out")
    assert tokens_of([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out2", on_error="skip").num_documents == 1
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "c.txt").write_bytes(b"fine\n" * 50 + b"\xfe\n" + b"fine\n" * 50)
    with pytest.raises(UserError) as raised:  # part of the document is stored already: it cannot be left out
        tokens_of(tmp_path / "long", tmp_path / "out3", on_error="skip")
    assert raised.value.fix == "fix or remove the file"


def test_numbers_of_records(tmp_path):
    as_parquet(tmp_path / "in.parquet", TEXTS)
    with pytest.raises(UserError) as raised:
        tokens_of(tmp_path / "in.parquet", tmp_path / "out", field="body")
    assert (
        raised.value.where.endswith("in.parquet, record 1")
        and raised.value.seen == "no field 'body' among 'id', 'text'"
    )


def test_a_table_with_tabs_by_a_name_in_capitals(tmp_path):
    (tmp_path / "IN.TSV").write_text("id\ttext\n1\ta, b\n")
    store = tokens_of(tmp_path / "IN.TSV", tmp_path / "out")
    assert store.tokenizer().decode(store.document(0)) == "a, b<|endoftext|>"


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n'])
def test_an_empty_corpus(tmp_path, content):
    (tmp_path / "in.jsonl").write_bytes(content)
    for options in ({}, {"use_bytes": False, "train_bpe": 300}):
        with pytest.raises(UserError) as raised:
            tokens_of(tmp_path / "in.jsonl", tmp_path / "out", **options)
        assert raised.value.rule == "A corpus must have at least one document."
        assert raised.value.where == str(tmp_path / "in.jsonl")
        assert not (tmp_path / "out").exists()


def test_a_field_of_text_files_alone_is_refused(tmp_path):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}')
    with pytest.raises(
        UserError,
        match=r"A field can be used only with records: text files have none\.\n  seen:  body, and 1 text file\n",
    ):
        FileSource(files=find_files(tmp_path / "a.txt"), field="body")
    assert FileSource(files=find_files(tmp_path), field="body").text_field == "body"


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"format": "docx"}, "The format must be one that Trellis reads."),
        ({"separator": ""}, "The separator cannot be empty."),
        ({"separator": "\n", "format": "jsonl"}, "A separator can be used only with text files."),
    ],
)
def test_wrong_options(options, rule):
    with pytest.raises(UserError) as raised:
        FileSource(files=(), **options)
    assert raised.value.rule == rule


@pytest.mark.parametrize("end", ["<|end|>", "o"])
def test_a_text_that_would_end_in_its_middle(tmp_path, end):
    """The token that ends documents is an ordinary one, or one that the tokenizer finds in a text, special or not."""
    from tokenizers import Tokenizer as Inner

    inner = Inner.from_str(byte_tokenizer().json)
    inner.add_tokens(["<|end|>"])
    options = {"use_bytes": False, "tokenizer": Tokenizer(inner.to_str(), end_of_document=end)}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", f"b{end}c", "d")))
    (tmp_path / "in.txt").write_text(f"a{end}")
    seen = f"its text is encoded with {end!r}, which ends documents"
    for name, line in (("in.jsonl", 2), ("in.txt", 1)):
        with pytest.raises(UserError) as raised:
            tokens_of(tmp_path / name, tmp_path / f"no-{name}", **options)
        assert raised.value.seen == seen and raised.value.where == f"{tmp_path / name}, line {line}"
    store = tokens_of(tmp_path / "in.jsonl", tmp_path / "out", on_error="skip", **options)
    assert [store.tokenizer().decode(store.document(i)) for i in range(2)] == [f"a{end}", f"d{end}"]
    assert store.about["skipped_examples"] == [f"{tmp_path / 'in.jsonl'}, line 2: {seen}"] and store.text_bytes == 2
