"""The store's format: what other readers see, and what damage looks like."""

import json
import os
import shutil

import numpy as np
import pytest
import zarr

from tests.data.corpora import SecondReader, make_store, random_texts, stream, tree
from trellis.data import (
    Batches,
    Tokenizer,
    byte_tokenizer,
    check_tokenizer,
    check_vocabulary,
    load_tokenizer,
    open_store,
    tokenize,
    train_bpe,
)
from trellis.data.store.damage import find_damage
from trellis.data.store.store import smallest_dtype
from trellis.data.store.summary import summarize
from trellis.data.store.zarray import crc32c
from trellis.errors import UserError


@pytest.fixture
def texts():
    return random_texts(np.random.default_rng(3), 40)


@pytest.fixture
def store(tmp_path, texts):
    return make_store(tmp_path, texts)


def test_any_range_and_any_document(store, texts):
    expected = stream(texts)
    assert store.num_tokens == len(expected) and store.num_documents == len(texts)
    for start, stop in [(0, 0), (0, 1), (63, 65), (0, len(expected)), (100, 300), (len(expected) - 1, len(expected))]:
        assert np.array_equal(store.tokens(start, stop), expected[start:stop])
    for i in (0, 1, 17, len(texts) - 1):
        assert bytes(store.document(i)[:-1].astype(np.uint8)).decode() == texts[i]
        assert store.document(i)[-1] == store.end_of_document == 256
    with pytest.raises(IndexError, match="document 40 of 40"):
        store.document(40)
    with pytest.raises(IndexError):
        store.tokens(5, len(expected) + 1)


def test_a_file_is_read_whole_if_the_system_reads_a_part_at_a_time(store, texts, monkeypatch):
    """As Linux does with more than 2 GiB."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 5), at))
    again = open_store(store.url)
    assert np.array_equal(again.tokens(0, again.num_tokens), stream(texts))
    assert not list(find_damage(again))


def test_zarr_reads_it(store, texts):
    group = zarr.open_group(store.url, mode="r")
    assert np.array_equal(group["tokens"][:], stream(texts)) and group["tokens"].dtype == np.uint16
    assert group["offsets"].shape == (len(texts) + 1,)
    assert group["offsets"][-1] == store.num_tokens
    assert group.attrs["trellis"]["num_documents"] == len(texts)


def test_a_reader_written_from_the_documentation_reads_it(tmp_path, store, texts):
    second = SecondReader(tmp_path / "store")
    assert second.documents() == [[*text.encode(), 256] for text in texts]
    assert second.about["text_bytes"] == sum(len(text.encode()) for text in texts)


def test_bytes_per_token(store, texts):
    size = sum(len(text.encode()) for text in texts)
    assert store.bytes_per_token == pytest.approx(size / (size + len(texts)))
    assert store.tokenizer().token_bytes.sum() == 256


def test_the_smallest_type(tmp_path):
    assert [smallest_dtype(n).name for n in (256, 257, 65_536, 65_537)] == ["uint8", "uint16", "uint16", "uint32"]


def test_nothing_there_from_this_folder(tmp_path, monkeypatch):
    """A run has the path that it was given; it may be resumed from another folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        open_store("stores/mine")
    assert (raised.value.seen, raised.value.where) == (f"no such folder in {tmp_path}", "stores/mine")


def test_nothing_there(tmp_path):
    with pytest.raises(UserError) as raised:
        open_store(tmp_path / "none")
    assert str(raised.value) == (
        f"A token store must be a Zarr group.\n  seen:  no such folder\n  where: {tmp_path / 'none'}\n"
        "  fix:   use the path that `trellis tokenize --out` was given"
    )
    (tmp_path / "texts").mkdir()
    with pytest.raises(UserError, match="no zarr.json\n.*\n.*was given$"):
        open_store(tmp_path / "texts")
    (tmp_path / "texts" / "1.txt").touch()
    with pytest.raises(UserError, match="no zarr.json") as raised:
        open_store(tmp_path / "texts")
    assert f"to make one from text: trellis tokenize {tmp_path / 'texts'} --out" in raised.value.fix
    with pytest.raises(UserError) as raised:
        open_store(tmp_path / "texts" / "1.txt")
    assert raised.value.seen == "a file" and "trellis tokenize" in raised.value.fix.partition("; ")[2]


def test_another_zarr_group(tmp_path):
    zarr.open_group(str(tmp_path / "group"), mode="w", attributes={"a": 1})
    with pytest.raises(UserError, match=r"attributes \['a'\]"):
        open_store(tmp_path / "group")


def test_metadata_that_is_not_json(store, tmp_path):
    (tmp_path / "store" / "zarr.json").write_text('{"zarr_format": 3, "attr')
    with pytest.raises(UserError, match="The metadata of a token store must be valid JSON") as raised:
        open_store(store.url)
    assert "the file is damaged" in raised.value.fix


def test_another_version(store, tmp_path):
    path = tmp_path / "store" / "zarr.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(UserError, match="can read only version 1 of the store format") as raised:
        open_store(store.url)
    assert raised.value.seen == "version 9"


