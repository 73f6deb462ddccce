"""The product of two named arrays."""

import math

import jax
import jax.numpy as jnp

from trellis.mesh.layout import current_layout
from trellis.mesh.manual.ops import mark_pending
from trellis.mesh.reshard import place
from trellis.named import backend
from trellis.named.array import NamedArray
from trellis.named.blocks import named_scales
from trellis.named.narrow import Mark, Rounded, forms, product
from trellis.named.operand import refuse_cut
from trellis.named.placing import Assignment, assign, bring_to_product, from_product, move, to_layout
from trellis.notation import Dim, NotationError, Shape, spec_of
from trellis.notation.state import state_of

Words = tuple[str, ...]


class Pair:
    """A product of two named arrays.

    Attributes:
        x, y: the operands, as they came.
        summed: the names that are summed.
        out: the names of the result, in order.
        dtype: of the result and its accumulation, None for the operands'.
        mark: what narrow product it is, or None.
        where: what `compute` assigns to the names of both operands.
    """

    def __init__(self, x: NamedArray, y: NamedArray, summed: Words, out: Words, dtype=None, mark: Mark | None = None):
        refuse_cut(summed, "a sum in a product", summed=True)
        self.x, self.y, self.summed, self.out, self.dtype, self.mark = x, y, summed, out, dtype, mark
        self.where: Assignment | None = assign([x, y], tuple(dict.fromkeys((*x.names, *y.names))))

    def bring(self, x: NamedArray) -> NamedArray:
        """The first factor, moved to where the product wants it."""
        return bring_to_product(x, self.where, self.y)

    def multiply(self, x: NamedArray, narrow_x=None) -> NamedArray:
        """The product of the moved `x`, by `dot_general`, with partial sums over the mesh axes of summed names.

        Args:
            x: the first factor, moved.
            narrow_x: of a narrow product, the forms of the first factor, where several products have them.
        """
        y, where = bring_to_product(self.y, self.where, self.x), self.where
        mark = self.mark
        narrow = [narrow_x or self.narrow(0), self.narrow(1)] if mark else []
        shared = [n for n in x.names if n in y.names]
        batch = [n for n in shared if n not in self.summed]
        if _comes_first(y, x, shared, self.out):
            x, y, narrow = y, x, narrow[::-1]
            mark = mark and mark._replace(at=1 - mark.at)
        order = (*batch, *free(x, shared), *free(y, shared))
        numbers = tuple(([x.index(n) for n in group], [y.index(n) for n in group]) for group in (self.summed, batch))
        pending = tuple(axis for n in self.summed for axis in where[n]) if where else ()
        mode = state_of(x.array).mode
        sliced = where and mode == "explicit" and any(where.values())
        spec = spec_of([where[n] for n in order], pending) if sliced else None
        if mark:
            dtype = self.dtype or jnp.result_type(x.array, y.array)
            array = product(x.array, y.array, *narrow, numbers, mark=mark, dtype=dtype, spec=spec)
        else:
            array = backend.product(x.array, y.array, numbers, preferred_element_type=self.dtype, spec=spec)
        if where and mode == "manual" and pending:
            array = mark_pending(array, pending, Shape(tuple(Dim(n, where[n]) for n in order), tuple(sorted(pending))))
        if order != self.out:
            array = jnp.transpose(array, [order.index(n) for n in self.out])
        slices = tuple(where[n] for n in self.out) if where and (x.slices or y.slices) else ()
        result = from_product(NamedArray(array, self.out, slices), self.x, self.y)
        return to_layout(self.cut_once(result, pending)) if mode == "auto" else result

    def cut_once(self, result: NamedArray, pending: tuple[str, ...]) -> NamedArray:
        """In auto mode, the result where the product leaves it, if the layout slices a name that is sliced there over a
        summed mesh axis too: in one step XLA's partitioner (JAX 0.10.2) leaves out a part of the result."""
        layout = current_layout()
        if layout is None or not self.where:
            return result
        axes = tuple(self.where[n] for n in result.names)
        wanted = layout.assign(result.names)
        if not any(mine and set(more) & set(pending) for mine, more in zip(axes, wanted, strict=True)):
            return result
        return result.with_array(place(result.array, axes, names=result.names))

    def narrow(self, number: int) -> tuple[Rounded, ...]:
        """A factor in its narrow forms, rounded where it is and then moved."""
        x = (self.x, self.y)[number]
        kept = [n for n in x.names if n not in self.summed]
        summed, kept = (tuple(x.index(n) for n in group[-1:]) for group in (self.summed, kept))
        found = forms(x.array, self.mark, number, summed, kept)
        axes = None if self.where is None else tuple(self.where[n] for n in x.names)
        return found if axes is None else tuple(moved(form, x.names, axes) for form in found)


def moved(form: Rounded, names: Words, axes: tuple[Words, ...]) -> Rounded:
    """A factor in narrow numbers, moved with its scales to where these mesh axes slice it."""
    scale = form.scale
    if scale.ndim:
        dims = tuple(d for d in range(scale.ndim) if scale.shape[d] != form.values.shape[d])
        for d in dims if state_of(scale).mode == "explicit" else ():
            _check_blocks(names[d], form.values.shape[d], scale.shape[d], axes[d], jax.typeof(scale).sharding.mesh)
        scale = move(named_scales(scale, names, dims), axes, frozenset()).array
    return form._replace(values=move(NamedArray(form.values, names), axes, frozenset()).array, scale=scale)


def _check_blocks(name: str, size: int, blocks: int, over: Words, mesh) -> None:
    """Refuses slices that would cut blocks of numbers that share a scale.

    Raises:
        NotationError: they would.
    """
    parts = math.prod(mesh.shape[axis] for axis in over)
    if blocks % parts:
        raise NotationError(
            f"a slice of narrow numbers holds whole blocks, which share a scale, got {name}={size}, {blocks} blocks of "
            f"{size // blocks}, over {'/'.join(over)}={parts}, in a product: make {name} a multiple of "
            f"{size // blocks * parts}, or slice it over other axes"
        )


def free(x: NamedArray, shared) -> list[str]:
    """The names of a factor that the other one lacks."""
    return [n for n in x.names if n not in shared]


def _comes_first(y: NamedArray, x: NamedArray, shared, out: Words) -> bool:
    """Whether the result wants the free names of `y` before those of `x`: swapping spares a transpose."""
    mine, other = free(y, shared), free(x, shared)
    return bool(mine and other) and out.index(mine[0]) < out.index(other[0])
