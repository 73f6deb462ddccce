"""The operators and methods of a named array, each one the function of the same name with the array first."""

import sys
import types
import typing
from collections.abc import Mapping, Sequence

from trellis.named.axis import Name, Names

if typing.TYPE_CHECKING:
    from trellis.named.array import NamedArray


def _operations() -> types.ModuleType:
    """The package's functions, which the methods call. They are written in terms of named arrays, so they are imported
    after this file, and exist when a method is called."""
    return sys.modules[__package__]


class Methods:
    """What can be done with a named array. Operators and methods go by name and broadcast by name."""

    __slots__ = ()

    def __add__(self, other) -> "NamedArray":
        return _operations().add(self, other)

    def __radd__(self, other) -> "NamedArray":
        return _operations().add(other, self)

    def __sub__(self, other) -> "NamedArray":
        return _operations().subtract(self, other)

    def __rsub__(self, other) -> "NamedArray":
        return _operations().subtract(other, self)

    def __mul__(self, other) -> "NamedArray":
        return _operations().multiply(self, other)

    def __rmul__(self, other) -> "NamedArray":
        return _operations().multiply(other, self)

    def __truediv__(self, other) -> "NamedArray":
        return _operations().divide(self, other)

    def __rtruediv__(self, other) -> "NamedArray":
        return _operations().divide(other, self)

    def __floordiv__(self, other) -> "NamedArray":
        return _operations().floor_divide(self, other)

    def __rfloordiv__(self, other) -> "NamedArray":
        return _operations().floor_divide(other, self)

    def __mod__(self, other) -> "NamedArray":
        return _operations().mod(self, other)

    def __rmod__(self, other) -> "NamedArray":
        return _operations().mod(other, self)

    def __pow__(self, other) -> "NamedArray":
        return _operations().power(self, other)

    def __rpow__(self, other) -> "NamedArray":
        return _operations().power(other, self)

    def __and__(self, other) -> "NamedArray":
        return _operations().bitwise_and(self, other)

    def __rand__(self, other) -> "NamedArray":
        return _operations().bitwise_and(other, self)

    def __or__(self, other) -> "NamedArray":
        return _operations().bitwise_or(self, other)

    def __ror__(self, other) -> "NamedArray":
        return _operations().bitwise_or(other, self)

    def __xor__(self, other) -> "NamedArray":
        return _operations().bitwise_xor(self, other)

    def __rxor__(self, other) -> "NamedArray":
        return _operations().bitwise_xor(other, self)

    def __lshift__(self, other) -> "NamedArray":
        return _operations().left_shift(self, other)

    def __rlshift__(self, other) -> "NamedArray":
        return _operations().left_shift(other, self)

    def __rshift__(self, other) -> "NamedArray":
        return _operations().right_shift(self, other)

    def __rrshift__(self, other) -> "NamedArray":
        return _operations().right_shift(other, self)

    def __eq__(self, other) -> "NamedArray":  # ty: ignore[incompatible-method-override]
        return _operations().equal(self, other)

    def __ne__(self, other) -> "NamedArray":  # ty: ignore[incompatible-method-override]
        return _operations().not_equal(self, other)

    def __lt__(self, other) -> "NamedArray":
        return _operations().less(self, other)

    def __le__(self, other) -> "NamedArray":
        return _operations().less_equal(self, other)

    def __gt__(self, other) -> "NamedArray":
        return _operations().greater(self, other)

    def __ge__(self, other) -> "NamedArray":
        return _operations().greater_equal(self, other)

    def __neg__(self) -> "NamedArray":
        return _operations().negative(self)

    def __abs__(self) -> "NamedArray":
        return _operations().abs(self)

    def __invert__(self) -> "NamedArray":
        return _operations().invert(self)

    def __pos__(self) -> typing.Self:
        return self

    def __getitem__(self, key) -> "NamedArray":
        """`x["pos", 3]`, `x["pos", 2:5]`, `x["pos", ids]`, `x["pos", 0, "batch", 1:3]` (see `trellis.index`)."""
        return _operations().index(self, key)

    @property
    def at(self):
        """`x.at["pos", 3].set(value)`, and `add`, `multiply`, `min`, `max`, `get`, ... (see `trellis.at`)."""
        return _operations().at(self)

    # Methods: the functions of the same name, with this array first.

    def sum(self, over: Names | None = None, *, where: "NamedArray | None" = None, dtype=None) -> "NamedArray":
        """Sum over names, all of them if none are given."""
        return _operations().sum(self, over, where=where, dtype=dtype)

    def mean(self, over: Names | None = None, *, where: "NamedArray | None" = None) -> "NamedArray":
        """Mean over names."""
        return _operations().mean(self, over, where=where)

    def max(self, over: Names | None = None, *, where: "NamedArray | None" = None, initial=None) -> "NamedArray":
        """Largest value over names."""
        return _operations().max(self, over, where=where, initial=initial)

    def min(self, over: Names | None = None, *, where: "NamedArray | None" = None, initial=None) -> "NamedArray":
        """Smallest value over names."""
        return _operations().min(self, over, where=where, initial=initial)

    def prod(self, over: Names | None = None, *, where: "NamedArray | None" = None) -> "NamedArray":
        """Product over names."""
        return _operations().prod(self, over, where=where)

    def all(self, over: Names | None = None, *, where: "NamedArray | None" = None) -> "NamedArray":
        """Whether all values over names are true."""
        return _operations().all(self, over, where=where)

    def any(self, over: Names | None = None, *, where: "NamedArray | None" = None) -> "NamedArray":
        """Whether some value over names is true."""
        return _operations().any(self, over, where=where)

    def var(self, over: Names | None = None, *, where: "NamedArray | None" = None, ddof: int = 0) -> "NamedArray":
        """Variance over names."""
        return _operations().var(self, over, where=where, ddof=ddof)

    def std(self, over: Names | None = None, *, where: "NamedArray | None" = None, ddof: int = 0) -> "NamedArray":
        """Standard deviation over names."""
        return _operations().std(self, over, where=where, ddof=ddof)

    def logsumexp(self, over: Names | None = None, *, where: "NamedArray | None" = None) -> "NamedArray":
        """`log(sum(exp(x)))` over names, without overflow."""
        return _operations().logsumexp(self, over, where=where)

    def nansum(self, over: Names | None = None, *, where: "NamedArray | None" = None) -> "NamedArray":
        """Sum over names of what is not NaN."""
        return _operations().nansum(self, over, where=where)

    def nanmean(self, over: Names | None = None, *, where: "NamedArray | None" = None) -> "NamedArray":
        """Mean over names of what is not NaN."""
        return _operations().nanmean(self, over, where=where)

    def nanmax(self, over: Names | None = None, *, where: "NamedArray | None" = None, initial=None) -> "NamedArray":
        """Largest value over names that is not NaN."""
        return _operations().nanmax(self, over, where=where, initial=initial)

    def nanmin(self, over: Names | None = None, *, where: "NamedArray | None" = None, initial=None) -> "NamedArray":
        """Smallest value over names that is not NaN."""
        return _operations().nanmin(self, over, where=where, initial=initial)

    def count_nonzero(self, over: Names | None = None) -> "NamedArray":
        """How many values over names are not zero."""
        return _operations().count_nonzero(self, over)

    def argmax(self, over: Name) -> "NamedArray":
        """Position of the largest value along a name."""
        return _operations().argmax(self, over)

    def argmin(self, over: Name) -> "NamedArray":
        """Position of the smallest value along a name."""
        return _operations().argmin(self, over)

    def top_k(self, along: Name, k: int, *, new_name: Name | None = None) -> "tuple[NamedArray, NamedArray]":
        """The k largest values along a name, and their positions."""
        return _operations().top_k(self, along, k, new_name=new_name)

    def softmax(self, over: Names, *, where: "NamedArray | None" = None) -> "NamedArray":
        """`exp(x)` divided by its sum over names."""
        return _operations().softmax(self, over, where=where)

    def log_softmax(self, over: Names, *, where: "NamedArray | None" = None) -> "NamedArray":
        """The logarithm of `softmax`."""
        return _operations().log_softmax(self, over, where=where)

    def cumsum(self, along: Name, *, reverse: bool = False) -> "NamedArray":
        """Sums of all values up to each position along a name."""
        return _operations().cumsum(self, along, reverse=reverse)

    def cumprod(self, along: Name, *, reverse: bool = False) -> "NamedArray":
        """Products of all values up to each position along a name."""
        return _operations().cumprod(self, along, reverse=reverse)

    def cummax(self, along: Name, *, reverse: bool = False) -> "NamedArray":
        """Largest of all values up to each position along a name."""
        return _operations().cummax(self, along, reverse=reverse)

    def sort(self, along: Name, *, descending: bool = False) -> "NamedArray":
        """The values sorted along a name."""
        return _operations().sort(self, along, descending=descending)

    def argsort(self, along: Name, *, descending: bool = False) -> "NamedArray":
        """The positions along a name that sort it."""
        return _operations().argsort(self, along, descending=descending)

    def flip(self, along: Name) -> "NamedArray":
        """The values along a name, last first."""
        return _operations().flip(self, along)

    def clip(self, min=None, max=None) -> "NamedArray":
        """The values, none below `min` or above `max`."""
        return _operations().clip(self, min, max)

    def astype(self, dtype) -> "NamedArray":
        """The same values in another dtype."""
        return _operations().astype(self, dtype)

    def rename(self, names: Mapping[Name, Name] | None = None, /, **more: Name) -> "NamedArray":
        """The same array under other names: `k.rename(pos="key_pos")`."""
        return _operations().rename(self, names, **more)

    def transpose(self, names: Names) -> "NamedArray":
        """The same array with its dimensions in the given order."""
        return _operations().transpose(self, names)

    def rearrange(self, pattern: str, /, **sizes: int) -> "NamedArray":
        """Reorders, splits and merges dimensions."""
        return _operations().rearrange(self, pattern, **sizes)

    def split_axis(self, name: Name, into) -> "NamedArray":
        """One dimension as several."""
        return _operations().split_axis(self, name, into)

    def merge_axes(self, names: Sequence[Name], into: Name) -> "NamedArray":
        """Neighbouring dimensions as one."""
        return _operations().merge_axes(self, names, into)

    def broadcast_to(self, axes) -> "NamedArray":
        """The same values along all given axes."""
        return _operations().broadcast_to(self, axes)

    def unbind(self, name: Name) -> "tuple[NamedArray, ...]":
        """One array for each position of a name."""
        return _operations().unbind(self, name)

    def split(self, name: Name, sizes: int | Sequence[int]) -> "tuple[NamedArray, ...]":
        """Pieces along a name."""
        return _operations().split(self, name, sizes)

    def take(self, name: Name, ids) -> "NamedArray":
        """Rows along a name at given positions."""
        return _operations().take(self, name, ids)

    def take_along(self, name: Name, ids) -> "NamedArray":
        """For each place of `ids`, the value at that position along a name."""
        return _operations().take_along(self, name, ids)

    def tril(self, row: Name, column: Name, k: int = 0) -> "NamedArray":
        """Keeps elements with `column <= row + k`."""
        return _operations().tril(self, row, column, k)

    def triu(self, row: Name, column: Name, k: int = 0) -> "NamedArray":
        """Keeps elements with `column >= row + k`."""
        return _operations().triu(self, row, column, k)
