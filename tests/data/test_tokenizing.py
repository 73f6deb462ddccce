"""Tokenizing: the store is a pure function of its inputs, whatever interrupts or divides the work."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.data.corpora import END, make_store, random_texts, stream, tree, write_jsonl
from trellis.data import (
    Batches,
    FileSource,
    Shuffle,
    embedded_corpus,
    embedded_stores,
    find_files,
    open_store,
    tokenize,
)
from trellis.data.tokenizing import worker as worker_module
from trellis.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> FileSource:
    """Two files of JSON lines and one text that is cut into pieces; blocks and pieces are small."""
    monkeypatch.setattr("trellis.data.tokenizing.formats.BLOCK_BYTES", 9_000)
    monkeypatch.setattr("trellis.data.tokenizing.formats.PIECE_BYTES", 10_000)
    rng = np.random.default_rng(0)
    write_jsonl(tmp_path / "a.jsonl", random_texts(rng, 200, longest=900))
    write_jsonl(tmp_path / "b.jsonl", random_texts(rng, 50))
    (tmp_path / "long.txt").write_text("\n".join(random_texts(rng, 150, longest=1800)) + "\nthe end")
    return FileSource(files=find_files([tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "long.txt"]))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_changes_nothing(corpus, tmp_path, workers):
    options = {"train_bpe": 300, "train_bytes": 100_000, "chunk_tokens": np.int64(4096), "chunk_offsets": 64}
    one = tokenize(corpus, tmp_path / "one", workers=0, **options)
    tokenize(corpus, tmp_path / "many", workers=workers, commit_seconds=0.0, **options)
    assert tree(tmp_path / "one") == tree(tmp_path / "many")
    assert one.num_documents == 251
    assert one.tokenizer().decode(one.document(250)[:-1]).endswith("\nthe end")
    text = (tmp_path / "long.txt").read_text()
    assert one.tokenizer().decode(one.document(250)[:-1]) == text


SCRIPT = """
import sys
import time
from trellis.data import FileSource, find_files, storage, tokenize
from trellis.data.tokenizing import formats
write = storage.LocalFolder.write
def slowly(self, name, data):  # on a fast disk all would be over before it can be killed
    time.sleep(0.002)
    write(self, name, data)
storage.LocalFolder.write = slowly
formats.BLOCK_BYTES, formats.PIECE_BYTES = 9_000, 10_000
folder, out, workers = sys.argv[1:]
source = FileSource(files=find_files([f"{folder}/a.jsonl", f"{folder}/b.jsonl", f"{folder}/long.txt"]))
tokenize(source, out, train_bpe=300, train_bytes=100_000, workers=int(workers), chunk_tokens=4096, chunk_offsets=64,
         commit_seconds=0.0)