def damage(folder, how):
    chunk = folder / "tokens" / "c" / "3"
    data = bytearray(chunk.read_bytes())
    if how == "flipped":
        data[20] ^= 0x10
        chunk.write_bytes(data)
    elif how == "cut":
        chunk.write_bytes(data[:50])
    elif how == "empty":
        chunk.write_bytes(b"")
    elif how == "missing":
        chunk.unlink()
    elif how == "swapped":
        shutil.copy(folder / "tokens" / "c" / "2", chunk)


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("flipped", "CRC-32C"),
        ("cut", "50 bytes instead of 132"),
        ("empty", "0 bytes instead of 132"),
        ("missing", "the chunk is missing"),
    ],
)
def test_damage_is_found_when_it_is_read(store, tmp_path, how, seen):
    damage(tmp_path / "store", how)
    opened = open_store(store.url)
    opened.tokens(0, 192)
    with pytest.raises(UserError) as raised:
        opened.tokens(190, 200)
    assert "A chunk of a token store must match its size and checksum." in str(raised.value)
    assert seen in raised.value.seen and raised.value.where.endswith("store/tokens/c/3")
    assert "`trellis data verify STORE` names the documents" in raised.value.fix


@pytest.mark.parametrize("how", ["cut", "empty", "missing"])
def test_missing_bytes_are_noticed_without_checksums(store, tmp_path, how):
    damage(tmp_path / "store", how)
    opened = open_store(store.url, check=False)
    with pytest.raises(UserError, match="must match its size and checksum"):
        opened.tokens(192, 256)


def test_ids_outside_the_vocabulary_are_noticed_without_checksums(store, tmp_path):
    chunk = tmp_path / "store" / "tokens" / "c" / "0"
    data = bytearray(chunk.read_bytes())
    data[1] = 0xFF
    chunk.write_bytes(data)
    with pytest.raises(UserError, match="in a vocabulary of 257"):
        open_store(store.url, check=False).tokens(0, 10)


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "missing", "swapped"])
def test_verify_names_the_documents(store, tmp_path, texts, how):
    assert list(find_damage(store)) == []
    damage(tmp_path / "store", how)
    found = list(find_damage(open_store(store.url, check=False)))
    offsets = store.offsets(0, len(texts) + 1)
    if how == "swapped":  # a whole chunk in the wrong place matches its own checksum, but documents end elsewhere
        assert len(found) == 1 and "no end of a document" in found[0].problem
        return
    (one,) = found
    assert one.chunk == "tokens/c/3"
    assert one.documents == (np.searchsorted(offsets, 192, "right") - 1, np.searchsorted(offsets, 255, "right") - 1)
    assert one.files == (str(tmp_path / "store.jsonl"),) * 2


def test_verify_finds_damaged_offsets(store, tmp_path):
    chunk = tmp_path / "store" / "offsets" / "c" / "1"
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)
    (one,) = find_damage(open_store(store.url, check=False))
    assert one.chunk == "offsets/c/1" and one.documents == (7, 15) and "CRC-32C" in one.problem
    data[-4:] = crc32c(bytes(data[:-4])).to_bytes(4, "little")
    chunk.write_bytes(data)
    problems = [d.problem for d in find_damage(open_store(store.url, check=False))]
    assert "not an increasing sequence from 0" in problems


@pytest.mark.parametrize(("offset", "value"), [(3, 1), (2, 1 << 40)])
def test_offsets_that_cannot_be_are_noticed_without_checksums(store, tmp_path, offset, value):
    path = tmp_path / "store" / "offsets" / "c" / "0"
    data = np.frombuffer(path.read_bytes()[:-4], "<u8").copy()
    data[offset] = value
    path.write_bytes(data.tobytes() + path.read_bytes()[-4:])
    with pytest.raises(UserError, match="A chunk of a token store must match its size and checksum") as raised:
        Batches(open_store(store.url, check=False), sequence_length=8, batch_size=1, packing="best_fit")
    assert raised.value.seen == f"no increasing numbers up to {store.num_tokens:,}"


def test_verify_when_the_counts_are_too_small(store, tmp_path):
    path = tmp_path / "store" / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["attributes"]["trellis"]["num_tokens"] -= 9
    path.write_text(json.dumps(metadata))
    assert "instead of" in next(iter(find_damage(open_store(store.url)))).problem
    assert len(list(find_damage(open_store(store.url)))) == 1


def test_a_model_with_too_few_ids(store):
    check_vocabulary(store, 257)
    with pytest.raises(UserError) as raised:
        check_vocabulary(store, 256)
    assert raised.value.rule == "The model's vocabulary must include every token id of the store."
    assert raised.value.seen == "257 ids in the store, 256 in the model"
    assert raised.value.fix.startswith("use --model.vocab 257 or more; for a model that was imported, ")
    assert raised.value.fix.endswith("without the tokens from 256 on")


def test_a_store_of_another_tokenizer(store):
    check_tokenizer(store, byte_tokenizer())
    with pytest.raises(UserError, match="A run's data and its model must use the same tokenizer") as raised:
        check_tokenizer(store, train_bpe(iter([["aa bb"]]), 257))
    assert raised.value.where == store.url


