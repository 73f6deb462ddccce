"""Products that hide their communication, under a layout with `overlap`.

A product into an overlapped name would gather its operand, a product over one would scatter its result. Here slices
travel around a ring instead, and each is multiplied as it passes. The same bytes move, forward and backward:

| product | forward | backward |
|---|---|---|
| `pos/m embed, embed mlp/m -> pos mlp/m` | slices of the activation pass by | sums of its gradient pass by |
| `pos mlp/m, mlp/m embed -> pos/m embed` | sums of the result pass by | slices of its gradient, once for both |

The first also keeps the operand that it gathered, so that other products of it (keys and values after queries, the
second of two gates) find it there, as they find one that was gathered without a ring.
"""

import dataclasses
import functools
import math

import jax
from jax.ad_checkpoint import checkpoint_name

from trellis.mesh.layout import current_layout
from trellis.mesh.ring import Moved, Names, Ring, gather_products, local_product, scatter_products
from trellis.named.array import NamedArray
from trellis.named.placing import Assignment, bring, missing_axes, move, placed, remember
from trellis.named.saving import PRODUCT
from trellis.notation import Dim, Shape, spec_of
from trellis.notation.state import State, state_of
from trellis.notation.struct import check_divides


@dataclasses.dataclass(frozen=True)
class _Rings:
    """A product `x, weight -> result`, for the rings below; hashable, for `custom_vjp`."""

    axis: str
    moved: Moved
    names: tuple[Names, Names, Names]
    states: tuple[State, State, State]
    dtype: object

    @property
    def gathering(self) -> Ring:
        return Ring(axis=self.axis, both_ways=True)

    @property
    def scattering(self) -> Ring:
        # Two chunks: one's product runs while the other is on its way.
        return Ring(axis=self.axis, both_ways=True, chunks=1 if self.moved.size % 2 else 2)

    def run(self, local, taken, given, *arrays):
        """Runs a program for one device's slices. Gradients are not taken of it, so JAX need not know what varies."""
        spec = lambda state: spec_of(state.axes, state.pending, state.copied)
        specs = [jax.tree.map(spec, states, is_leaf=lambda s: isinstance(s, State)) for states in (tuple(taken), given)]
        return jax.shard_map(local, in_specs=specs[0], out_specs=specs[1], check_vma=False)(*arrays)

    @property
    def whole(self) -> State:
        """The state of `x` when the ring has gathered it."""
        x, axis = self.states[0], self.axis
        return dataclasses.replace(
            x, axes=tuple(tuple(a for a in axes if a != axis) for axes in x.axes), copied=x.copied | {axis}
        )


def overlapped(
    x: NamedArray, y: NamedArray, where: Assignment | None, summed: list[str], out: Names, dtype, *, settle: bool
) -> NamedArray | None:
    """The product by a ring, if the layout asks for one and there is something to gather or to scatter.

    Args:
        where: what `compute` assigns to the names of both operands.
        summed: the names that are summed.
        out: the names of the result, in order.
        dtype: that of the result.
        settle: whether partial sums are settled next.

    Raises:
        NotationError: the ring does not divide a size.
    """
    layout = current_layout()
    if layout is None or not layout.overlap or not where or not summed or x.dtype != y.dtype:
        return None
    if any(state_of(a.array).mode != "explicit" for a in (x, y)):
        return None
    for name in layout.overlap:
        axes = where.get(name, ())
        if not axes:
            continue
        found = None
        if name in summed:
            found = _scattered(x, y, where, axes[0], summed, out, dtype) if settle else None
        elif name not in y.names:
            found = _gathered(y, x, where, axes[0], summed, out, dtype)
        elif name not in x.names:
            found = _gathered(x, y, where, axes[0], summed, out, dtype)
        if found is not None:
            return found
    return None


def _gathered(x, weight, where, axis: str, summed, out, dtype) -> NamedArray | None:
    held = dict(zip(x.names, state_of(x.array).axes, strict=True))
    name = next((n for n in x.names if held[n] == (*where[n], axis)), None)
    if name is None or placed(x, where) is not None:
        return None
    before = {**where, name: held[name]}
    mine = move(x, tuple(before[n] for n in x.names), missing_axes(x, where) - {axis})
    weight = bring(weight, where)
    result = _result(where, summed, out, axis)
    rings = _Rings(
        axis,
        _moved(name, x.names, before, x),
        (x.names, weight.names, out),
        (state_of(mine.array), state_of(weight.array), result),
        dtype,
    )
    array, whole = _gather_product(rings, mine.array, weight.array)
    remember(x, where, NamedArray(whole, x.names))
    return NamedArray(checkpoint_name(array, PRODUCT), out)


