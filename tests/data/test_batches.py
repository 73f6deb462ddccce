"""Batches: every token a target exactly once an epoch, in the documented order, on any number of hosts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import END, make_store, random_texts, stream
from trellis.data import Batch, Batches, Shuffle, Store, open_store
from trellis.data.order.packing import best_fit
from trellis.data.sizes import BatchSizes
from trellis.errors import UserError
from trellis.recipes import tiny
from trellis.run.data import Data, StoreSource
from trellis.train.corpus import open_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


def store_of(folder, seed: int, count: int) -> tuple[Store, list[str]]:
    texts = random_texts(np.random.default_rng(seed), count)
    return make_store(folder, texts, name=f"store{seed}-{count}"), texts


def targets_of(batch: Batch) -> list[int]:
    return batch.targets[batch.loss_mask > 0].tolist()


def check_rows(batch: Batch):
    """What holds for every row of every packing."""
    real = batch.segment_ids > 0
    assert np.array_equal(real, batch.loss_mask > 0)
    same = (batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]) & real[:, 1:]
    assert np.array_equal(batch.tokens[:, 1:][same], batch.targets[:, :-1][same])  # shifted by one inside a document
    begins = real & np.concatenate([real[:, :1], ~same], axis=1)
    assert (batch.positions[begins] == 0).all()
    assert (batch.positions[:, 1:][same] == batch.positions[:, :-1][same] + 1).all()
    first_rows = begins.copy()
    first_rows[:, 0] = False
    assert (batch.tokens[:, 0][real[:, 0]] >= 0).all()
    for array in (batch.tokens, batch.targets, batch.positions, batch.loss_mask):
        assert (array[~real] == 0).all()
    return first_rows


@pytest.mark.slow
@given(
    seed=st.integers(0, 5),
    count=st.integers(1, 30),
    length=st.integers(1, 70),
    rows=st.integers(1, 9),
    packing=st.sampled_from(["chunk", "best_fit", "pad"]),
    shuffle=st.sampled_from([True, False, Shuffle(block=4, window=2), Shuffle(block=3, window=2, in_order=True)]),
    hosts=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_every_token_is_a_target_once_an_epoch(folder, seed, count, length, rows, packing, shuffle, hosts):
    store, texts = store_of(folder, seed, count)
    batches = Batches(
        store, sequence_length=length, batch_size=rows, packing=packing, shuffle=shuffle, max_epochs=1, pad_last=True
    )
    found = []
    for step in range(batches.num_steps):
        whole = batches.batch(step)
        check_rows(whole)
        cuts = [rows * h // hosts for h in range(hosts + 1)]  # what each host reads
        parts = [batches.batch(step, rows=slice(a, b)) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        for name in ("tokens", "targets", "loss_mask", "segment_ids", "positions"):
            assert np.array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(whole, name))
        found += targets_of(whole)
    assert np.array_equal(np.sort(found), np.sort(stream(texts)))


def test_chunks_in_order_are_the_stream(folder):
    store, texts = store_of(folder, 1, 20)
    batches = Batches(store, sequence_length=16, batch_size=4, shuffle=False, max_epochs=1, pad_last=True)
    found = [t for step in range(batches.num_steps) for t in targets_of(batches.batch(step))]
    assert found == stream(texts).tolist()
    first = batches.batch(0)
    assert first.tokens[0, 0] == END and first.tokens[1, 0] == stream(texts)[15]
    starts = np.flatnonzero(first.tokens.reshape(-1) == END)
    assert starts.tolist() == [int(o) for o in store.offsets(0, 20) if o < 64]


def test_inside_a_chunk_documents_are_numbered(tmp_path):
    store = make_store(tmp_path, ["ab", "c", "defg"])
    batch = Batches(store, sequence_length=11, batch_size=1, shuffle=False).batch(0)
    a, b, c, d, e, f, g = b"abcdefg"
    assert batch.targets.tolist() == [[a, b, END, c, END, d, e, f, g, END, 0]]
    assert batch.tokens.tolist() == [[END, a, b, END, c, END, d, e, f, g, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0]]
    assert batch.loss_mask.tolist() == [[1.0] * 10 + [0.0]]
    assert [str(getattr(batch, n).dtype) for n in ("tokens", "targets", "loss_mask", "segment_ids", "positions")] == [
        "int32", "int32", "float32", "int32", "int32",
    ]  # fmt: skip


def test_best_fit_keeps_documents_whole(folder):
    store, texts = store_of(folder, 2, 30)
    longest = max(len(t.encode()) for t in texts) + 1
    batches = Batches(store, sequence_length=longest, batch_size=1, packing="best_fit", shuffle=False, max_epochs=1)
    documents = []
    for step in range(batches.num_steps):
        batch = batches.batch(step)
        for segment in range(1, batch.segment_ids.max() + 1):
            documents.append(bytes(batch.targets[batch.segment_ids == segment][:-1].astype(np.uint8)).decode())
    assert sorted(documents) == sorted(texts)
    assert batches.num_steps < len(texts)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_best_fit_is_the_documented_one(lengths):
    """The longest first (of equals the earlier), into the row with the least room that holds it (of equals the one that
    got to that room last), else into a new row."""
    rows: list[list[int]] = []
    room: list[int] = []
    since: list[int] = []
    for clock, piece in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        fitting = [i for i in range(len(rows)) if room[i] >= lengths[piece]]
        if fitting:
            row = min(fitting, key=lambda i: (room[i], -since[i]))
        else:
            row = len(rows)
            rows.append([]), room.append(50), since.append(0)
        rows[row].append(piece)
        room[row] -= lengths[piece]
        since[row] = clock
    order, sizes = best_fit(np.array(lengths), 50)
    assert sizes.tolist() == [len(row) for row in rows]
    assert order.tolist() == [piece for row in rows for piece in row]


def test_a_padded_row_holds_one_document(folder):
    store, texts = store_of(folder, 3, 10)
    batches = Batches(store, sequence_length=200, batch_size=10, packing="pad", shuffle=False)
    batch = batches.batch(0)
    assert (batch.segment_ids.max(axis=1) == 1).all()
    assert [bytes(t[m > 0][:-1].astype(np.uint8)).decode() for t, m in zip(batch.targets, batch.loss_mask)] == texts


def test_the_same_step_is_the_same_batch_and_epochs_reshuffle(folder):
    store, _ = store_of(folder, 4, 30)
    options = {"sequence_length": 8, "batch_size": 4, "seed": 9}
    a, b = Batches(store, **options), Batches(open_store(store.url), **options)
    for step in (0, 17, 1000, 3):
        assert np.array_equal(a.batch(step).targets, b.batch(step).targets)
    rows = store.num_tokens // 8 + 1
    epoch = lambda e: np.concatenate([a.batch(s, None).targets for s in range(e * rows, (e + 1) * rows)])
    assert not np.array_equal(epoch(0)[: rows * 4], epoch(1)[: rows * 4])
    other = Batches(store, sequence_length=8, batch_size=4, seed=10)
    assert not np.array_equal(a.batch(0).targets, other.batch(0).targets)
    of_numpy = Batches(store, sequence_length=8, batch_size=4, seed=np.int64(10))
    assert np.array_equal(of_numpy.batch(0).targets, other.batch(0).targets)


@given(
    stages=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), max_size=4),
    first=st.integers(1, 9),
    step=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_batch_size_schedules(stages, first, step):
    schedule, at = [(0, first)], 0
    for gap, size in stages:
        at += gap
        schedule.append((at, size))
    sizes = BatchSizes(schedule)
    expected = 0
    for s in range(step):
        assert sizes.first_row(s) == expected
        expected += sizes.at(s)
    assert sizes.first_row(step) == expected and sizes.steps_for(expected) == step
    assert sizes.steps_for(expected + sizes.at(step) - 1) == step


@pytest.mark.parametrize(
    "length, rows", [(8, [(0, 2), (5, 7)])] + [([(0, 8), (10**6, 16)], rows) for rows in (2, 3, 5, 7)], ids=str
)
def test_a_schedule_of_sizes_neither_skips_nor_repeats(folder, length, rows):
    """The last batch is padded also if only the end of a longer row is left for it."""
    store, texts = store_of(folder, 5, 30)
    batches = Batches(store, sequence_length=length, batch_size=rows, max_epochs=1, pad_last=True)
    found = [t for step in range(batches.num_steps) for t in targets_of(batches.batch(step))]
    assert np.array_equal(np.sort(found), np.sort(stream(texts)))


@pytest.mark.slow
@given(
    seed=st.integers(0, 3),
    lengths=st.lists(st.sampled_from([4, 16, 32]), min_size=1, max_size=3).map(lambda some: [*some, 64]),
    steps=st.integers(1, 3),
    rows=st.sampled_from([1, 2, 3]),
    shuffle=st.sampled_from([True, False, Shuffle(block=4, window=2)]),
)
@settings(max_examples=12, deadline=None)
def test_a_step_reads_the_same_tokens_at_any_length(folder, seed, lengths, steps, rows, shuffle):
    """Batches of as many tokens: those of a schedule of lengths hold what those of the longest length hold."""
    store, texts = store_of(folder, seed, 30)
    longest = max(lengths)
    at = [steps * i for i in range(len(lengths))]
    sizes = [(step, rows * longest // length) for step, length in zip(at, lengths, strict=True)]
    options = {"seed": seed, "shuffle": shuffle, "max_epochs": 1, "pad_last": True}
    plain = Batches(store, sequence_length=longest, batch_size=rows, **options)
    cut = Batches(store, sequence_length=list(zip(at, lengths, strict=True)), batch_size=sizes, **options)
    assert cut.num_steps == plain.num_steps
    found = []
    for step in range(plain.num_steps):
        batch = cut.batch(step)
        check_rows(batch)
        assert batch.shape == (dict(sizes).get(step, batch.shape[0]), rows * longest // batch.shape[0])
        assert targets_of(batch) == targets_of(plain.batch(step))
        middle = batch.shape[0] // 2
        halves = [cut.batch(step, rows=half) for half in (slice(0, middle), slice(middle, None))]
        assert np.array_equal(np.concatenate([half.targets for half in halves]), batch.targets)
        found += targets_of(batch)
    assert np.array_equal(np.sort(found), np.sort(stream(texts)))


def test_where_lengths_change_in_a_row_the_rest_of_it_is_left_out(folder):
    store, _ = store_of(folder, 5, 30)
    batches = Batches(store, sequence_length=[(0, 4), (1, 8)], batch_size=[(0, 3), (1, 2)], shuffle=False)
    rows = Batches(store, sequence_length=8, batch_size=1, shuffle=False)
    assert batches.batch(0).targets.ravel().tolist() == [*rows.batch(0).targets[0], *rows.batch(1).targets[0, :4]]
    assert batches.batch(1).targets.tolist() == [rows.batch(n).targets[0].tolist() for n in (2, 3)]


@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("packing", ["chunk", "best_fit", "pad"])
def test_the_tokens_of_a_batch_are_counted_without_its_padding(folder, packing, mask_documents, monkeypatch):
    store, _ = store_of(folder, 2, 20)
    options = {"sequence_length": 24, "batch_size": 4, "packing": packing, "max_epochs": 1, "pad_last": True}
    batches = Batches(store, mask_documents=mask_documents, **options)
    counts = [batches.num_tokens(step) for step in range(batches.num_steps)]
    assert counts == [int(batches.batch(step).loss_mask.sum()) for step in range(batches.num_steps)]
    assert sum(counts) == store.num_tokens and counts[-1] < 4 * 24
    assert batches.filled(3) == sum(counts[:3]) / (3 * 4 * 24)
    monkeypatch.setattr("trellis.data.batch_sequence._COUNTED", 0)
    rows = sum((batches.batch(step).loss_mask.any(1)).sum() for step in range(batches.num_steps))
    assert batches.filled(3) == batches.filled(1) == store.num_tokens / (24 * rows)


def test_the_tokens_of_pieces_of_rows_are_counted(folder):
    store, _ = store_of(folder, 5, 30)
    batches = Batches(store, sequence_length=[(0, 8), (5, 16)], batch_size=[(0, 4), (5, 2)])
    for step in range(40):
        assert batches.num_tokens(step) == batches.batch(step).loss_mask.sum()


def test_the_end_of_the_data(folder):
    store, _ = store_of(folder, 1, 20)
    batches = Batches(store, sequence_length=16, batch_size=4, max_epochs=2)
    assert batches.num_steps == 2 * -(-store.num_tokens // 16) // 4
    with pytest.raises(UserError) as raised:
        batches.batch(batches.num_steps)
    assert raised.value.seen == f"step {batches.num_steps}, data for {batches.num_steps}"
    assert raised.value.fix == "train for fewer steps, or allow more epochs"


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"packing": "best"}, "The packing must be one that Trellis knows."),
        (
            {"sequence_length": 0},
            "Sequence lengths must be a positive number, or pairs (first step, tokens) in order of steps, starting at "
            "step 0.",
        ),
        ({"sequence_length": [(0, 6), (9, 8)]}, "Every sequence length must divide the longest."),
        (
            {"sequence_length": [(0, 4), (9, 8)], "packing": "pad"},
            "Several sequence lengths need concatenated documents: all lengths are cut from the same rows.",
        ),
        (
            {"batch_size": 0},
            "Batch sizes must be a positive number, or pairs (first step, rows) in order of steps, starting at step 0.",
        ),
        (
            {"batch_size": [(5, 4)]},
            "Batch sizes must be a positive number, or pairs (first step, rows) in order of steps, starting at step 0.",
        ),
        (
            {"batch_size": 4.5},
            "Batch sizes must be a positive number, or pairs (first step, rows) in order of steps, starting at step 0.",
        ),
        (
            {"sequence_length": 8.5},
            "Sequence lengths must be a positive number, or pairs (first step, tokens) in order of steps, starting at "
            "step 0.",
        ),
        (
            {"sequence_length": [8, 16]},
            "Sequence lengths must be a positive number, or pairs (first step, tokens) in order of steps, starting at "
            "step 0.",
        ),
        ({"max_epochs": 0}, "`max_epochs` must be a whole number of passes, 1 or more."),
        ({"max_epochs": 1.5}, "`max_epochs` must be a whole number of passes, 1 or more."),
        ({"data": "stores/web"}, "Batches are read from an open token store, or from a `Mixture` of several."),
        ({"seed": 1.5}, "A seed must be a whole number; a shuffle must be True, False or a `Shuffle`."),
        ({"shuffle": 7}, "A seed must be a whole number; a shuffle must be True, False or a `Shuffle`."),
    ],
)
def test_wrong_options(folder, options, rule):
    store, _ = store_of(folder, 1, 20)
    with pytest.raises(UserError) as raised:
        Batches(**({"data": store, "sequence_length": 8, "batch_size": 4} | options))
    assert raised.value.rule == rule


def test_a_step_is_a_whole_number(folder):
    store, _ = store_of(folder, 1, 20)
    batches = Batches(store, sequence_length=8, batch_size=np.int64(2))
    assert batches.batch(np.int64(1)).tokens.tolist() == batches.batch(1).tokens.tolist()
    for step in (1.5, -1):
        with pytest.raises(UserError, match="A step must be a whole number, 0 or more"):
            batches.batch(step)


@pytest.mark.parametrize("rows", [slice(0, 2, 2), slice(2, 0, -1), 1])
def test_rows_of_a_batch_are_consecutive(folder, rows):
    store, _ = store_of(folder, 1, 20)
    batches = Batches(store, sequence_length=8, batch_size=4)
    assert np.array_equal(batches.batch(0, slice(1, 3, 1)).tokens, batches.batch(0).tokens[1:3])
    with pytest.raises(UserError, match="Rows of a batch must be a slice of consecutive ones"):
        batches.batch(0, rows)


def test_without_document_masks_a_row_is_one_text(folder):
    store, _ = store_of(folder, 3, 12)
    rows = {"sequence_length": 8, "batch_size": 3}
    with_masks, without = Batches(store, **rows).batch(1), Batches(store, mask_documents=False, **rows).batch(1)
    assert without.segment_ids is None and without.positions is None
    for name in ("tokens", "targets", "loss_mask"):
        assert np.array_equal(getattr(without, name), getattr(with_masks, name))


@pytest.mark.parametrize(("named", "packing"), [("concatenate", "chunk"), ("pack", "best_fit"), ("pad", "pad")])
@pytest.mark.parametrize(("block", "shuffle"), [(1, Shuffle()), (2, Shuffle(block=2, window=16))])
def test_a_run_reads_the_batches_of_the_manual(folder, named, packing, block, shuffle):
    store, _ = store_of(folder, 5, 90)
    source = StoreSource(path=store.url)
    data = Data(source=source, sequence_length=8, packing=named, shuffle_block=block, seed=7)
    batches = open_corpus(dataclasses.replace(tiny(), data=data, batch_size=4)).batches
    same = Batches(store, sequence_length=8, batch_size=4, packing=packing, shuffle=shuffle, seed=7)
    for name in ("tokens", "targets", "segment_ids", "positions"):
        assert np.array_equal(getattr(batches.batch(3), name), getattr(same.batch(3), name))