def test_a_store_whose_tokenizer_was_replaced(store, tmp_path):
    path = tmp_path / "store" / "tokenizer.json"
    path.write_text(train_bpe(iter([["aa bb"]]), 258).json)
    with pytest.raises(UserError, match="A store's tokenizer must be the one that made its tokens"):
        open_store(store.url).tokenizer()
    (damage,) = find_damage(open_store(store.url))
    assert str(damage).startswith("tokenizer.json: sha256")
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="A store's tokenizer must be valid UTF-8"):
        summarize(open_store(store.url))  # and not the numbers of tokens, as of a format that holds no tokenizer
    path.unlink()
    with pytest.raises(UserError, match="A store must contain its tokenizer"):
        open_store(store.url).tokenizer()


def test_metadata_that_lacks_something(store, tmp_path):
    path = tmp_path / "store" / "zarr.json"
    about = json.loads(path.read_text())
    del about["attributes"]["trellis"]["dtype"]
    path.write_text(json.dumps(about))
    with pytest.raises(UserError, match="The metadata of a token store must be complete") as raised:
        open_store(store.url)
    assert raised.value.seen == "no dtype"


def test_opening_reads_only_metadata(store, tmp_path, monkeypatch):
    """A store of 1e13 tokens opens as one of 1e3: nothing but the group's metadata is read."""
    path = tmp_path / "store" / "zarr.json"
    about = json.loads(path.read_text())
    about["attributes"]["trellis"] |= {"num_tokens": 10**13, "num_documents": 10**10}
    path.write_text(json.dumps(about))
    from trellis.data.storage import LocalFolder

    read = []
    original = LocalFolder.read
    monkeypatch.setattr(LocalFolder, "read", lambda self, name, *a: read.append(name) or original(self, name, *a))
    opened = open_store(store.url)
    assert set(read) == {"zarr.json"} and opened.num_tokens == 10**13


def test_the_files_of_a_store(store, tmp_path):
    assert sorted({name.split("/")[0] for name in tree(tmp_path / "store")}) == [
        "files", "offsets", "sources.json", "tokenizer.json", "tokens", "zarr.json",
    ]  # fmt: skip
    assert store.sources()[0]["name"] == str(tmp_path / "store.jsonl")


def test_byte_level_vocabularies_without_merges_keep_their_ids(tmp_path):
    """Only the one that has every byte as its id is encoded without the tokenizer."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    inner.train_from_iterator([], trainers.BpeTrainer(vocab_size=257, special_tokens=["<|endoftext|>"], **options))
    more = tokenizers.Tokenizer.from_str(byte_tokenizer().json)
    more.add_tokens(["all"])
    (tmp_path / "in.txt").write_text("hé, all")
    for name, one in (("sorted", inner), ("more", more)):
        store = tokenize(tmp_path / "in.txt", tmp_path / name, tokenizer=Tokenizer(one.to_str()), workers=0)
        assert store.document(0)[:-1].tolist() == one.encode("hé, all").ids
        assert store.tokenizer().decode(store.document(0)[:-1]) == "hé, all"


@pytest.mark.parametrize("contents", ["{", "[]", '{"eos_token": ["</s>"]}', '{"eos_token": {}}'])
def test_a_broken_configuration_of_a_tokenizer(tmp_path, contents):
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().json)
    (tmp_path / "tokenizer_config.json").write_text(contents)
    with pytest.raises(UserError) as raised:
        load_tokenizer(str(tmp_path))
    assert raised.value.rule == "A tokenizer_config.json must be a JSON object whose eos_token is a text or has one."
    assert raised.value.where == str(tmp_path / "tokenizer_config.json")
    assert load_tokenizer(str(tmp_path), end_of_document="<|endoftext|>").end_of_document == 256


def test_a_tokenizer_from_a_store_ends_documents_as_the_store_does(tmp_path):
    """As of a Hugging Face folder whose end of documents is none of the usual names, or not the first of them."""
    (tmp_path / "hf").mkdir()
    about = json.loads(byte_tokenizer().json)
    about["added_tokens"].append(about["added_tokens"][0] | {"id": 257, "content": "<|stop|>"})
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(about))
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<|stop|>"}')
    (tmp_path / "in.txt").write_text("a")
    (tmp_path / "held.txt").write_text("b")
    store = tokenize(tmp_path / "in.txt", tmp_path / "store", tokenizer=str(tmp_path / "hf"), workers=0)
    held = tokenize(tmp_path / "held.txt", tmp_path / "held", tokenizer=str(tmp_path / "store"), workers=0)
    assert store.end_of_document == held.end_of_document == 257
    check_tokenizer(held, store.tokenizer())
    assert load_tokenizer(str(tmp_path / "store"), end_of_document="<|endoftext|>").end_of_document == 256


def test_a_tokenizer_that_encodes_by_chance():
    about = json.loads(byte_tokenizer().json)
    about["model"]["dropout"] = 0.25
    with pytest.raises(UserError) as raised:
        Tokenizer(json.dumps(about))
    assert raised.value.rule == "A tokenizer must encode a text alike every time."
    assert raised.value.seen == "a model with dropout 0.25"