def _scattered(x, weight, where, axis: str, summed, out, dtype) -> NamedArray | None:
    settled = dict(zip(out, current_layout().assign(out), strict=True))
    name = next((n for n in out if settled[n] == (*where[n], axis)), None)
    if name is None:
        return None
    if name in weight.names:
        x, weight = weight, x
    after = {**where, name: settled[name]}
    check_divides(name, x.shape[name], after[name], _sizes(x), f"'{'/'.join((name, *after[name]))}'")
    x, weight = bring(x, where), bring(weight, where)
    rings = _Rings(
        axis,
        _moved(name, out, after, x, weight),
        (x.names, weight.names, out),
        (state_of(x.array), state_of(weight.array), _result(after, summed, out, axis)),
        dtype,
    )
    return NamedArray(checkpoint_name(_scatter_product(rings, x.array, weight.array), PRODUCT), out)


def _result(where: Assignment, summed, out: Names, axis: str) -> State:
    pending = frozenset(a for n in summed for a in where[n]) - {axis}
    return State("explicit", tuple(where[n] for n in out), pending)


def _moved(name: str, names: Names, where: Assignment, *arrays: NamedArray) -> Moved:
    size = next(x.shape[name] for x in arrays if name in x.names)
    local = size // math.prod(_sizes(arrays[0])[a] for a in where[name])
    text = str(Shape(tuple(Dim(n, where[n]) for n in names)))
    return Moved(name, local, text)


def _sizes(x: NamedArray):
    return jax.typeof(x.array).sharding.mesh.shape


def _gradient(state: State) -> State:
    """A copy's gradient is a pending sum, and the other way round."""
    return dataclasses.replace(state, pending=state.copied, copied=state.pending)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_product(rings: _Rings, x, weight):
    """The product, and the gathered `x`."""
    (x_names, weight_names, out), (x_state, weight_state, result) = rings.names, rings.states

    def local(x, weight):
        others = [(weight_names, weight)]
        return tuple(gather_products(rings.gathering, rings.moved, x_names, x, others, [out], [rings.dtype], keep=True))

    return rings.run(local, [x_state, weight_state], (result, rings.whole), x, weight)


def _gather_forward(rings: _Rings, x, weight):
    product, whole = _gather_product(rings, x, weight)
    return (product, whole), (whole, weight)


def _gather_backward(rings: _Rings, kept, gradients):
    (x_names, weight_names, out), (x_state, weight_state, result) = rings.names, rings.states

    def local(whole, weight, d, d_whole):
        pairs = [(out, d, weight_names, weight)]
        d_x = scatter_products(rings.scattering, rings.moved, x_names, pairs, whole.dtype, plus=d_whole)
        return d_x, local_product(x_names, whole, out, d, weight_names).astype(weight.dtype)

    taken = [rings.whole, weight_state, _gradient(result), _gradient(rings.whole)]
    return rings.run(local, taken, (_gradient(x_state), _gradient(weight_state)), *kept, *gradients)


_gather_product.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter_product(rings: _Rings, x, weight):
    (x_names, weight_names, out), (x_state, weight_state, result) = rings.names, rings.states

    def local(x, weight):
        pairs = [(x_names, x, weight_names, weight)]
        return scatter_products(rings.scattering, rings.moved, out, pairs, rings.dtype)

    return rings.run(local, [x_state, weight_state], result, x, weight)


def _scatter_forward(rings: _Rings, x, weight):
    return _scatter_product(rings, x, weight), (x, weight)


def _scatter_backward(rings: _Rings, kept, gradient):
    (x_names, weight_names, out), (x_state, weight_state, result) = rings.names, rings.states

    def local(x, weight, d):
        others = [(weight_names, weight), (x_names, x)]
        return tuple(
            gather_products(
                rings.gathering, rings.moved, out, d, others, [x_names, weight_names], [x.dtype, weight.dtype]
            )
        )

    taken = [x_state, weight_state, _gradient(result)]
    return rings.run(local, taken, (_gradient(x_state), _gradient(weight_state)), *kept, gradient)


_scatter_product.defvjp(_scatter_forward, _scatter_backward)
