"""The permutation: a bijection, and one that looks random where a linear congruence does not."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import second_permutation
from trellis.data.order.permutation import Permutation, derive_key, mix64


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_every_point_goes_to_another_one(n, key):
    assert np.array_equal(np.sort(Permutation(n, key)(np.arange(n))), np.arange(n))


@given(n=st.integers(1, 10**6), key=st.integers(0, 2**64 - 1), share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=100, deadline=None)
def test_it_is_the_documented_one(n, key, share):
    x = int(share * n)
    assert int(Permutation(n, key)(np.array(x))) == second_permutation(n, key, x)


@pytest.mark.parametrize("n", [10**9, 2**40 + 7, 10**13])
def test_a_corpus_of_any_size_is_permuted_without_a_table(n):
    points = np.unique(np.random.default_rng(0).integers(0, n, 10_000))
    image = Permutation(n, 5)(points)
    assert image.min() >= 0 and image.max() < n and len(np.unique(image)) == len(points)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_small_permutations_are_equally_likely(n):
    total = 50 * math.factorial(n)
    counts: dict[tuple, int] = {}
    for key in range(total):
        image = tuple(Permutation(n, derive_key(key))(np.arange(n)).tolist())
        counts[image] = counts.get(image, 0) + 1
    assert len(counts) == math.factorial(n)
    assert chi_square_is_usual(np.array(list(counts.values())), total / len(counts))


@pytest.mark.slow
def test_places_of_every_point_are_uniform():
    n, keys = 60, 3000
    images = np.stack([Permutation(n, derive_key(key))(np.arange(n)) for key in range(keys)])
    for point in range(0, n, 7):
        assert chi_square_is_usual(np.bincount(images[:, point], minlength=n), keys / n)


@pytest.mark.slow
def test_fixed_points_are_as_rare_as_in_random_permutations():
    n, keys = 500, 2000
    fixed = [np.count_nonzero(Permutation(n, derive_key(key))(np.arange(n)) == np.arange(n)) for key in range(keys)]
    assert abs(np.mean(fixed) - 1) < 4 / math.sqrt(keys)  # Poisson with mean 1
    assert abs(np.var(fixed) - 1) < 0.2


def statistics(image: np.ndarray) -> dict[str, float]:
    """Things about a shuffle that are near 0 if it is random, in standard deviations or chi-square excess."""
    n = len(image)
    place, value = np.arange(n) / n - 0.5, image / n - 0.5
    steps = np.diff(image) % n
    bins = np.bincount(steps * 64 // n, minlength=64)
    second = np.bincount((np.diff(steps) % n) * 64 // n, minlength=64)
    chi = lambda counts: (((counts - counts.mean()) ** 2 / counts.mean()).sum() - 63) / math.sqrt(2 * 63)
    return {
        "place and value": 12 * (place * value).mean() * math.sqrt(n),
        "neighbours": 12 * (value[1:] * value[:-1]).mean() * math.sqrt(n),
        "two apart": 12 * (value[2:] * value[:-2]).mean() * math.sqrt(n),
        "steps": chi(bins),
        "steps of steps": chi(second),
        "repeated steps": (len(np.unique(steps)) - n * (1 - math.exp(-1))) / math.sqrt(n),
    }


@pytest.mark.parametrize("key", range(8))
@pytest.mark.parametrize("n", [9_973, 20_000, 2**14])
def test_a_shuffle_is_uncorrelated(n, key):
    found = statistics(Permutation(n, derive_key(key))(np.arange(n)))
    assert all(abs(value) < 5 for value in found.values()), found


def test_the_statistics_find_a_linear_congruence():
    """The control: the shuffle that shifted the loss of a public 32B run fails what ours passes."""
    n = 20_000
    found = statistics((np.arange(n) * 7_919 + 1_234) % n)
    assert abs(found["steps"]) > 100 and abs(found["repeated steps"]) > 50, found


def test_orders_of_two_keys_are_unrelated():
    n = 20_000
    a, b = (Permutation(n, derive_key(0, epoch))(np.arange(n)) / n - 0.5 for epoch in (0, 1))
    assert abs(12 * (a * b).mean() * math.sqrt(n)) < 5


def test_known_values():
    """The order never changes between versions: resumed runs depend on it."""
    assert Permutation(1000, 42)(np.arange(8)).tolist() == [56, 723, 15, 270, 336, 877, 790, 937]
    assert int(mix64(np.uint64(0))) == 0xE220A8397B1DCDAF
    assert derive_key(1, 2, 3) == 0xD0734750FDE362B3


def test_wrong_points_are_refused():
    with pytest.raises(IndexError, match=r"a point outside 0\.\.9: 3\.\.10"):
        Permutation(10, 0)(np.array([3, 10]))
    with pytest.raises(ValueError, match="at least one element, not 0"):
        Permutation(0, 0)


def chi_square_is_usual(counts: np.ndarray, expected: float) -> bool:
    """Whether the chi-square statistic is within five standard deviations of its mean."""
    freedom = len(counts) - 1
    return abs(((counts - expected) ** 2 / expected).sum() - freedom) < 5 * math.sqrt(2 * freedom)
