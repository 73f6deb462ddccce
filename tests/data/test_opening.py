"""Other projects' formats: read as they write them, and written as they read them."""

import concurrent.futures
import json
import struct
import sys

import numpy as np
import pytest
import zarr

from tests.data.corpora import END, make_store, random_texts, stream
from trellis.data import Batches, check_vocabulary, open_store, tokenize
from trellis.data.store.bin_files import BinStore
from trellis.data.store.opening import convert
from trellis.data.store.seqax import write_flat_tokens
from trellis.errors import UserError

TEXTS = random_texts(np.random.default_rng(21), 30)
BARE = np.array([t for text in TEXTS for t in text.encode()])  # without ends of documents
STARTS = np.cumsum([0] + [len(text.encode()) for text in TEXTS])


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path, TEXTS)


def check_shifted(store, tokens, starts, start_token):
    """Inputs are the token before, or the start token at a document's first; spans may begin anywhere."""
    is_start = np.isin(np.arange(len(tokens)), starts)
    for begin in (0, 1, 7, len(tokens) - 9):
        inputs, targets, begins = store.shifted(np.array([begin, begin // 2]), 9)
        for row, at in enumerate((begin, begin // 2)):
            here = slice(at, at + 9)
            assert np.array_equal(targets[row], tokens[here]) and np.array_equal(begins[row], is_start[here])
            before = np.concatenate([[start_token], tokens])[here]
            assert np.array_equal(inputs[row], np.where(is_start[here], start_token, before))


def test_seqax(store, tmp_path, monkeypatch):
    monkeypatch.setattr("trellis.data.store.seqax.CHUNK_TOKENS", 100)
    monkeypatch.setattr("trellis.data.store.seqax.CHUNK_STARTS", 7)
    convert(store, str(tmp_path / "flat"), to="seqax")
    group = zarr.open_group(str(tmp_path / "flat" / "train"), mode="r")
    assert group.metadata.zarr_format == 2
    encoded = group["encoded_tokens"][:]
    assert encoded.dtype == np.uint32 and group["seq_starts"].dtype == np.uint64
    assert np.array_equal(encoded >> 1, BARE)
    assert np.array_equal(np.flatnonzero(encoded & 1), STARTS[:-1])
    assert np.array_equal(group["seq_starts"][:], STARTS) and group.attrs["max_token_id"] == BARE.max()
    flat = open_store(tmp_path / "flat" / "train")
    assert (flat.num_tokens, flat.num_documents, flat.vocab_size) == (len(BARE), len(TEXTS), BARE.max() + 1)
    assert np.array_equal(flat.tokens(5, 333), BARE[5:333])
    assert bytes(flat.document(9).astype(np.uint8)).decode() == TEXTS[9]
    check_shifted(flat, BARE, STARTS[:-1], 0)
    with pytest.raises(UserError, match="The output cannot already contain this split"):
        convert(store, str(tmp_path / "flat"), to="seqax")
    with pytest.raises(UserError) as raised:
        open_store(tmp_path / "flat")
    assert raised.value.rule == "The path must lead to one split of a dataset." and raised.value.fix.endswith(
        "flat/train"
    )


@pytest.mark.slow
def test_threads_may_read_seqax_at_once(store, tmp_path, monkeypatch):
    """As a guard reads a batch again while the next one is loaded."""
    monkeypatch.setattr("trellis.data.store.seqax.CHUNK_TOKENS", 100)
    convert(store, str(tmp_path / "flat"), to="seqax")
    flat = open_store(tmp_path / "flat" / "train")
    flat._encoded = flat._encoded[:]  # is read at once
    begins = np.random.default_rng(0).integers(0, len(BARE) - 9, 4_000)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda begin: flat.tokens(begin, begin + 9), begins))
    finally:
        sys.setswitchinterval(before)
    assert all(np.array_equal(x, BARE[begin : begin + 9]) for x, begin in zip(found, begins, strict=True))


def test_seqax_of_many_short_documents_counts_each_of_them_once(tmp_path):
    """And not at each document all that wait."""
    counted = []

    class Tokens(np.ndarray):
        def __len__(self):
            counted.append(1)
            return super().__len__()

    class Short:
        num_documents, num_tokens = 2_000, 4_000
        offsets = staticmethod(lambda start, stop: 2 * np.arange(start, stop))
        tokens = staticmethod(lambda start, stop: (np.arange(start, stop) % 7).view(Tokens))

    write_flat_tokens(Short(), str(tmp_path), split="train")
    assert 0 < len(counted) <= 2 * Short.num_documents
    assert np.array_equal(open_store(tmp_path / "train").tokens(3_990, 4_000), np.arange(3_990, 4_000) % 7)


def test_the_example_of_the_flat_tokens_specification(tmp_path):
    """[[1, 2], [3, 4, 5], [6, 7, 8]], packed into one sequence of eight."""
    group = zarr.open_group(str(tmp_path / "x"), mode="w", zarr_format=2).create_group("train")
    group.create_array("encoded_tokens", data=np.array([3, 4, 7, 8, 10, 13, 14, 16], np.uint32))
    group.create_array("seq_starts", data=np.array([0, 2, 5, 8], np.uint64))
    group.attrs["max_token_id"] = 8
    flat = open_store(tmp_path / "x" / "train")
    batch = Batches(flat, sequence_length=8, batch_size=1, shuffle=False).batch(0)
    assert batch.tokens.tolist() == [[0, 1, 0, 3, 4, 0, 6, 7]]
    assert batch.targets.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.segment_ids.tolist() == [[1, 1, 2, 2, 2, 3, 3, 3]]
    with pytest.raises(UserError, match="8 in the model"):
        check_vocabulary(flat, 8)


def test_flat_tokens_without_their_attribute(tmp_path):
    group = zarr.open_group(str(tmp_path / "x"), mode="w", zarr_format=2)
    group.create_array("encoded_tokens", data=np.array([3], np.uint32))
    group.create_array("seq_starts", data=np.array([0, 1], np.uint64))
    with pytest.raises(UserError, match="no max_token_id"):
        open_store(tmp_path / "x")


def test_nanogpt(store, tmp_path):
    convert(store, str(tmp_path / "train.bin"), to="nanogpt")
    assert np.array_equal(np.fromfile(tmp_path / "train.bin", "<u2"), stream(TEXTS))
    read = BinStore(str(tmp_path / "train.bin"), vocab_size=257, end_of_document=END)
    assert read.num_documents == len(TEXTS) and np.array_equal(read.document(3), store.document(3))
    options = {"sequence_length": 16, "batch_size": 4, "seed": 2}
    for step in (0, 9):
        a, b = Batches(read, **options).batch(step), Batches(store, **options).batch(step)
        assert np.array_equal(a.targets, b.targets) and np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.segment_ids, b.segment_ids)


def test_nanogpt_as_it_comes(tmp_path):
    """GPT-2's tokens: u16, 50,256 ends a document."""
    tokens = np.array([10, 20, 50256, 30, 50256, 7], np.uint16)
    tokens.tofile(tmp_path / "val.bin")
    read = open_store(tmp_path / "val.bin")
    assert read.vocab_size == 50257 and read.num_documents == 3
    assert [read.document(i).tolist() for i in range(3)] == [[10, 20, 50256], [30, 50256], [7]]
    np.array([60000], np.uint16).tofile(tmp_path / "other.bin")
    with pytest.raises(UserError, match="Every id in a .bin file must be in its vocabulary"):
        open_store(tmp_path / "other.bin").tokens(0, 1)


def test_bins_of_other_kinds(tmp_path):
    """Nothing in them says what they hold; what no text begins with is refused."""
    path, tokens = tmp_path / "x.bin", np.arange(1, 200)
    for contents, seen in (
        (
            struct.pack("<256i", 20240520, 1, *[0] * 254) + tokens.astype("<u2").tobytes(),
            "the header that llm.c writes",
        ),
        (tokens.astype("<u4").tobytes(), "every second uint16 is 0, as in numbers of 32 bits"),
        (tokens.astype("u1").tobytes(), "199 bytes for uint16"),
    ):
        path.write_bytes(contents)
        with pytest.raises(UserError) as raised:
            open_store(path)
        assert raised.value.seen.startswith(seen) and raised.value.where == str(path)
    path.write_bytes(tokens.astype("<u4").tobytes())
    assert np.array_equal(BinStore(str(path), dtype="uint32").tokens(0, 199), tokens)


def test_megatron(store, tmp_path):
    convert(store, str(tmp_path / "corpus.bin"), to="megatron")
    data = (tmp_path / "corpus.idx").read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<QBQQ", data, 9) == (1, 8, len(TEXTS), len(TEXTS) + 1)
    lengths = np.frombuffer(data, "<i4", len(TEXTS), 34)
    assert lengths.tolist() == [len(text.encode()) + 1 for text in TEXTS]
    pointers = np.frombuffer(data, "<i8", len(TEXTS), 34 + 4 * len(TEXTS))
    assert np.array_equal(pointers, 2 * (np.cumsum(lengths) - lengths))
    assert np.frombuffer(data, "<i8", -1, 34 + 12 * len(TEXTS)).tolist() == list(range(len(TEXTS) + 1))
    read = open_store(tmp_path / "corpus.bin")
    assert read.start_token == END and read.vocab_size == 257 and read.num_documents == len(TEXTS)
    starts = np.cumsum([0] + [len(text.encode()) + 1 for text in TEXTS])[:-1]
    check_shifted(read, stream(TEXTS), starts, END)
    for packing in ("chunk", "best_fit"):
        options = {"sequence_length": 16, "batch_size": 4, "packing": packing}
        assert np.array_equal(Batches(read, **options).batch(2).targets, Batches(store, **options).batch(2).targets)


def test_megatron_documents_of_several_sequences(tmp_path):
    """Sentences are sequences; documents are the index's runs of them. i32 tokens, no ends of documents."""
    np.arange(10, dtype=np.int32).tofile(tmp_path / "m.bin")
    lengths = np.array([2, 3, 1, 4], "<i4")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 4, 3)
    pointers = (4 * np.array([0, 2, 5, 6])).astype("<i8")
    (tmp_path / "m.idx").write_bytes(
        header + lengths.tobytes() + pointers.tobytes() + np.array([0, 2, 4], "<i8").tobytes()
    )
    read = open_store(tmp_path / "m.bin")
    assert read.num_documents == 2 and read.document(1).tolist() == [5, 6, 7, 8, 9] and read.start_token == 0


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda d: b"X" + d[1:], "no index header"),
        (lambda d: d[:9] + struct.pack("<Q", 2) + d[17:], "version 2, type 8"),
        (lambda d: d[:100], "100 bytes for 30 sequences"),
    ],
)
def test_a_broken_megatron_index(store, tmp_path, change, seen):
    convert(store, str(tmp_path / "c.bin"), to="megatron")
    path = tmp_path / "c.idx"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError) as raised:
        open_store(tmp_path / "c.bin")
    assert raised.value.rule == "A Megatron .bin needs a matching .idx file of version 1." and raised.value.seen == seen


