"""Products that hide their communication, under a layout with `overlap`.

A product into an overlapped name would gather its operand, a product over one would scatter its result. Here slices
travel around a ring instead, and each is multiplied as it passes. The same bytes move, forward and backward:

| product | forward | backward |
|---|---|---|
| `pos/m embed, embed mlp/m -> pos mlp/m` | slices of the activation pass by | sums of its gradient pass by |
| `pos mlp/m, mlp/m embed -> pos/m embed` | sums of the result pass by | slices of its gradient, once for both |

In the first row, several products may take what passes by (`dot_each`: queries, keys and values; two gates).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

from trellis.mesh.by_device import unchecked
from trellis.mesh.layout import current_layout
from trellis.mesh.linear import linear
from trellis.mesh.ring import Moved, Names, Ring, gather_products, local_product, scatter_products
from trellis.named.array import NamedArray
from trellis.named.pair import Pair
from trellis.named.placing import Assignment, bring, missing_axes, move
from trellis.named.saving import PRODUCT
from trellis.notation import Dim, Shape
from trellis.notation.binding import check_divides
from trellis.notation.state import State, mesh_of, state_of


@dataclasses.dataclass(frozen=True)
class _Rings:
    """Products `x, weight -> result` of one `x`, for the rings below; hashable, for `custom_jvp`.

    Attributes:
        axis: the mesh axis of the rings.
        moved: what travels.
        names, state: those of `x`.
        weight_names, weight_states, result_names, result_states, dtypes: those of each weight and result.
    """

    axis: str
    moved: Moved
    names: Names
    state: State
    weight_names: tuple[Names, ...]
    weight_states: tuple[State, ...]
    result_names: tuple[Names, ...]
    result_states: tuple[State, ...]
    dtypes: tuple

    @property
    def gathering(self) -> Ring:
        return Ring(axis=self.axis, both_ways=True)

    @property
    def scattering(self) -> Ring:
        # Two chunks: one's product runs while the other is on its way.
        return Ring(axis=self.axis, both_ways=True, chunks=1 if self.moved.size % 2 else 2)

    def run(self, local, taken, given, *arrays):
        """Runs a program for one device's slices, in which JAX need not know what varies."""
        states, form = jax.tree.flatten(given, is_leaf=lambda s: isinstance(s, State))
        out = unchecked(lambda *slices: tuple(jax.tree.leaves(local(*slices))), taken, states, *arrays)
        return form.unflatten(out)

    @property
    def whole(self) -> State:
        """The state of `x` when the ring has gathered it."""
        x, axis = self.state, self.axis
        return dataclasses.replace(
            x, axes=tuple(tuple(a for a in axes if a != axis) for axes in x.axes), copied=x.copied | {axis}
        )


def overlapped(x: NamedArray, pairs: Sequence[Pair], *, settle: bool) -> list[NamedArray] | None:
    """Products of `x` by a ring, if the layout asks for one and there is something to gather or to scatter.

    Args:
        x: the first operand of all pairs.
        pairs: the products; several only share a ring that gathers `x`.
        settle: whether partial sums are settled next.

    Raises:
        NotationError: the ring does not divide a size.
    """
    layout = current_layout()
    if layout is None or not layout.overlap:
        return None
    for pair in pairs:
        if not pair.where or not pair.summed or any(state_of(a.array).mode != "explicit" for a in (x, pair.y)):
            return None
        if pair.x.dtype != pair.y.dtype:
            return None
    for name in layout.overlap:
        axis = next((axes[0] for pair in pairs if (axes := pair.where.get(name, ()))), None)
        if axis is None:
            continue
        found = None
        if name not in x.names:  # all products of one group find `x` at one place, so that they share its ring
            found = _gathered(x, [(pair, pair.y) for pair in pairs], axis)
        elif len(pairs) == 1 and name in pairs[0].summed:
            found = _scattered(pairs[0], axis) if settle else None
        elif len(pairs) == 1 and name not in pairs[0].y.names:
            found = _gathered(pairs[0].y, [(pairs[0], x)], axis)
        if found is not None:
            return found
    return None