"""


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_the_same(corpus, tmp_path):
    """The process is killed with SIGKILL again and again; in the end every byte is as if it never had been."""
    tokenize(corpus, tmp_path / "whole", workers=0, train_bpe=300, train_bytes=100_000, chunk_tokens=4096,
             chunk_offsets=64)  # fmt: skip
    out = tmp_path / "killed"
    chance = random.Random(4)
    kills = unfinished = 0
    for attempt in range(40):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(out), str(attempt % 3)]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        begun = out / "zarr.json"
        before = begun.stat().st_mtime_ns if begun.exists() else 0
        deadline = time.monotonic() + 60
        if kills < 6:  # wait until it has committed something new, then a random moment
            while process.poll() is None and time.monotonic() < deadline:
                if begun.exists() and begun.stat().st_mtime_ns != before:
                    break
                time.sleep(0.002)
            time.sleep(chance.random() * 0.1)
        else:
            process.wait()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        if begun.exists():
            complete = json.loads(begun.read_text())["attributes"]["trellis"]["complete"]
            unfinished += not complete
            if complete:
                break
            with pytest.raises(UserError, match="A store must be complete before it is read"):
                open_store(out)
    assert unfinished >= 3
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.slow
def test_interrupted_between_any_two_blocks_it_ends_the_same(tmp_path, monkeypatch):
    """Every kill point of a small corpus, one after the other, with commits after every block."""
    monkeypatch.setattr("trellis.data.tokenizing.formats.BLOCK_BYTES", 200)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power fails here, and this writes thousands of files
    texts = random_texts(np.random.default_rng(1), 16)
    make_store(tmp_path, texts, name="whole")
    expected = tree(tmp_path / "whole")
    (tmp_path / "again.jsonl").write_bytes((tmp_path / "whole.jsonl").read_bytes())

    class Killed(BaseException):
        pass

    from trellis.data.storage import LocalFolder

    original = LocalFolder.write
    for kill in range(1, 200):
        writes = 0

        def write(self, name, data):
            nonlocal writes
            writes += 1
            if writes == kill:  # noqa: B023
                raise Killed
            original(self, name, data)

        folder = tmp_path / f"kill{kill}"
        folder.mkdir()
        (folder / "whole.jsonl").write_bytes((tmp_path / "whole.jsonl").read_bytes())
        os.utime(folder / "whole.jsonl", ns=(1, 1))
        monkeypatch.chdir(folder)
        source = FileSource(files=find_files("whole.jsonl"))
        options = dict(use_bytes=True, workers=0, chunk_tokens=64, chunk_offsets=8, commit_seconds=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(LocalFolder, "write", write)
            try:
                tokenize(source, "store", **options)
                finished = True
            except Killed:
                finished = False
        tokenize(source, "store", **options)
        found = tree(folder / "store")
        for name in ("sources.json", "zarr.json"):  # the name of the input differs: it is compared among themselves
            expected_name = expected.setdefault("relative " + name, found[name])
            assert found.pop(name) == expected_name
        assert found == {k: v for k, v in expected.items() if k in found}
        assert len(found) == len([k for k in expected if not k.startswith("relative ")]) - 2
        if finished:
            break
    assert kill > 20


def test_a_finished_store_is_not_made_again(corpus, tmp_path):
    options = {"use_bytes": True, "workers": 0}
    tokenize(corpus, tmp_path / "store", **options)
    before = (tmp_path / "store" / "zarr.json").stat().st_mtime_ns
    tokenize(corpus, tmp_path / "store", **options)
    assert (tmp_path / "store" / "zarr.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_documents_keep_their_order_and_files(tmp_path):
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(5)])
    store = tokenize(FileSource(files=find_files(tmp_path)), tmp_path / "out", use_bytes=True, workers=2)
    decoded = [store.tokenizer().decode(store.document(i)[:-1]) for i in range(15)]
    assert decoded == [f"{name}{i}" for name in "abc" for i in range(5)]
    assert store.arrays["files"].read(0, 4).tolist() == [0, 5, 10, 15]


def test_special_tokens_in_a_text_are_text(tmp_path):
    text = "before <|endoftext|> after"
    store = make_store(tmp_path, [text, "x"], use_bytes=False, train_bpe=300)
    assert store.num_documents == 2
    assert (store.tokens(0, store.num_tokens) == store.end_of_document).sum() == 2
    assert store.tokenizer().decode(store.document(0)[:-1]) == text


@pytest.mark.slow
def test_training_on_a_store_that_is_being_written(tmp_path):
    """Batches read while it grows are those read afterwards."""
    texts = random_texts(np.random.default_rng(2), 400)
    path = write_jsonl(tmp_path / "in.jsonl", texts)
    done = make_store(tmp_path / "done", texts)
    gate, passed = threading.Event(), []

    class SlowSource(FileSource):
        def blocks(self, index, start, *, all_fields):
            for block in super().blocks(index, start, all_fields=all_fields):
                if start == (0, 1) and len(passed) == 4:
                    gate.wait(30)
                passed.append(1)
                yield block

    import trellis.data.tokenizing.formats as formats

    size, formats.BLOCK_BYTES = formats.BLOCK_BYTES, 500
    try:
        source = SlowSource(files=find_files(path))
        thread = threading.Thread(target=lambda: tokenize(
            source, tmp_path / "out", use_bytes=True, workers=0, commit_seconds=0.0, chunk_tokens=64,
            chunk_offsets=8))  # fmt: skip
        thread.start()
        while not (tmp_path / "out" / "offsets" / "zarr.json").exists() or len(passed) < 4:
            time.sleep(0.005)
        with pytest.raises(UserError, match="A store must be complete before it is read"):
            open_store(tmp_path / "out")
        growing = open_store(tmp_path / "out", growing=True)
        assert not growing.complete
        shuffle = Shuffle(block=4, window=2, in_order=True)
        options = {"sequence_length": 16, "batch_size": 4, "seed": 3, "shuffle": shuffle}
        early, late = Batches(growing, **options), Batches(done, **options)
        assert early.filled(2) == 1.0, "nothing waits for the store's end"
        assert np.array_equal(early.batch(0).targets, late.batch(0).targets)
        with pytest.raises(UserError) as raised:
            Batches(growing, sequence_length=16, batch_size=4)
        assert raised.value.rule == "A shuffle of all rows needs a complete store."
        with pytest.raises(UserError, match="Packing whole documents needs a complete store"):
            Batches(growing, sequence_length=16, batch_size=4, packing="best_fit", shuffle=False)
        with pytest.raises(UserError, match="A store that is read while it is written must keep growing") as raised:
            growing.wait_for(10**9, timeout=0.05, poll=0.01)
        assert "run the `trellis tokenize` command again" in raised.value.fix
        gate.set()
        steps = done.num_tokens // 64
        for step in range(0, 2 * steps, 7):  # into the second epoch, which needs the count of all rows
            assert np.array_equal(early.batch(step).targets, late.batch(step).targets)
        thread.join()
        assert growing.complete
    finally:
        gate.set()
        formats.BLOCK_BYTES = size


def test_one_writer_at_a_time(tmp_path):
    import fcntl

    with open(tmp_path / "store.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError) as raised:
            make_store(tmp_path, ["a"])
    assert raised.value.rule == "Only one process at a time can write a store."
    assert make_store(tmp_path, ["a"]).num_documents == 1 and not (tmp_path / "store.lock").exists()


def test_waiting_for_another_writer(tmp_path):
    import fcntl

    with open(tmp_path / "store.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def let_go():  # as a writer does when it has finished
            os.unlink(tmp_path / "store.lock")
            fcntl.flock(lock, fcntl.LOCK_UN)

        threading.Timer(0.2, let_go).start()
        assert make_store(tmp_path, ["a"], wait=True).num_documents == 1
    assert not (tmp_path / "store.lock").exists()


@pytest.mark.slow
def test_several_processes_that_want_the_same_store(tmp_path):
    """All wait for the one that writes, and open what it wrote."""
    write_jsonl(tmp_path / "in.jsonl", random_texts(np.random.default_rng(0), 300))
    code = (
        "import sys; from trellis.data import FileSource, find_files, tokenize; "
        "print(tokenize(FileSource(files=find_files(sys.argv[1])), sys.argv[2], use_bytes=True, workers=0, wait=True,"
        " commit_seconds=0.0).num_documents)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "in.jsonl"), str(tmp_path / "store")]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in running] == ["300\n"] * 3
    assert not (tmp_path / "store.lock").exists()


def test_other_inputs_for_the_same_store(tmp_path):
    make_store(tmp_path, ["a", "b"])
    with pytest.raises(UserError) as raised:
        make_store(tmp_path, ["a", "b", "c"])
    assert raised.value.rule == "A store can be continued only with the inputs and options that it was begun with."
    assert raised.value.fix == ("use the same files and options, choose another --out, or start over with --restart")
    assert make_store(tmp_path, ["a", "b", "c"], restart=True).num_documents == 3


def test_an_input_that_changed_since_the_interruption(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\nbroken\n')
    source = lambda: FileSource(files=find_files(tmp_path / "in.jsonl"))
    options = {"use_bytes": True, "workers": 0}
    monkeypatch.setattr("trellis.data.tokenizing.formats.BLOCK_BYTES", 8)
    with pytest.raises(UserError, match="Every document must be readable"):
        tokenize(source(), tmp_path / "out", **options)
    assert not open_store(tmp_path / "out", growing=True).complete
    (tmp_path / "in.jsonl").write_text('{"text": "b"}\nbroken\n')
    with pytest.raises(UserError, match="an input has changed since"):
        tokenize(source(), tmp_path / "out", **options)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    for restart in (False, True):
        with pytest.raises(
            UserError, match="The output folder of a new store must be empty or not exist yet"
        ) as raised:
            make_store(tmp_path, ["a"], name="precious", restart=restart)
        assert raised.value.seen == "thesis.tex"
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="The output path of a store must be a folder"):
        make_store(tmp_path, ["a"], name="file")


def test_a_worker_that_dies(tmp_path):
    (tmp_path / "dying.py").write_text("import os\ndef keep(record):\n    os._exit(9)\n")
    with pytest.raises(UserError) as raised:
        make_store(tmp_path, ["a"], workers=1, filter=f"{tmp_path / 'dying.py'}:keep")
    assert raised.value.rule == "A tokenizing worker must not die."
    assert raised.value.seen == "a worker ended with code 9"
    assert "continues where it left off" in raised.value.fix


def test_workers_start_without_jax():
    code = "import sys\nfrom trellis.data.tokenizing.pool import _BOOTSTRAP\n"
    probe = "import trellis.data.tokenizing.worker; print([m for m in ('jax', 'zarr', 'fsspec') if m in sys.modules])"
    from trellis.data.tokenizing.pool import _BOOTSTRAP

    package = str(ROOT / "src" / "trellis")
    code = _BOOTSTRAP.format(package=package, data=f"{package}/data", path=sys.path)
    code = code.replace("from trellis.data.tokenizing.worker import main\nmain()", probe)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_embedded_corpus(tmp_path):
    train, validation = embedded_corpus("train"), embedded_corpus("validation")
    names = [file.name for file in train.files]
    assert "dataclasses.py" in names + [file.name for file in validation.files] and names == sorted(names)
    assert not set(names) & {file.name for file in validation.files}
    assert 0.02 < len(validation.files) / len(names) < 0.08
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    with pytest.raises(UserError, match="The split of the embedded corpus must be train or validation"):
        embedded_corpus("test")


@pytest.mark.slow
def test_stores_of_the_embedded_corpus_are_kept(tmp_path, monkeypatch):
    small = {s: FileSource(files=embedded_corpus(s).files[:3], format="text") for s in ("train", "validation")}
    monkeypatch.setattr("trellis.data.embedded.embedded_corpus", lambda split: small[split])
    first = embedded_stores(tmp_path, 300)
    before = tree(tmp_path)
    second = embedded_stores(tmp_path, 300)
    assert tree(tmp_path) == before and first["train"].url == second["train"].url
    assert first["train"].tokenizer().sha256 == first["validation"].tokenizer().sha256
    assert embedded_stores(tmp_path, 301)["train"].url != first["train"].url


def test_a_cache_that_cannot_be_written_names_the_variable_that_moves_it(tmp_path, monkeypatch):
    (tmp_path / "home").touch()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(UserError, match="XDG_CACHE_HOME") as raised:
        embedded_stores()
    assert raised.value.seen == "Not a directory" and raised.value.where.startswith(f"{tmp_path}/home/.cache/trellis/")

    def nobody(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(UserError, match="XDG_CACHE_HOME to a folder that can be written"):
        embedded_stores()


def keep_even(record):
    return record["id"] % 2 == 0


def test_filters(tmp_path):
    (tmp_path / "rules.py").write_text("def keep(record):\n    return record['id'] % 2 == 0\n")
    texts = [str(i) for i in range(10)]
    for i, wanted in enumerate([f"{tmp_path / 'rules.py'}:keep", keep_even]):
        for workers in (0, 1):
            if wanted is keep_even and workers:
                continue  # this file is not importable by name from a worker: tests are no package
            store = make_store(tmp_path, texts, name=f"s{i}{workers}", filter=wanted, workers=workers)
            assert store.num_documents == 5 and store.about["filtered"] == 5
            assert np.array_equal(store.tokens(0, 10), stream(texts[::2]))


@pytest.mark.parametrize(
    ("wanted", "rule"),
    [
        (lambda record: True, "A filter must be a function that worker processes can import."),
        ("keep", "A filter must be named by its module or file."),
    ],
)
def test_filters_that_cannot_be_named(tmp_path, wanted, rule):
    with pytest.raises(UserError) as raised:
        make_store(tmp_path, ["a"], filter=wanted)
    assert raised.value.rule == rule


def test_a_filter_that_fails(tmp_path):
    (tmp_path / "rules.py").write_text("def keep(record):\n    return record['score'] > 0\n")
    for workers in (0, 1):
        with pytest.raises(UserError) as raised:
            make_store(tmp_path, ["a"], name=f"s{workers}", filter=f"{tmp_path / 'rules.py'}:keep", workers=workers)
        assert raised.value.rule == "A filter must return true or false for every record."
        assert raised.value.seen == "KeyError: 'score'" and f"s{workers}.jsonl, line 1" in raised.value.where


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"use_bytes": False}, "Tokenizing needs exactly one tokenizer."),
        ({"train_bpe": 300}, "Tokenizing needs exactly one tokenizer."),
        ({"on_error": "ignore"}, "`on_error` must be fail or skip."),
        ({"chunk_tokens": 0}, "`chunk_tokens` must be a whole number, 1 or more."),
        ({"workers": -1}, "Workers must be a number of processes, or a Ray cluster."),
        (
            {"use_bytes": False, "train_bpe": 9},
            "A byte-level vocabulary must have 257 (256 bytes and the end of a document) to 1,000,000 tokens.",
        ),
    ],
)
def test_wrong_options(tmp_path, options, rule):
    with pytest.raises(UserError) as raised:
        make_store(tmp_path, ["a"], **options)
    assert raised.value.rule == rule


@pytest.mark.parametrize(
    ("name", "content", "seen"),
    [
        ("a.jsonl", b'{"text": "b"}\n{"txt": "a"}\n', "no field 'text' among 'txt'"),
        ("a.jsonl", b'{"text": "b"}\n{"text": ["a"]}\n', "field 'text' is list, not a string"),
        ("a.txt", b"b\xff", "not UTF-8: byte 0xff at 1"),
        ("a.zip", b"PK\3\4\x14\0\0\0\x08\0\x81", "a zip archive, which has to be unpacked"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_told_alike_where_a_tokenizer_is_trained(tmp_path, name, content, seen):
    (tmp_path / name).write_bytes(content)
    told = []
    for how in ({"use_bytes": True}, {"train_bpe": 300}):
        with pytest.raises(UserError, match="Every document must be readable") as raised:
            tokenize(tmp_path / name, tmp_path / "out", workers=0, **how)
        assert raised.value.seen == seen and raised.value.where.startswith(f"{tmp_path / name}, line ")
        told.append(str(raised.value))
    assert told[0] == told[1]


def test_documents_are_skipped_in_files_whose_names_are_not_utf8(tmp_path):
    file = tmp_path / os.fsdecode(b"\xe9.jsonl")
    file.write_bytes(b'{"text": "a"}\n{bad\n')
    for how in ({"use_bytes": True}, {"train_bpe": 300}):
        store = tokenize(file, tmp_path / "out", workers=0, on_error="skip", restart=True, **how)
        assert store.num_documents == store.about["skipped"] == 1
        assert "\\udce9.jsonl, line 2: not JSON" in store.about["skipped_examples"][0]


def test_the_filter_functions_are_found():
    assert worker_module.load_function("json:dumps") is json.dumps
    assert worker_module.load_function("os:path.join") is os.path.join


def test_end_of_document_ids():
    assert END == 256


def test_a_tokenizer_without_the_token_that_it_uses_for_unknown_words(tmp_path):
    """The library raises an exception of no class of its own, when it first meets a word that it does not know."""
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.txt").write_text("a b a")
    for workers in (0, 1):
        with pytest.raises(UserError) as raised:
            tokenize(tmp_path / "in.txt", tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", workers=workers)
        assert raised.value.rule == "The tokenizer must be able to encode any text." and "[UNK]" in raised.value.seen
