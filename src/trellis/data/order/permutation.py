"""A keyed pseudorandom permutation of 0..n-1, evaluated at any point without a table."""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 12
_MASK = 2**64 - 1


def mix64(x: np.ndarray) -> np.ndarray:
    """Scrambles 64-bit integers: the output function of splitmix64 (Steele, Lea and Flood, 2014).

    >>> hex(int(mix64(np.uint64(1))))
    '0x910a2dec89025cc1'
    """
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.uint64) + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def derive_key(*words: int) -> int:
    """One 64-bit key from several integers, in order: `key = mix64(key ^ word)` from `key = 0`.

    >>> derive_key(1) == int(mix64(np.uint64(1)))
    True
    """
    key = 0
    for word in words:  # mix64 in Python's integers: an array of one element would cost more than the arithmetic
        x = ((key ^ (word & _MASK)) + int(_GOLDEN)) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        key = x ^ (x >> 31)
    return key


class Permutation:
    """A bijection of 0..n-1 chosen by `key`: a Feistel network whose halves are numbers, not bits.

    A point is split as `x = left * width + right` with `width = ceil(sqrt(n))` and `height = ceil(n / width)`.
    Twelve rounds add, alternately, `mix64(right ^ k_i) mod height` to `left` and `mix64(left ^ k_i) mod width`
    to `right`; `k_i = derive_key(key, i)`. The domain `height * width` is less than `n + width`, so a result
    of n or more is rare; such a point is put through the network again until it falls below n ("cycle walking").
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), sections 4 and 5.

    >>> p = Permutation(10, key=7)
    >>> sorted(p(np.arange(10)).tolist()) == list(range(10))
    True
    """

    def __init__(self, n: int, key: int):
        if n < 1:
            raise ValueError(f"a permutation must have at least one element, not {n}")
        self.n = n
        width = int(np.ceil(np.sqrt(n)))
        while width * width < n:
            width += 1
        self._width, self._height = np.uint64(width), np.uint64(-(-n // width))
        self._keys = [np.uint64(derive_key(key, i)) for i in range(_ROUNDS)]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Where each of `x` goes: i64 of the same shape."""
        x = np.asarray(x)
        if x.size and (x.min() < 0 or x.max() >= self.n):
            raise IndexError(f"a point outside 0..{self.n - 1}: {x.min()}..{x.max()}")
        out = self._step(x.astype(np.uint64).reshape(-1))
        n = np.uint64(self.n)
        while (outside := np.flatnonzero(out >= n)).size:
            out[outside] = self._step(out[outside])
        return out.astype(np.int64).reshape(x.shape)

    def _step(self, x):
        left, right = x // self._width, x % self._width
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                left = (left + mix64(right ^ key) % self._height) % self._height
            else:
                right = (right + mix64(left ^ key) % self._width) % self._width
        return left * self._width + right
