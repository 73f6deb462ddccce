"""Mixtures: the shares hold exactly, a source's rows come once an epoch, and the order is a function of the step."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import make_store, random_texts, second_key, second_permutation, stream
from trellis.data import Batches, Mixture
from trellis.data.sizes import BatchSizes
from trellis.errors import UserError

ALL = {"big": 1, "middle": 0, "small": 1}
KNOWN = "Weights must be for known sources, with none negative and not all zero."
SIZES = {"big": 120, "middle": 40, "small": 10}


@pytest.fixture(scope="module")
def texts():
    return {name: random_texts(np.random.default_rng(i), n) for i, (name, n) in enumerate(SIZES.items())}


@pytest.fixture(scope="module")
def stores(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("mixture")
    return {name: make_store(folder, t, name=name) for name, t in texts.items()}


def rows_of(mixture, batch_size=4, **options):
    options = {"packing": "chunk", "shuffle": None, "seed": 0, "max_epochs": None} | options
    return mixture.rows(sizes=BatchSizes(batch_size, 16), **options)


@pytest.mark.slow
@given(weights=st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(sum), block=st.integers(9, 70))
@settings(max_examples=40, deadline=None)
def test_shares_hold_in_every_block_and_never_drift(stores, weights, block):
    mixture = Mixture(stores=stores, weights=dict(zip(stores, weights)), block=block)
    source, index = rows_of(mixture).locate(np.arange(20 * block))
    share = np.array(weights) / sum(weights)
    for blocks in range(1, 21):
        counts = np.bincount(source[: blocks * block], minlength=3)
        off = np.abs(counts - share * blocks * block)
        assert (np.sort(off)[:2] <= 0.5 + 1e-9).all() and off.max() <= 1 + 1e-9
    for s in range(3):
        assert np.array_equal(index[source == s], np.arange(np.count_nonzero(source == s)))
        assert weights[s] or not (source == s).any()


def test_sources_lie_mixed_within_a_block(stores):
    mixture = Mixture(stores=stores, weights={"big": 1, "middle": 1, "small": 1}, block=300)
    source, _ = rows_of(mixture).locate(np.arange(900))
    runs = np.diff(np.flatnonzero(np.diff(source)))
    assert runs.max() < 12 and not np.array_equal(source[:300], source[300:600])


def test_weights_are_numbers_of_any_kind(stores):
    places = [
        rows_of(Mixture(stores=stores, weights=dict(zip(stores, weights)), max_epochs={"big": epochs})).locate(
            np.arange(900)
        )
        for weights, epochs in (
            ([0.5, 0.4, 0.1], 1.5),
            (np.float32([0.5, 0.4, 0.1]), np.float32(1.5)),
            ([Fraction(1, 2), Fraction(2, 5), np.float64(0.1)], Fraction(3, 2)),
        )
    ]
    for place in places[1:]:
        assert np.array_equal(place, places[0])


@pytest.mark.parametrize("epochs", [-1, math.nan, math.inf, "2", True])
def test_epochs_that_are_none(stores, epochs):
    with pytest.raises(UserError, match="The epochs of a source must be a number above 0") as raised:
        Mixture(stores=stores, weights=ALL, max_epochs={"small": epochs})
    assert raised.value.seen == f"{epochs!r} of `small`"


def test_weights_change_at_steps(stores):
    weights = [(0, {"big": 1}), (10, {"small": 1}), (20, {"big": 1, "middle": 0, "small": 1})]
    mixture = Mixture(stores=stores, weights=weights, block=16)
    source, _ = rows_of(mixture, batch_size=[(0, 4), (10, 8)]).locate(np.arange(40 + 80 + 160))
    assert (source[:40] == 0).all() and (source[40:120] == 2).all()
    assert np.bincount(source[120:], minlength=3).tolist() == [80, 0, 80]


def test_every_source_is_read_once_an_epoch(stores, texts):
    mixture = Mixture(stores=stores, weights={"big": 2, "middle": 1, "small": 1}, block=16)
    batches = Batches(mixture, sequence_length=16, batch_size=4, max_epochs=1, pad_last=True, seed=3)
    found = []
    for step in range(batches.num_steps):
        batch = batches.batch(step)
        found += batch.targets[batch.loss_mask > 0].tolist()
    expected = np.concatenate([stream(texts[name]) for name in SIZES])
    assert np.array_equal(np.sort(found), np.sort(expected))


@pytest.mark.slow
@given(
    limits=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    weights=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    change=st.integers(1, 40),
)
@settings(max_examples=25, deadline=None)
def test_limits_of_epochs_are_exact(stores, limits, weights, change):
    names = list(stores)
    schedule = [(0, dict(zip(names, weights))), (change, dict(zip(names, weights[::-1])))]
    mixture = Mixture(stores=stores, weights=schedule, max_epochs=dict(zip(names, limits)), block=16)
    rows = rows_of(mixture)
    expected = [limit * -(-store.num_tokens // 16) for limit, store in zip(limits, stores.values())]
    assert rows.max_rows == sum(expected)
    source, index = rows.locate(np.arange(rows.max_rows))
    assert np.bincount(source, minlength=3).tolist() == expected
    for s in range(3):
        assert np.array_equal(index[source == s], np.arange(expected[s]))


def test_a_source_whose_limit_gives_no_row_is_refused(stores):
    mixture = Mixture(stores=stores, weights=ALL, max_epochs={"small": 0.001})
    with pytest.raises(UserError) as raised:
        rows_of(mixture)
    count = -(-stores["small"].num_tokens // 16)
    assert raised.value.rule == "A source of a mixture must be read for at least one row."
    assert raised.value.seen == f"0.001 epochs of `small`, which has {count:,} rows"
    least = float(raised.value.fix.split()[1])
    mixture = Mixture(stores=stores, weights=ALL, max_epochs={"small": least})
    source, _ = rows_of(mixture).locate(np.arange(4096))
    assert np.count_nonzero(source == 2) == 1


def test_a_source_with_a_limit_leaves_its_share_to_the_others(stores):
    mixture = Mixture(stores=stores, weights=ALL, max_epochs={"small": 1}, block=16)
    rows = rows_of(mixture)
    small = -(-stores["small"].num_tokens // 16)
    source, _ = rows.locate(np.arange(1000))
    last = int(np.flatnonzero(source == 2)[-1])
    assert rows.max_rows is None and np.count_nonzero(source == 2) == small and (source[last + 1 :] == 0).all()
    assert abs(last - 2 * small) <= 16


def test_batches_are_the_same_in_any_pieces(stores):
    mixture = Mixture(stores=stores, weights={"big": 3, "middle": 2, "small": 1}, block=16)
    batches = Batches(mixture, sequence_length=16, batch_size=8, seed=5)
    again = Batches(mixture, sequence_length=16, batch_size=8, seed=5)
    for step in (9, 2, 40):
        whole = batches.batch(step)
        parts = [again.batch(step, rows=slice(i, i + 2)) for i in range(0, 8, 2)]
        assert np.array_equal(np.concatenate([p.targets for p in parts]), whole.targets)
        assert np.array_equal(np.concatenate([p.segment_ids for p in parts]), whole.segment_ids)
        assert batches.num_tokens(step) == whole.loss_mask.sum()


def test_a_mixture_is_filled_as_its_sources_are_whose_rows_it_takes(stores, monkeypatch):
    weights = [(0, {"big": 1, "middle": 0, "small": 0}), (6, {"big": 1, "middle": 2, "small": 1})]
    options = {"sequence_length": 64, "batch_size": 8, "packing": "pad"}
    batches = Batches(Mixture(stores=stores, weights=weights, max_epochs={"small": 1}, block=16), **options)
    counts = [batches.num_tokens(step) for step in range(200)]
    assert batches.filled(20) == sum(counts[:20]) / (20 * 8 * 64)
    monkeypatch.setattr("trellis.data.batch_sequence._COUNTED", 0)
    alone = {name: Batches(store, **options).filled(1) for name, store in stores.items()}
    assert batches.filled(6) == pytest.approx(alone["big"]) and len(set(alone.values())) == 3
    assert batches.filled(200) == pytest.approx(sum(counts) / (200 * 8 * 64), rel=0.02)


def test_the_order_is_the_documented_one(stores):
    """docs/data.md in plain integers: two stages, and one more where the small source has given its last row."""
    block, seed = 16, 77
    weights = [(0, {"big": 0.5, "middle": 0.3, "small": 0.2}), (30, {"big": 0.1, "small": 0.9})]
    mixture = Mixture(stores=stores, weights=weights, max_epochs={"small": 2}, block=block)
    last_small = 2 * -(-stores["small"].num_tokens // 16)
    expected, given, position = [], [0, 0, 0], 0
    for stage in range(3):
        first, used = position, list(given)
        shares = [
            [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)],
            [Fraction(1, 10), 0, Fraction(9, 10)],
            [1, 0, 0],
        ][stage]
        largest = [0, 2, 0][stage]

        def after(blocks, shares=shares, largest=largest):
            counts = [math.floor(share * block * blocks + Fraction(1, 2)) for share in shares]
            counts[largest] += block * blocks - sum(counts)
            return counts

        while position < 1200:
            j, slot = divmod(position - first, block)
            counts = [b - a for a, b in zip(after(j), after(j + 1))]
            layout = [m for m in range(3) for _ in range(counts[m])]
            source = layout[second_permutation(block, second_key(seed, 4, stage, j), slot)]
            expected.append((source, given[source]))
            given[source] += 1
            position += 1
            if (stage == 0 and position == 30 * 4) or (stage == 1 and given[2] == last_small):
                break
        assert all(g >= u for g, u in zip(given, used))
    source, index = rows_of(mixture, seed=seed).locate(np.arange(1200))
    assert list(zip(source.tolist(), index.tolist())) == expected


def test_validation_sets_come_whole(stores, texts):
    mixture = Mixture(
        stores=stores, weights={"big": 1, "middle": 1, "small": 1}, validation={"code/small": stores["small"]}
    )
    batches = mixture.validation_batches(sequence_length=16, batch_size=8)["code/small"]
    found = [
        t
        for step in range(batches.num_steps)
        for t in (lambda b: b.targets[b.loss_mask > 0].tolist())(batches.batch(step))
    ]
    assert found == stream(texts["small"]).tolist()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"weights": [(3, {"big": 1})]}, "Weights must be listed in order of their steps, starting at step 0."),
        ({"weights": {"huge": 1}}, KNOWN),
        ({"weights": {"big": -1, "small": 2}}, KNOWN),
        ({"weights": {"big": 0}}, KNOWN),
        ({"weights": {"big": 1, "small": math.nan}}, KNOWN),
        ({"weights": {"big": math.inf, "small": 1}}, KNOWN),
        ({"weights": {"big": "1"}}, KNOWN),
        ({"weights": {"big": 1, "small": 1}}, "Every source of a mixture needs a weight at some step."),
        ({"weights": ALL, "max_epochs": {"huge": 1}}, "`max_epochs` can only name sources of the mixture."),
        ({"weights": ALL, "block": 8},
         "A block of a mixture needs at least as many rows as the square of its number of sources."),
        ({"weights": {"big": 1}, "stores": {"big": "stores/big"}},
         "The sources of a mixture must be open token stores."),
        ({"weights": ALL, "block": 2**31}, "The order of a mixture's block must fit in memory."),
    ],
)  # fmt: skip
def test_wrong_mixtures(stores, options, rule):
    with pytest.raises(UserError) as raised:
        Mixture(**({"stores": stores} | options))
    assert raised.value.rule == rule


def test_stores_of_two_tokenizers(stores, tmp_path):
    other = make_store(tmp_path, ["a b c"], use_bytes=False, train_bpe=300)
    with pytest.raises(UserError) as raised:
        Mixture(stores={"big": stores["big"], "other": other}, weights={"big": 1, "other": 1})
    assert raised.value.rule == "All stores of a mixture must have the same tokenizer."
    assert raised.value.seen.startswith("big: sha256 ") and ", other: sha256 " in raised.value.seen
    with pytest.raises(UserError, match="must have the same tokenizer"):
        Mixture(stores={"big": stores["big"]}, weights={"big": 1}, validation={"held": other})


def test_longer_sequences_later_keep_the_shares_and_the_tokens_of_a_step(stores):
    weights = [(0, {"big": 1}), (3, {"middle": 2, "small": 1})]
    mixture = Mixture(stores=stores, weights=weights, block=16)
    plain = Batches(mixture, sequence_length=16, batch_size=2, seed=3)
    cut = Batches(mixture, sequence_length=[(0, 4), (2, 8), (5, 16)], batch_size=[(0, 8), (2, 4), (5, 2)], seed=3)
    for step in range(8):
        same = [b.targets[b.loss_mask > 0].tolist() for b in (plain.batch(step), cut.batch(step))]
        assert same[0] == same[1], step