def test_megatron_bin_cut_short(store, tmp_path):
    convert(store, str(tmp_path / "c.bin"), to="megatron")
    data = (tmp_path / "c.bin").read_bytes()
    (tmp_path / "c.bin").write_bytes(data[:-20])
    with pytest.raises(UserError, match="tokens in the index"):
        open_store(tmp_path / "c.bin")


def write_levanter(folder, ends):
    """A cache as levanter.store.JaggedArrayStore lays it out: zarr3 arrays, sharded and larger than what they hold."""
    import tensorstore as ts

    def array(name, dtype, values):
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(folder / "input_ids" / name)},
            "metadata": {
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [512]}},
                "codecs": [{"name": "sharding_indexed", "configuration": {
                    "chunk_shape": [64], "codecs": [{"name": "blosc", "configuration": {"clevel": 5}}]}}],
            },
        }  # fmt: skip
        store = ts.open(spec, dtype=dtype, shape=[2**54], create=True).result()
        store[: len(values)].write(np.array(values, dtype)).result()

    array("offsets", "int64", [len(ends), *ends])
    array("data", "int32", stream(TEXTS))
    (folder / "shard_ledger.json").write_text(json.dumps({"total_num_rows": len(ends), "is_finished": True}))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_levanter(store, tmp_path):
    ends = np.cumsum([len(text.encode()) + 1 for text in TEXTS])
    write_levanter(tmp_path / "cache" / "train", ends.tolist())
    read = open_store(tmp_path / "cache" / "train")
    assert (read.num_tokens, read.num_documents, read.vocab_size) == (store.num_tokens, len(TEXTS), 257)
    assert np.array_equal(read.tokens(0, read.num_tokens), stream(TEXTS)) and read.start_token == END
    check_shifted(read, stream(TEXTS), np.concatenate([[0], ends[:-1]]), END)
    ledger = tmp_path / "cache" / "train" / "shard_ledger.json"
    ledger.write_text(json.dumps({"total_num_rows": 3, "is_finished": False}))
    with pytest.raises(UserError, match="A Levanter cache must be finished before it is read"):
        open_store(tmp_path / "cache" / "train")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_writing_for_levanter(store, tmp_path, monkeypatch):
    """Read back the way Levanter does, with TensorStore."""
    import tensorstore as ts

    monkeypatch.setattr("trellis.data.store.levanter.CHUNK", 16)
    monkeypatch.setattr("trellis.data.store.levanter.SHARD", 64)
    convert(store, str(tmp_path / "cache"), to="levanter")

    def open_array(name):
        kvstore = {"driver": "file", "path": str(tmp_path / "cache" / "input_ids" / name)}
        return ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()

    offsets, data = open_array("offsets"), open_array("data")
    assert offsets.shape == data.shape == (2**54,)
    assert int(offsets[0].read().result()) == len(TEXTS)
    ends = offsets[1 : len(TEXTS) + 1].read().result()
    assert np.array_equal(ends, np.cumsum([len(text.encode()) + 1 for text in TEXTS]))
    assert np.array_equal(data[: int(ends[-1])].read().result(), stream(TEXTS))
    ledger = json.loads((tmp_path / "cache" / "shard_ledger.json").read_text())
    assert ledger["is_finished"] and ledger["total_num_rows"] == len(TEXTS)
    back = open_store(tmp_path / "cache")
    assert np.array_equal(back.document(4), store.document(4))
    with pytest.raises(UserError, match="The output folder cannot already contain a Levanter cache"):
        convert(store, str(tmp_path / "cache"), to="levanter")


