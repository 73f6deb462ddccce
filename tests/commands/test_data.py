"""`trellis tokenize` and `trellis data` as a user types them."""

import json
import os
import re

import jax
import numpy as np
import pytest

from tests.data.corpora import make_store, random_texts, write_jsonl
from trellis.commands.line import main
from trellis.data import open_store
from trellis.data.store.summary import summarize
from trellis.data.tokenizing import sources
from trellis.data.tokenizing.progress import TokenizingProgress

TEXTS = random_texts(np.random.default_rng(1), 20)


@pytest.fixture
def corpus(tmp_path):
    return str(write_jsonl(tmp_path / "in.jsonl", TEXTS))


def test_tokenize(tmp_path, corpus, capsys):
    out = str(tmp_path / "store")
    assert main(["tokenize", corpus, "--out", out, "--train-bpe", "300", "--workers", "1", "--quiet"]) == 0
    store = open_store(out)
    assert re.fullmatch(
        rf"{out}: {store.num_tokens:,} tokens in 20 documents, vocabulary 300, \d\.\d\d bytes a token\n",
        capsys.readouterr().out,
    )
    tokenizer = str(tmp_path / "store" / "tokenizer.json")
    again = str(tmp_path / "again")
    assert main(["tokenize", corpus, "--out", again, "--tokenizer", tokenizer, "--workers", "0"]) == 0
    assert np.array_equal(open_store(again).tokens(0, 50), store.tokens(0, 50))


