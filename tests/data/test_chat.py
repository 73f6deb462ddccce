"""Conversations: the loss is on the assistant's turns alone."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from trellis.data import Batches, FileSource, Store, find_files, open_store, tokenize, train_bpe
from trellis.data.tokenizer import Tokenizer
from trellis.errors import UserError
from trellis.recipes import tiny
from trellis.run.data import StoreSource
from trellis.train.corpus import open_corpus

TALKS = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"},
     {"role": "assistant", "content": "4"}],
    [{"role": "user", "content": "Say <|im_end|>."}, {"role": "assistant", "content": "No."},
     {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It would end here."}],
]  # fmt: skip


def chat_tokenizer() -> Tokenizer:
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(train_bpe(iter([["a b c"]]), 257).json)
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(inner.to_str())


@pytest.fixture
def path(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    return tmp_path / "in.jsonl"


def chat_store(path, **options) -> Store:
    source = FileSource(files=find_files(path), field="messages")
    options = {"tokenizer": chat_tokenizer(), "workers": 0, "chunk_tokens": 32, "chunk_offsets": 4} | options
    return tokenize(source, path.parent / "store", chat=True, **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loss_is_on_the_answers(path, workers):
    store = chat_store(path, workers=workers)
    assert store.has_loss_mask and store.num_documents == 2
    decode = store.tokenizer().decode
    mask = store.loss_mask(0, store.num_tokens).astype(bool)
    counted = decode(store.tokens(0, store.num_tokens)[mask])
    assert counted == "4<|im_end|>\nNo.<|im_end|>\nIt would end here.<|im_end|>\n"
    assert decode(store.document(0)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|endoftext|>"
    )


def test_conversations_are_looked_for_under_messages(path):
    options = {"tokenizer": chat_tokenizer(), "workers": 0, "chat": True}
    assert tokenize(path, path.parent / "other", **options).num_documents == 2


def test_a_marker_inside_a_message_is_text(path):
    store = chat_store(path)
    end = store.tokenizer()._inner.token_to_id("<|im_end|>")
    assert (store.document(1) == end).sum() == 4  # one a turn; the user's own is text
    assert "Say <|im_end|>." in store.tokenizer().decode(store.document(1))


@pytest.mark.parametrize("packing", ["chunk", "best_fit", "pad"])
def test_batches_carry_the_mask(path, packing):
    store = chat_store(path)
    batches = Batches(store, sequence_length=48, batch_size=2, packing=packing, max_epochs=1, pad_last=True)
    counted = []
    for step in range(batches.num_steps):
        batch = batches.batch(step)
        assert (batch.loss_mask[batch.segment_ids == 0] == 0).all()
        counted += batch.targets[batch.loss_mask > 0].tolist()
    mask = store.loss_mask(0, store.num_tokens).astype(bool)
    assert sorted(counted) == sorted(store.tokens(0, store.num_tokens)[mask].tolist())


def test_damaged_masks_are_found(path):
    from trellis.data.store.damage import find_damage

    store = chat_store(path)
    chunk = path.parent / "store" / "loss_mask" / "c" / "1"
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)
    (one,) = find_damage(open_store(store.url, check=False))
    assert one.chunk == "loss_mask/c/1" and one.documents is not None


@pytest.mark.parametrize(
    ("messages", "seen"),
    [
        ([], "a conversation is a list of messages"),
        ("hi", "a conversation is a list of messages"),
        ([{"role": "user"}], "message 1 is not an object with a string `content`"),
        ([{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}],
         "message 2 has the role 'bot', not one of system, user, assistant, tool"),
        ([{"role": "assistant", "content": "I will look.", "tool_calls": [{"function": {"name": "look"}}]}],
         "message 1 has `tool_calls`, which is not written out: only `content` is"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}],
         "message 2 has `reasoning_content`, which is not written out: only `content` is"),
        ([{"role": "assistant", "content": "a", "weight": 0.5}], "message 1 has the weight 0.5, not 0 or 1"),
        ([{"role": "assistant", "content": "a\ud800"}], "message 1 is not UTF-8: half of a surrogate pair"),
    ],
)  # fmt: skip
def test_broken_conversations(tmp_path, messages, seen):
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": messages}))
    with pytest.raises(UserError) as raised:
        chat_store(tmp_path / "in.jsonl")
    assert raised.value.rule == "Every document must be readable." and raised.value.seen == seen


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_tools_beside_a_conversation(tmp_path, name):
    record = {"messages": [{"role": "assistant", "content": "a"}], "parallel_tool_calls": False}
    (tmp_path / "in.jsonl").write_text(json.dumps(record | {name: [{"name": "look"}]}))
    with pytest.raises(UserError) as raised:
        chat_store(tmp_path / "in.jsonl")
    assert raised.value.seen == f"it has `{name}`, which are not written out: only messages are"
    without = [record | {name: nothing} for nothing in ([], None, "[]", "")]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, without)))
    assert chat_store(tmp_path / "in.jsonl").num_documents == 4


def test_tools_in_another_column(tmp_path):
    """Of a table only the columns that are needed are read; these are."""
    table = pa.table({"messages": [[{"role": "assistant", "content": "a"}]], "tools": ['[{"name": "look"}]']})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    for options in ({}, {"tokenizer": None, "train_bpe": 300}):
        with pytest.raises(UserError, match="it has `tools`, which are not written out"):
            chat_store(tmp_path / "in.parquet", **options)


def test_content_in_parts(tmp_path):
    parts = [{"type": "text", "text": "a"}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    with pytest.raises(UserError, match="message 1 is not an object with a string `content`"):
        chat_store(tmp_path / "in.jsonl")


def test_a_tokenizer_that_cuts_or_fills_up_texts(path, tmp_path):
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(chat_tokenizer().json)
    inner.enable_truncation(3)
    inner.enable_padding(length=40, pad_id=5)
    changed = Tokenizer(inner.to_str())
    one, other = chat_store(path), chat_store(path, tokenizer=changed, restart=True)
    assert np.array_equal(one.tokens(0, one.num_tokens), other.tokens(0, other.num_tokens))


def test_an_answer_of_weight_0_does_not_count(tmp_path):
    said = [("a", {"weight": 0}), ("b", {"weight": 1}), ("c", {"weight": None, "tool_calls": None}), ("d", {})]
    talk = [{"role": "assistant", "content": content} | more for content, more in said]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": talk}))
    store = chat_store(tmp_path / "in.jsonl")
    mask = store.loss_mask(0, store.num_tokens).astype(bool)
    counted = store.tokenizer().decode(store.tokens(0, store.num_tokens)[mask])
    assert counted == "b<|im_end|>\nc<|im_end|>\nd<|im_end|>\n"


def test_the_token_that_ends_a_message_does_not_end_a_document(path):
    """As in many tokenizers for chats; each message would be a document, and no answer would see its question."""
    json_of = chat_tokenizer().json
    with pytest.raises(UserError) as raised:
        chat_store(path, tokenizer=Tokenizer(json_of, end_of_document="<|im_end|>"))
    assert raised.value.rule.startswith("The token that ends a document cannot end a message")
    assert raised.value.seen == "<|im_end|>" and "--end-of-document" in raised.value.fix
    store = chat_store(path, tokenizer=Tokenizer(json_of, end_of_document="<|endoftext|>"))
    batch = Batches(store, sequence_length=128, batch_size=1, packing="pad", shuffle=False).batch(0)
    assert set(batch.segment_ids[0]) == {0, 1}


@pytest.mark.parametrize("how", ["byte-level", "SentencePiece"])
def test_a_tokenizer_that_puts_a_space_before_every_text(path, how):
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    if how == "byte-level":
        inner = Inner.from_str(chat_tokenizer().json)
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        vocab = {"<unk>": 0, "</s>": 1, "▁": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
        inner = Inner(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        inner.add_special_tokens(["</s>"])
    with pytest.raises(UserError) as raised:
        chat_store(path, tokenizer=Tokenizer(inner.to_str()))
    assert raised.value.rule == "The tokenizer of a chat must encode the parts of a conversation as they are."
    assert r"user\n a" in raised.value.seen and raised.value.where == "--tokenizer"


def test_a_tokenizer_without_markers_writes_them_out(path):
    store = chat_store(path, tokenizer=None, use_bytes=True)
    assert "<|im_start|>user\n2+2?" in store.tokenizer().decode(store.document(0))
    assert np.count_nonzero(store.loss_mask(0, store.num_tokens)) > 0


def test_texts_hold_no_conversations(tmp_path):
    (tmp_path / "in.txt").write_text("a")
    with pytest.raises(UserError, match=r"Conversations can be read only from records.*\n.*\n  where: --chat"):
        tokenize(tmp_path / "in.txt", tmp_path / "store", use_bytes=True, chat=True)


@pytest.mark.slow
def test_prompts_are_tokens_that_a_run_reads(path):
    store = chat_store(path)
    source = StoreSource(path=str(path.parent / "store"))
    data = dataclasses.replace(tiny().data, source=source, sequence_length=512)
    corpus = open_corpus(dataclasses.replace(tiny(), data=data, batch_size=1))
    assert corpus.batches.num_tokens(0) == store.num_tokens > corpus.batches.batch(0).loss_mask.sum()
    assert not corpus.all_count and open_corpus(tiny()).all_count
