"""Orders of rows: every epoch holds every row once, and is another one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import second_key, second_permutation
from trellis.data.order.order import Order, Shuffle, windowed
from trellis.errors import UserError

shuffles = st.one_of(
    st.none(),
    st.just(Shuffle()),
    st.builds(Shuffle, block=st.integers(1, 40), window=st.integers(1, 6), in_order=st.booleans()),
)


@pytest.mark.slow
@given(n=st.integers(1, 400), seed=st.integers(0, 2**63), shuffle=shuffles, epoch=st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_an_epoch_holds_every_row_once(n, seed, shuffle, epoch):
    rows = Order(n, seed=seed, shuffle=shuffle).rows(np.arange(epoch * n, (epoch + 1) * n))
    assert np.array_equal(np.sort(rows), np.arange(n))


@pytest.mark.slow
@given(n=st.integers(1, 200), shuffle=shuffles, cuts=st.lists(st.integers(0, 300), max_size=4))
@settings(max_examples=30, deadline=None)
def test_positions_may_be_asked_for_in_any_pieces(n, shuffle, cuts):
    order = Order(n, seed=1, shuffle=shuffle)
    positions = np.arange(300)
    pieces = [order.rows(piece) for piece in np.split(positions, sorted(cuts))]
    assert np.array_equal(np.concatenate(pieces), order.rows(positions))
    assert np.array_equal(order.rows(positions.reshape(3, 100)), order.rows(positions).reshape(3, 100))


@pytest.mark.parametrize(
    "shuffle", [Shuffle(), Shuffle(block=10, window=3), Shuffle(block=10, window=3, in_order=True)]
)
def test_epochs_and_seeds_differ(shuffle):
    n = 200
    first = Order(n, seed=0, shuffle=shuffle).rows(np.arange(2 * n))
    other = Order(n, seed=1, shuffle=shuffle).rows(np.arange(n))
    assert np.mean(first[:n] == first[n:]) < 0.1 and np.mean(first[:n] == other) < 0.1


def test_the_plain_shuffle_is_the_documented_one():
    n, seed = 37, 11
    rows = Order(n, seed=seed, shuffle=Shuffle()).rows(np.arange(3 * n))
    expected = [second_permutation(n, second_key(seed, i // n, 1), i % n) for i in range(3 * n)]
    assert rows.tolist() == expected


def test_the_blocked_shuffle_is_the_documented_one():
    n, seed, block, window = 47, 3, 5, 2
    rows = Order(n, seed=seed, shuffle=Shuffle(block=block, window=window)).rows(np.arange(2 * n))
    expected = []
    for i in range(2 * n):
        epoch, place = divmod(i, n)
        whole = n // block * block
        if place >= whole:
            key = second_key(seed, epoch, 3, -1)
            expected.append(whole + second_permutation(n - whole, key, place - whole))
            continue
        w, offset = divmod(place, block * window)
        size = min(block * window, whole - w * block * window)
        moved = w * block * window + second_permutation(size, second_key(seed, epoch, 3, w), offset)
        at = second_permutation(whole // block, second_key(seed, epoch, 2), moved // block)
        expected.append(at * block + moved % block)
    assert rows.tolist() == expected


def test_a_window_reads_few_blocks():
    block, window, n = 100, 4, 10_000
    rows = Order(n, seed=0, shuffle=Shuffle(block=block, window=window)).rows(np.arange(n))
    for at in range(0, n, block * window):
        assert len(np.unique(rows[at : at + block * window] // block)) == window
    blocks = rows.reshape(-1, block * window)[:, 0] // block
    assert np.mean(np.diff(np.sort(blocks)) == 0) == 0 and not np.array_equal(blocks, np.sort(blocks))


def test_blocks_in_order_need_no_count_of_rows():
    shuffle = Shuffle(block=8, window=2, in_order=True)
    positions = np.arange(64)
    growing = windowed(positions, None, 5, 0, shuffle)
    for n in (64, 70, 1000):
        assert np.array_equal(Order(n, seed=5, shuffle=shuffle).rows(positions), growing)


@pytest.mark.parametrize(
    ("options", "seen", "fix"),
    [
        ({"block": 0}, "block=0, window=16", "use 1 or more"),
        ({"block": 4, "window": 0}, "block=4, window=0", "use 1 or more"),
        ({"in_order": True}, "block=None, in_order=True", "set block to a number of rows"),
    ],
)
def test_a_shuffle_that_cannot_be(options, seen, fix):
    with pytest.raises(UserError) as raised:
        Shuffle(**options)
    assert raised.value.seen == seen and raised.value.fix == fix