def test_options_of_tokenize(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("one—\n\n—\ntwo")
    (tmp_path / "rules.py").write_text("def keep(record):\n    return record['text'] != 'two'\n")
    out = str(tmp_path / "store")
    words = ["tokenize", str(tmp_path / "in.txt"), "--out", out, "--bytes", "--separator", r"—\n", "--workers", "0"]
    assert main([*words, "--filter", f"{tmp_path}/rules.py:keep", "--chunk-tokens", "64"]) == 0
    assert "left out: 1 by the filter, 0 that could not be read" in capsys.readouterr().out
    assert open_store(out).num_documents == 1 and open_store(out).about["chunk_tokens"] == 64
    assert main(words) == 2
    assert (
        "A store can be continued only with the inputs and options that it was begun with." in capsys.readouterr().err
    )
    assert main([*words, "--restart"]) == 0 and open_store(out).num_documents == 2


def test_skipped_documents_are_named(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\nbroken\n')
    words = ["tokenize", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "o"), "--bytes", "--workers", "0"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("trellis: Every document must be readable.\n  seen:  not JSON") and "line 2" in said
    assert main([*words, "--on-error", "skip"]) == 0
    said = capsys.readouterr()
    assert "left out: 0 by the filter, 1 that could not be read" in said.out and "in.jsonl, line 2" in said.err


def test_a_text_that_changed_after_its_store_was_finished(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("one")
    words = ["tokenize", str(tmp_path / "in.txt"), "--out", str(tmp_path / "o"), "--bytes", "--workers", "0", "--quiet"]
    assert main(words) == 0 and main(words) == 0 and not capsys.readouterr().err
    (tmp_path / "in.txt").write_text("two")
    later = (tmp_path / "o" / "zarr.json").stat().st_mtime_ns + 1_000_000
    os.utime(tmp_path / "in.txt", ns=(later, later))
    assert main(words) == 0
    assert capsys.readouterr().err == (
        f"written to after the store was finished: {tmp_path / 'in.txt'}; --restart reads again\n"
    )
    os.utime(tmp_path / "in.txt", ns=(0, 0))
    assert main([*words, "--restart"]) == 0 and not capsys.readouterr().err
    assert open_store(tmp_path / "o").document(0).tobytes()[:6:2] == b"two"


def test_a_store_is_not_made_of_itself(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("one")
    words = ["tokenize", str(tmp_path), "--out", str(tmp_path / "o"), "--bytes", "--workers", "0"]
    assert main(words) == 0 and main(words) == 0
    assert open_store(tmp_path / "o").num_documents == 1
    (tmp_path / "o" / "more.txt").write_text("two")
    refused = {"o": "Every input must be text.", "o/more.txt": "The files to tokenize must lie outside of the store."}
    for given, rule in refused.items():
        assert main(["tokenize", str(tmp_path / given), *words[2:]]) == 2
        assert rule in capsys.readouterr().err


def test_the_standard_library_is_the_default(tmp_path, monkeypatch):
    real = sources.embedded_corpus
    small = sources.FileSource(files=real("train").files[:2], format="text")
    monkeypatch.setattr(sources, "embedded_corpus", lambda split: small)
    assert main(["tokenize", "--out", str(tmp_path / "o"), "--bytes", "--workers", "0", "--quiet"]) == 0
    assert open_store(tmp_path / "o").num_documents == 2


def test_chat(tmp_path, capsys):
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(talk))
    assert main(["tokenize", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "o"), "--bytes", "--chat",
                 "--workers", "0"]) == 0  # fmt: skip
    store = open_store(tmp_path / "o")
    assert store.has_loss_mask
    assert "the tokenizer has no <|im_start|>: what begins and ends a message is written as text" in (
        capsys.readouterr().out
    )
    marked = json.loads(store.tokenizer().json)
    marked["added_tokens"] += [marked["added_tokens"][0] | {"id": 257, "content": "<|im_start|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(marked))
    assert main(["tokenize", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "p"), "--chat", "--workers", "0",
                 "--tokenizer", str(tmp_path / "tokenizer.json")]) == 0  # fmt: skip
    assert "<|im_start|>" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["--bytes"], "the following arguments are required: --out"),
        (["--out", "x"], "one of the arguments --train-bpe --tokenizer --bytes is required"),
        (["--out", "x", "--bytes", "--workers", "many", "none.txt"], "no such file, folder or pattern"),
        (["--out", "x", "--bytes", "--workers", "many"], "many"),
        (["--out", "x", "--tokenizer", "none.json"], "No such file or directory: 'none.json'"),
        (
            ["--out", "x", "--bytes", "--workers", "0", "--filter", "os:gone"],
            "AttributeError: module 'os' has no attribute",
        ),
        (["--out", "x", "--bytes", "dataset:a", "b.txt"], "dataset:a b.txt"),
        (["--out", "x", "--bytes", "a.txt", "--separator", "\\"], "`\\`: \\ at end of string"),
        (["--out", "x", "--bytes", "dataset:a", "--format", "json"], "json, for dataset:a: it has no effect"),
        (
            ["--out", "x", "--bytes", "--field", "a"],
            "a, for the sources of Python's standard library: it has no effect",
        ),
        (["--out", "x", "--bytes", "--train-bytes", "9"], "9, for an existing tokenizer: it has no effect"),
        (["--out", "x", "--bytes", "--end-of-document", "</s>"], "</s>, of a tokenizer that is made here"),
        (["--out", "x", "--tokenizer", "none.json", "--end-of-document", ""], "A token must have a letter."),
    ],
)
def test_wrong_words(words, seen, capsys):
    assert main(["tokenize", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 4 and seen in said


def test_inspect(tmp_path, capsys):
    store = make_store(tmp_path, TEXTS)
    assert main(["data", "inspect", store.url, "--samples", "2"]) == 0
    said = capsys.readouterr().out
    assert f"tokens           {store.num_tokens:,}\n" in said and "documents        20\n" in said
    assert "document lengths in tokens" in said and "#" in said
    assert f"--- document 0\n{TEXTS[0]}<|endoftext|>" in said and "--- document 10\n" in said
    assert main(["data", "inspect", store.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["documents"] == 20
    assert sum(n for _, _, n in found["histogram"]) == 20


def test_the_histogram_of_large_stores_is_a_sample(tmp_path, monkeypatch):
    monkeypatch.setattr("trellis.data.store.summary.HISTOGRAM_DOCUMENTS", 640)
    store = make_store(tmp_path, ["ab"] * 2000)
    found = summarize(store)
    assert found.sampled and found.histogram == [(1, 1, 0), (2, 3, 640)]


def test_no_more_documents_are_shown_than_there_are(tmp_path):
    found = summarize(make_store(tmp_path, TEXTS), samples=2**60)
    assert [i for i, _ in found.samples] == list(range(20))


def test_verify(tmp_path, capsys):
    store = make_store(tmp_path, TEXTS)
    assert main(["data", "verify", store.url]) == 0
    assert re.search(r"store: \d+ chunks match, [\d,]+ tokens in 20 documents\n", capsys.readouterr().out)
    chunk = tmp_path / "store" / "tokens" / "c" / "1"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert main(["data", "verify", store.url]) == 2
    said = capsys.readouterr().out
    assert re.search(r"tokens/c/1: 131 bytes instead of 132; documents \d+ to \d+, from .*in?.jsonl", said) or (
        "store.jsonl" in said
    )
    assert "damaged in 1 places" in said


def test_convert(tmp_path, capsys):
    store = make_store(tmp_path, TEXTS)
    assert main(["data", "convert", store.url, str(tmp_path / "x.bin"), "--to", "megatron"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x.bin'}: written\n"
    assert main(["data", "inspect", str(tmp_path / "x.bin"), "--samples", "1"]) == 0
    assert "bytes per token  not known\n" in capsys.readouterr().out
    assert main(["data", "inspect", str(tmp_path / "x.bin"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["counts"]["bytes per token"] is None
    assert main(["data", "verify", str(tmp_path / "x.bin")]) == 2
    assert "Only Trellis's own stores have checksums." in capsys.readouterr().err


def test_the_progress_line():
    bar = TokenizingProgress([100, 300], enabled=False, done=(1, 100, 1))

    class Block:
        raw, file = 100, 1

    class Encoded:
        text_bytes = 5_000_000

    class Writer:
        counts = {"num_documents": 3, "num_tokens": 1_234_567}

    bar.update(Block, Encoded, Writer)
    assert bar.line(Writer.counts, 200, 2.0) == "3 documents  1,234,567 tokens  2.5 MB/s  50 %  4 s left"
    unknown = TokenizingProgress([None], enabled=False)
    assert unknown.line(Writer.counts, 0, 2.0) == "3 documents  1,234,567 tokens  0.0 MB/s"


def test_progress_is_printed(tmp_path, corpus, capsys, monkeypatch):
    import sys
    import time

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    real, calls = time.monotonic, []
    monkeypatch.setattr(
        "trellis.data.tokenizing.progress.time.monotonic", lambda: real() + len(calls) + (calls.append(1) or 0)
    )
    assert main(["tokenize", corpus, "--out", str(tmp_path / "o"), "--bytes", "--workers", "0"]) == 0
    said = capsys.readouterr().err
    assert "\r\x1b[K20 documents" in said and "100 %" in said and "left" in said


@pytest.mark.slow
def test_a_run_whose_chats_have_no_answer_is_refused_and_tokenizers_are_compared_first(tmp_path, capsys):
    """Nothing would count in its loss; and of two tokenizers, the size of a vocabulary is not what is wrong."""
    assert len(jax.devices()) == 8  # a first command would settle how many there are for all tests
    talk = {"messages": [{"role": "user", "content": "who is there?"}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(talk))
    (tmp_path / "in.txt").write_text("one and two and one and two " * 20)
    for name, words in {"chat": ["--bytes", "--chat"], "text": ["--bytes"], "bpe": ["--train-bpe", "260"]}.items():
        read = tmp_path / ("in.jsonl" if name == "chat" else "in.txt")
        assert main(["tokenize", str(read), "--out", str(tmp_path / name), *words, "--workers", "0", "--quiet"]) == 0
    capsys.readouterr()
    run = ["train", "tiny", "--devices", "1", "--run-dir", str(tmp_path / "run"), "--model.vocab", "257",
           "--data.source.kind", "store", "--data.source.path"]  # fmt: skip
    assert main([*run, str(tmp_path / "chat"), "--evaluation.every", "null"]) == 2
    assert "A store must have tokens that count in the loss.\n  seen:  42 tokens, none of" in capsys.readouterr().err
    assert main([*run, str(tmp_path / "text"), "--data.source.validation", str(tmp_path / "bpe")]) == 2
    assert "A run's data and its model must use the same tokenizer." in capsys.readouterr().err


def test_a_split_is_of_one_format(tmp_path, corpus, capsys):
    out = str(tmp_path / "store")
    assert main(["tokenize", corpus, "--out", out, "--bytes", "--workers", "0", "--quiet"]) == 0
    words = ["data", "convert", out, str(tmp_path / "other"), "--split", "validation"]
    assert main([*words, "--to", "levanter"]) == 2
    assert "  seen:  --split validation --to levanter: it has no effect" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert main([*words, "--to", "seqax"]) == 0 and (tmp_path / "other" / "validation").is_dir()