def _gathered(x: NamedArray, products: list[tuple[Pair, NamedArray]], axis: str) -> list[NamedArray] | None:
    where = products[0][0].where
    assert where is not None  # a layout assigns
    held = dict(zip(x.names, state_of(x.array).axes, strict=True))
    name = next((n for n in x.names if held[n] == (*where[n], axis)), None)
    if name is None:
        return None
    before = {**where, name: held[name]}
    mine = move(x, tuple(before[n] for n in x.names), missing_axes(x, where) - {axis})
    weights = [bring(weight, pair.where) for pair, weight in products]
    rings = _Rings(
        axis,
        _moved(name, x.names, before, x),
        x.names,
        state_of(mine.array),
        tuple(w.names for w in weights),
        tuple(state_of(w.array) for w in weights),
        tuple(pair.out for pair, _ in products),
        tuple(_result(pair.where, pair, axis) for pair, _ in products),
        tuple(pair.dtype or x.dtype for pair, _ in products),
    )
    arrays, _ = _gather_products(rings, mine.array, tuple(w.array for w in weights))
    return [NamedArray(checkpoint_name(a, PRODUCT), pair.out) for a, (pair, _) in zip(arrays, products, strict=True)]


def _scattered(pair: Pair, axis: str) -> list[NamedArray] | None:
    x, weight, where = pair.x, pair.y, pair.where
    assert where is not None  # a layout assigns
    settled = dict(zip(pair.out, current_layout().assign(pair.out), strict=True))
    name = next((n for n in pair.out if settled[n] == (*where[n], axis)), None)
    if name is None:
        return None
    if name in weight.names:
        x, weight = weight, x
    after = {**where, name: settled[name]}
    check_divides(name, x.shape[name], after[name], _sizes(x), f"'{'/'.join((name, *after[name]))}'")
    x, weight = bring(x, where), bring(weight, where)
    rings = _Rings(
        axis,
        _moved(name, pair.out, after, x, weight),
        x.names,
        state_of(x.array),
        (weight.names,),
        (state_of(weight.array),),
        (pair.out,),
        (_result(after, pair, axis),),
        (pair.dtype or x.dtype,),
    )
    return [NamedArray(checkpoint_name(_scatter_product(rings, x.array, weight.array), PRODUCT), pair.out)]


def _result(where: Assignment, pair: Pair, axis: str) -> State:
    pending = frozenset(a for n in pair.summed for a in where[n]) - {axis}
    return State("explicit", tuple(where[n] for n in pair.out), pending)


def _moved(name: str, names: Names, where: Assignment, *arrays: NamedArray) -> Moved:
    size = next(x.shape[name] for x in arrays if name in x.names)
    local = size // math.prod(_sizes(arrays[0])[a] for a in where[name])
    text = str(Shape(tuple(Dim(n, where[n]) for n in names)))
    return Moved(name, local, text)


def _sizes(x: NamedArray):
    return mesh_of(x.array).shape


def _gradient(state: State) -> State:
    """A copy's gradient is a pending sum, and the other way round."""
    return dataclasses.replace(state, pending=state.copied, copied=state.pending)


def _gradients(states: Sequence[State]) -> tuple[State, ...]:
    return tuple(map(_gradient, states))


def _gathering(rings: _Rings, x, weights):
    """The products, and the gathered `x`."""

    def local(x, *weights):
        others = list(zip(rings.weight_names, weights, strict=True))
        how = dict(results=rings.result_names, dtypes=rings.dtypes, keep=True)
        return tuple(gather_products(rings.gathering, rings.moved, rings.names, x, others, **how))

    taken = [rings.state, *rings.weight_states]
    *products, whole = rings.run(local, taken, (*rings.result_states, rings.whole), x, *weights)
    return tuple(products), whole


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gather_products(rings: _Rings, x, weights):
    return _gathering(rings, x, weights)


