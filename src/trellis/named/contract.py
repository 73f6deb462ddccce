"""Products: `einsum` and `dot`."""

import functools

import jax.numpy as jnp

from trellis.mesh.manual.einsum import einsum_plain
from trellis.mesh.manual.ops import mark_pending
from trellis.named.array import NamedArray
from trellis.named.axis import NamesError
from trellis.named.overlap import overlapped
from trellis.named.placing import assign, bring, check_sizes, refuse_pending
from trellis.named.placing import settle as settle_to_layout
from trellis.named.product import product
from trellis.notation import Dim, NotationError, Shape, parse, spec_of, typeof
from trellis.notation.state import state_of

Names = tuple[str, ...]


def einsum(equation: str, *operands: NamedArray, settle: bool = True, preferred_element_type=None) -> NamedArray:
    """Sums of products by name: `einsum("batch pos embed, embed mlp -> batch pos mlp", x, w)`.

    Names that stand on the left only are summed. `...` stands for the names
    that are not written: on the left for those of that operand, on the right
    for all of them, in front. The operands are moved as the layout
    says; a sum over a sliced name leaves partial sums, which are settled to
    the sharding that the layout gives the result.

    Plain arrays in manual mode carry no names: there the text is the type, with
    mesh axes and states, `einsum("batch/d mlp/m, mlp/m embed -> batch/d embed +m", x, w)`.

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
    if operands and not any(isinstance(x, NamedArray) for x in operands):
        return einsum_plain(equation, *operands, preferred_element_type=preferred_element_type)
    lefts, open_ended, out, rest = _parse(equation)
    if len(lefts) != len(operands):
        raise NamesError(
            f"einsum takes as many arrays as its text, got {len(operands)} for '{equation}': add or remove one"
        )
    extra: list[str] = []
    for text, more, x in zip(lefts, open_ended, operands, strict=True):
        _check(equation, text, x, more or rest)
        extra += [n for n in x.names if n not in text and n not in extra]
    out = (*extra, *out) if rest else out
    known = {n for x in operands for n in x.names}
    if absent := [n for n in out if n not in known]:
        types = " and ".join(map(typeof, operands))
        raise NamesError(
            f"a result's names come from its operands, got '{absent[0]}' in '{equation}' for {types}: correct the name"
        )
    result = operands[0]
    if len(operands) == 1:
        result = _reduce(result, out)
    for index, x in enumerate(operands[1:], start=1):
        needed = set(out).union(*(o.names for o in operands[index + 1 :]))
        last = index == len(operands) - 1
        settled = settle or not last
        result = _product(result, x, needed, out if last else None, preferred_element_type, equation, settled)
        result = settle_to_layout(result) if settled else result
    return result


def dot(*operands: NamedArray, over: str | Names, settle: bool = True, preferred_element_type=None) -> NamedArray:
    """Sums of products over the given names: `dot(x, w, over="embed")`.

    Raises:
        NamesError: an operand name is absent.
    """
    over = (over,) if isinstance(over, str) else tuple(over)
    names: list[str] = []
    for x in operands:
        names += [n for n in x.names if n not in names]
    if absent := [n for n in over if n not in names]:
        types = " and ".join(map(typeof, operands))
        raise NamesError(f"dot sums over names of its operands, got '{absent[0]}' for {types}: correct the name")
    out = [n for n in names if n not in over]
    text = ", ".join(" ".join(x.names) for x in operands) + " -> " + " ".join(out)
    return einsum(text, *operands, settle=settle, preferred_element_type=preferred_element_type)


@functools.lru_cache(maxsize=4096)
def _parse(equation: str) -> tuple[tuple[Names, ...], tuple[bool, ...], Names, bool]:
    left, arrow, right = equation.partition("->")
    if not arrow:
        raise NotationError(f"an einsum has one '->', got none, in '{equation}': write what the result's names are")
    lefts, out = [parse(part.strip()) for part in left.split(",")], parse(right.strip())
    if any(dim.axes for shape in (*lefts, out) for dim in shape.dims):
        raise NotationError(
            f"named arrays carry their sharding, got mesh axes in '{equation}': write names only "
            f"(mesh axes are for plain arrays in manual mode)"
        )
    return tuple(s.names for s in lefts), tuple(s.ellipsis for s in lefts), out.names, out.ellipsis


def _check(equation: str, text: Names, x, rest: bool) -> None:
    if not isinstance(x, NamedArray):
        raise NamesError(
            f"einsum by name takes named arrays, got {typeof(x)} in '{equation}': use named(array, '{' '.join(text)}')"
        )
    absent = [n for n in text if n not in x.names]
    left_out = [] if rest else [n for n in x.names if n not in text]
    if absent or left_out:
        seen = f"'{absent[0]}', which is absent" if absent else f"no '{left_out[0]}', which the array has"
        raise NamesError(
            f"an einsum names the dimensions of its operands, got {seen}, in '{equation}' for {typeof(x)}: "
            f"correct the text, or rename the array"
        )


def _reduce(x: NamedArray, out: Names) -> NamedArray:
    from trellis.named.reduce import REDUCTIONS
    from trellis.named.reshape import transpose

    gone = tuple(n for n in x.names if n not in out)
    return transpose(REDUCTIONS["sum"](x, gone) if gone else x, out)


def _product(x: NamedArray, y: NamedArray, needed: set[str], out: Names | None, dtype, equation: str, settled: bool):
    """Two operands, by `dot_general`; leaves partial sums over the mesh axes of contracted names.

    Args:
        needed: the names that are not summed.
        out: the names of the result in order, or any order.
        settled: whether the partial sums are settled next, so that a ring may do it.
    """
    for operand in (x, y):
        refuse_pending(operand, "a product of it with something")
    check_sizes([x, y], f"einsum('{equation}')")
    alone = [tuple(n for n in a.names if n not in b.names and n not in needed) for a, b in ((x, y), (y, x))]
    if any(alone):
        x, y = (_reduce(a, tuple(n for n in a.names if n not in gone)) for a, gone in zip((x, y), alone, strict=True))
    names = tuple(dict.fromkeys((*x.names, *y.names)))
    where = assign([x, y], names)
    shared = [n for n in x.names if n in y.names]
    batch = [n for n in shared if n in needed]
    summed = [n for n in shared if n not in needed]
    kept = out or (*batch, *_free(x, shared), *_free(y, shared))
    if (ringed := overlapped(x, y, where, summed, kept, dtype or x.dtype, settle=settled)) is not None:
        return ringed
    x, y = bring(x, where), bring(y, where)
    if out is not None and _comes_first(y, x, shared, out):
        x, y = y, x
    order = (*batch, *_free(x, shared), *_free(y, shared))
    numbers = tuple(([x.index(n) for n in group], [y.index(n) for n in group]) for group in (summed, batch))
    pending = tuple(axis for n in summed for axis in where[n]) if where else ()
    mode = state_of(x.array).mode
    spec = spec_of([where[n] for n in order], pending) if where and mode == "explicit" and any(where.values()) else None
    array = product(x.array, y.array, numbers, preferred_element_type=dtype, out_sharding=spec)
    if mode == "manual" and pending:
        array = mark_pending(array, pending, Shape(tuple(Dim(n, where[n]) for n in order), tuple(sorted(pending))))
    if out is not None and order != out:
        array = jnp.transpose(array, [order.index(n) for n in out])
        order = out
    slices = tuple(where[n] for n in order) if x.slices or y.slices else ()
    result = NamedArray(array, order, slices)
    if mode == "auto":
        return settle_to_layout(result)
    return result


def _free(x: NamedArray, shared) -> list[str]:
    return [n for n in x.names if n not in shared]


def _comes_first(y, x, shared, out) -> bool:
    """Whether the result wants the free names of `y` before those of `x`: swapping spares a transpose."""
    mine, other = _free(y, shared), _free(x, shared)
    return bool(mine and other) and out.index(mine[0]) < out.index(other[0])
