"""Products: `einsum`, `dot`, and `dot_each` for several of one array."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trellis.mesh.manual.einsum import einsum_plain
from trellis.named.arguments import text_of
from trellis.named.array import NamedArray
from trellis.named.axis import Axis, Names, NamesError, once
from trellis.named.narrow import Narrow, marked
from trellis.named.operand import check_sizes, on_one_mesh, operand, types_of
from trellis.named.overlap import overlapped
from trellis.named.pair import Pair, free
from trellis.named.placing import missing_axes, outside, to_layout
from trellis.named.reduce import sum as sum_over
from trellis.named.reshape import transpose
from trellis.notation import NotationError, parse, typeof

Words = tuple[str, ...]


def einsum(equation: str, *operands: NamedArray, settle: bool = True, preferred_element_type=None) -> NamedArray:
    """Sums of products by name: `einsum("batch pos embed, embed mlp -> batch pos mlp", x, w)`.

    Names that stand only on the left are summed. `...` stands for the names that are not written: on the left for those
    of that operand, on the right for all of them, in front. The operands are moved as the layout says; a sum over a
    sliced name leaves partial sums, which are settled to the sharding that the layout gives the result.

    More than two operands are multiplied two at a time, in the order that takes the fewest operations by their whole
    sizes (of more than four, in a good one), as `jnp.einsum` has it.

    Plain arrays in manual mode carry no names: there the text is the type, with
    mesh axes and states, `einsum("batch/d mlp/m, mlp/m embed -> batch/d embed +m", x, w)`.

    Names: those on the right of the text.
    Gradient: each operand's is a product with the others; a reduce-scatter for an operand that was gathered, an
        all-reduce for one that was whole, an all-gather of the gradient of a result that was scattered.
    Moves: operands to where the layout has their names: an all-gather of one that rests in slices. Where a summed name
        is sliced, the result is settled: an all-reduce, or a reduce-scatter where the layout slices what is left over
        that mesh axis.

    Args:
        equation: the operands' names in any order, and the result's in the order wanted.
        *operands: one or more named arrays.
        settle: False leaves partial sums as they are, to be added to others
            first and settled once, with `settle`.
        preferred_element_type: dtype of the result and its accumulation.

    Raises:
        NamesError: a name is absent, left out, or has two sizes.
        PendingSumError: an operand holds partial sums.
    """
    text_of(equation, "einsum", "write einsum('batch embed, embed mlp -> batch mlp', x, w)")
    if not isinstance(settle, bool):
        raise NamesError(f"settle must be True or False, got settle={settle!r}, in einsum: write settle=False")
    if operands and not any(isinstance(x, NamedArray | Narrow) for x in operands):
        return einsum_plain(equation, *operands, preferred_element_type=preferred_element_type)
    what = f"einsum('{equation}')"
    operands, mark = marked(operands, what)
    lefts, open_ended, out, rest = _parse(equation)
    if len(lefts) != len(operands):
        raise NamesError(
            f"einsum needs one array for each operand in its text, got {len(operands)} for '{equation}': add or "
            "remove one"
        )
    extra: list[str] = []
    for text, more, x in zip(lefts, open_ended, operands, strict=True):
        _check(equation, text, x, more or rest)
        extra += [n for n in x.names if n not in text and n not in extra]
    out = (*extra, *out) if rest else out
    arrays = [operand(x, what, keys=False) for x in operands]
    if absent := [n for n in out if not any(n in x.names for x in arrays)]:
        raise NamesError(
            f"a result can only have names of its operands, got '{absent[0]}' in '{equation}' for {types_of(arrays)}: "
            "correct the name"
        )
    return _products(arrays, out, what, preferred_element_type, settle, mark)


def dot(*operands: NamedArray, over: Names, settle: bool = True, preferred_element_type=None) -> NamedArray:
    """Sums of products over the given names: `dot(x, w, over="embed")`.

    The result has all other names, those of the first operand first.

    Names: those of all operands that are not in `over`, the first's first.
    Gradient: each operand's is a product with the others; a reduce-scatter for an operand that was gathered, an
        all-reduce for one that was whole, an all-gather of the gradient of a result that was scattered.
    Moves: operands to where the layout has their names: an all-gather of one that rests in slices. Where a summed name
        is sliced, the result is settled: an all-reduce, or a reduce-scatter where the layout slices what is left over
        that mesh axis.

    Args:
        *operands: two or more named arrays; more than two are multiplied in the order of `einsum`.
        over: the names that are summed. Each is a name of at least two operands (of both, where there are two).
        settle: False leaves partial sums, as in `einsum`.
        preferred_element_type: dtype of the result and its accumulation.

    Raises:
        NamesError: an operand lacks a name that is summed, or a name has two sizes.
        PendingSumError: an operand holds partial sums.
    """
    operands, mark = marked(operands, "dot")
    arrays = [operand(x, "dot", keys=False) for x in operands]
    over = _summed(arrays, over)
    out = tuple(dict.fromkeys(n for x in arrays for n in x.names if n not in over))
    return _products(arrays, out, _what(over), preferred_element_type, settle, mark)


def dot_each(
    x: NamedArray, others: Sequence[NamedArray], *, over: Names, settle: bool = True
) -> tuple[NamedArray, ...]:
    """`dot` of one array with each of several: `q, k, v = dot_each(x, (w_q, w_k, w_v), over="embed")`.

    `x` is moved once for all products, and its gradient is summed once. Under tensor parallelism that is one all-reduce
    instead of one for each product; under a layout with `overlap`, one ring.

    Names: those of each product, as in `dot`.
    Gradient: as `dot`; that of `x` is summed over the products first, so that it moves once.
    Moves: as `dot`, but `x` once for all products.

    Args:
        x: what all products have in common.
        others: the other factors.
        over: the names that are summed; each array has them.
        settle: False leaves partial sums, as in `einsum`.

    Raises:
        NamesError, PendingSumError: as `dot`.
    """
    pairs = []
    factors_of = [marked((x, w), "dot_each") for w in others]
    given = (x, *(w for (_, w), _ in factors_of))
    x, *factors = on_one_mesh([operand(a, "dot_each", keys=False) for a in given], "dot_each")
    for w, (_, mark) in zip(factors, factors_of, strict=True):
        names = _summed([x, w], over)
        out = tuple(dict.fromkeys(n for a in (x, w) for n in a.names if n not in names))
        check_sizes([x, w], _what(names))
        pairs.append(Pair(x, w, tuple(names), out, mark=mark))
    results: dict[int, NamedArray] = {}
    for group in _alike(x, pairs):
        found = _overlapped(x, [pairs[i] for i in group], settle)
        moved = pairs[group[0]].bring(x) if found is None else x
        alike = {(pairs[i].mark.kind, pairs[i].mark.at): pairs[i] for i in group if pairs[i].mark}
        narrow = {key: pair.narrow(0) for key, pair in alike.items()}
        for n, i in enumerate(group):
            mark = pairs[i].mark
            mine = narrow.get((mark.kind, mark.at)) if mark else None
            results[i] = pairs[i].multiply(moved, mine) if found is None else found[n]
    results = {i: to_layout(r) if settle else r for i, r in results.items()}
    return tuple(results[i] for i in range(len(factors)))


def _alike(x: NamedArray, pairs: list[Pair]) -> list[list[int]]:
    """The products, grouped by where `x` moves for them."""
    groups: dict = {}
    for i, pair in enumerate(pairs):
        where = pair.where
        key = None if where is None else (tuple(where[n] for n in x.names), missing_axes(x, where), outside(pair.y))
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _overlapped(x: NamedArray, pairs: list[Pair], settle: bool):
    """The products in rings, if the layout asks for them; narrow ones are not cut."""
    return None if any(pair.mark for pair in pairs) else overlapped(x, pairs, settle=settle)


def _what(over) -> str:
    return f"dot(over={over[0]!r})" if len(over) == 1 else f"dot(over={tuple(over)!r})"


def _summed(arrays: list[NamedArray], over: Names) -> Words:
    """The names that a `dot` sums, checked to be shared by its operands."""
    asked = (over,) if isinstance(over, str | Axis) else tuple(over)
    words = tuple(n.name if isinstance(n, Axis) else n for n in asked)
    once(words, "dot")
    for name, word in zip(asked, words, strict=True):
        having = [x for x in arrays if word in x.names]
        for x in having:
            x.index(name)
        if len(having) < min(2, len(arrays)):
            raise NamesError(
                f"dot can only sum over names that its operands share, got '{word}' for {types_of(arrays)}, in "
                f"{_what(words)}: correct the name, or sum the one that has it with .sum('{word}') first"
            )
    return words


@functools.lru_cache(maxsize=4096)
def _parse(equation: str) -> tuple[tuple[tuple[str | int, ...], ...], tuple[bool, ...], tuple[str | int, ...], bool]:
    left, arrow, right = equation.partition("->")
    if not arrow:
        raise NotationError(
            f"an einsum must have one '->', got none, in '{equation}': write it and the names of the result"
        )
    lefts, out = [parse(part.strip()) for part in left.split(",")], parse(right.strip())
    if any(dim.axes for shape in (*lefts, out) for dim in shape.dims):
        raise NotationError(
            f"an einsum of named arrays takes names only, got mesh axes in '{equation}': leave them out (mesh axes "
            "are for plain arrays in manual mode)"
        )
    return tuple(s.names for s in lefts), tuple(s.ellipsis for s in lefts), out.names, out.ellipsis


def _check(equation: str, text: Words, x, rest: bool) -> None:
    if not isinstance(x, NamedArray):
        raise NamesError(
            f"einsum by name takes named arrays, got {typeof(x)} in '{equation}': use named(array, '{' '.join(text)}')"
        )
    absent = [n for n in text if n not in x.names]
    left_out = [] if rest else [n for n in x.names if n not in text]
    if absent or left_out:
        seen = f"'{absent[0]}', which is absent" if absent else f"no '{left_out[0]}', which the array has"
        raise NamesError(
            f"an einsum must name the dimensions of its operands, got {seen}, in '{equation}' for {typeof(x)}: "
            "correct the text, or rename the array"
        )


def _products(arrays: list[NamedArray], out: Words, what: str, dtype, settle: bool, mark=None) -> NamedArray:
    """The product of all, two at a time, summed over every name that the result lacks."""
    check_sizes(arrays, what)
    arrays = on_one_mesh(arrays, what)
    if len(arrays) == 1:
        found = transpose(_sum_others(arrays[0], out, dtype), out)
        return found if dtype is None else found.astype(dtype)
    factors = dict(enumerate(arrays))
    types = tuple((x.names, tuple(x.shape.values())) for x in arrays)
    for first, second in _order(types, out):
        others = [n for at, x in factors.items() if at not in (first, second) for n in x.names]
        last, needed = len(factors) == 2, {*out, *others}
        left, right = _sum_alone(factors[first], factors.pop(second), needed, dtype)
        shared = [n for n in left.names if n in right.names]
        batch = [n for n in shared if n in needed]
        order = out if last else (*batch, *free(left, shared), *free(right, shared))
        pair = Pair(left, right, tuple(n for n in shared if n not in needed), order, dtype, mark)
        settled = settle or not last
        ringed = _overlapped(left, [pair], settled)
        result = pair.multiply(pair.bring(left)) if ringed is None else ringed[0]
        factors[first] = to_layout(result) if settled else result
    return factors[0]


@functools.lru_cache(maxsize=4096)
def _order(types: tuple[tuple[Words, tuple[int, ...]], ...], out: Words) -> tuple[tuple[int, int], ...]:
    """Which factors are multiplied one after the other, as `jnp.einsum` has it; a product stands for its first factor.

    By whole sizes, so that it is the same on every layout.
    """
    if len(types) == 2:
        return ((0, 1),)
    given: list[Any] = [part for names, sizes in types for part in (jax.ShapeDtypeStruct(sizes, jnp.float32), names)]
    left, found = list(range(len(types))), []
    for chosen in jnp.einsum_path(given[0], *given[1:], out, optimize="auto")[0]:
        first, second = sorted(left.pop(at) for at in sorted(chosen, reverse=True))
        found.append((first, second))
        left.append(first)
    return tuple(found)


def _sum_alone(x: NamedArray, y: NamedArray, needed: set[str], dtype) -> tuple[NamedArray, NamedArray]:
    """The operands, summed over names that only one of them has and nothing needs."""
    alone = lambda a, b: _sum_others(a, tuple(n for n in a.names if n in needed or n in b.names), dtype)
    return alone(x, y), alone(y, x)


def _sum_others(x: NamedArray, kept: Words, dtype) -> NamedArray:
    gone = tuple(n for n in x.names if n not in kept)
    return sum_over(x, gone, dtype=dtype) if gone else x