@_gather_products.defjvp
def _gather_derivative(rings: _Rings, operands, changes):
    out = _, whole = _gather_products(rings, *operands)
    change = linear(functools.partial(_gather_change, rings), functools.partial(_gather_gradients, rings), like=out)
    return out, change((whole, operands[1]), changes)


def _gather_change(rings: _Rings, fixed, changes):
    (whole, weights), (d_x, d_weights) = fixed, changes
    passing, d_whole = _gathering(rings, d_x, weights)

    def local(whole, *d_weights):
        each = zip(d_weights, rings.weight_names, rings.result_names, rings.dtypes, strict=True)
        return tuple(local_product(rings.names, whole, name, d, out).astype(dtype) for d, name, out, dtype in each)

    here = rings.run(local, [rings.whole, *rings.weight_states], rings.result_states, whole, *d_weights)
    return tuple(map(jax.lax.add, passing, here)), d_whole


def _gather_gradients(rings: _Rings, fixed, gradients):
    (whole, weights), (d_products, d_whole) = fixed, gradients
    used = [i for i, d in enumerate(d_products) if d is not None]
    pick = lambda each: tuple(each[i] for i in used)
    names, outs = pick(rings.weight_names), pick(rings.result_names)
    extra = () if d_whole is None else (d_whole,)

    def local(whole, *rest):
        weights, ds, plus = rest[: len(used)], rest[len(used) : 2 * len(used)], rest[2 * len(used) :]
        pairs = list(zip(outs, ds, names, weights, strict=True))
        how = dict(plus=plus[0] if plus else None)
        d_x = scatter_products(rings.scattering, rings.moved, rings.names, pairs, whole.dtype, **how)
        d_weights = [local_product(rings.names, whole, o, d, n).astype(w.dtype) for o, d, n, w in pairs]
        return (d_x, *d_weights)

    taken = [rings.whole, *pick(rings.weight_states), *_gradients(pick(rings.result_states))]
    taken += [_gradient(rings.whole)] * len(extra)
    given = (_gradient(rings.state), *_gradients(pick(rings.weight_states)))
    d_x, *found = rings.run(local, taken, given, whole, *pick(weights), *pick(d_products), *extra)
    by_place = dict(zip(used, found, strict=True))
    return d_x, tuple(by_place.get(i) for i in range(len(weights)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _scatter_product(rings: _Rings, x, weight):
    (weight_names,), (out,), (dtype,) = rings.weight_names, rings.result_names, rings.dtypes

    def local(x, weight):
        pairs = [(rings.names, x, weight_names, weight)]
        return scatter_products(rings.scattering, rings.moved, out, pairs, dtype)

    return rings.run(local, [rings.state, *rings.weight_states], rings.result_states[0], x, weight)


@_scatter_product.defjvp
def _scatter_derivative(rings: _Rings, operands, changes):
    out = _scatter_product(rings, *operands)
    change = linear(functools.partial(_scatter_change, rings), functools.partial(_scatter_gradients, rings), like=out)
    return out, change(operands, changes)


def _scatter_change(rings: _Rings, operands, changes):
    (x, weight), (d_x, d_weight) = operands, changes
    return jax.lax.add(_scatter_product(rings, d_x, weight), _scatter_product(rings, x, d_weight))


def _scatter_gradients(rings: _Rings, operands, gradient):
    ((weight_names,), (out,)), (x, weight) = (rings.weight_names, rings.result_names), operands

    def local(x, weight, d):
        others = [(weight_names, weight), (rings.names, x)]
        results, dtypes = [rings.names, weight_names], [x.dtype, weight.dtype]
        return tuple(gather_products(rings.gathering, rings.moved, out, d, others, results, dtypes))

    taken = [rings.state, *rings.weight_states, *_gradients(rings.result_states)]
    return rings.run(local, taken, (_gradient(rings.state), *_gradients(rings.weight_states)), x, weight, gradient)