def test_conversions_that_cannot_be(store, tmp_path):
    with pytest.raises(UserError, match="use seqax, nanogpt, megatron or levanter"):
        convert(store, str(tmp_path / "x"), to="arrow")
    with pytest.raises(UserError, match=r"The name of a .bin file must end in .bin") as raised:
        convert(store, str(tmp_path / "x"), to="nanogpt")
    assert raised.value.fix == f"write to {tmp_path / 'x'}.bin"
    with pytest.raises(UserError, match="The split of a flat-tokens dataset must be train or validation"):
        convert(store, str(tmp_path / "x"), to="seqax", split="test")


@pytest.mark.parametrize(("to", "at"), [("nanogpt", "x.bin"), ("megatron", "x.bin"), ("megatron", "x.idx"),
                                       ("seqax", "zarr.json"), ("levanter", "zarr.json")])  # fmt: skip
def test_conversions_write_over_nothing(store, tmp_path, to, at):
    (tmp_path / at).write_text('{"attributes": {"trellis": {}}}')
    out = tmp_path if at == "zarr.json" else tmp_path / "x.bin"
    with pytest.raises(UserError, match="A converted store must be written to a place of its own"):
        convert(store, str(out), to=to)
    assert (tmp_path / at).read_text() == '{"attributes": {"trellis": {}}}'


@pytest.mark.parametrize("to", ["seqax", "nanogpt", "megatron", "levanter"])
def test_a_store_of_conversations_is_not_converted(tmp_path, to):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": talk}))
    chat = tokenize(tmp_path / "in.jsonl", tmp_path / "chat", chat=True, use_bytes=True, workers=0)
    with pytest.raises(UserError, match="Only a store whose tokens all count in the loss can be converted"):
        convert(chat, str(tmp_path / "x.bin"), to=to)
    assert not (tmp_path / "x.bin").exists()


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match="The token store must exist"):
        open_store(tmp_path / "none.bin")
    (tmp_path / "empty.bin").touch()
    with pytest.raises(UserError, match="0 bytes"):
        open_store(tmp_path / "empty.bin")


def test_a_format_without_a_tokenizer(store, tmp_path):
    convert(store, str(tmp_path / "c.bin"), to="megatron")
    with pytest.raises(UserError, match="Decoding needs the store's tokenizer"):
        open_store(tmp_path / "c.bin").tokenizer()
