"""What each operation is on one device's slices.

A rule gets the operands' parts and where the operands lie. It gives the results' parts and where these then lie: along
which mesh axes each dimension is sliced, and along which partial sums are pending. What is left to move follows from
the equation's own type.

If an operation takes a sliced dimension whole (one that it sorts, cuts or joins), the operand is gathered first, as the
compiler does for the program of whole arrays.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.device.bits import random_bits
from trellis.mesh.device.moves import moved
from trellis.notation.state import State
from trellis.program.scopes import transition_in

Axes = tuple[str, ...]
Result = tuple[list, list[State]]

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite layout_constraint le lgamma log
    log1p logistic lt max min mul name ne neg nextafter not one_minus_square optimization_barrier or population_count
    pow reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square stop_gradient sub tan tanh threefry2x32 xor
    """.split()
)


def without_sharding(params: dict[str, Any]) -> dict[str, Any]:
    """An equation's parameters, for types that carry no shardings."""
    return {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}


def _bind(equation, args, **changed) -> list:
    params = without_sharding(equation.params) | changed
    out = equation.primitive.bind(*args, **params)
    return list(out) if equation.primitive.multiple_results else [out]


def _at(state: State, axes: Sequence[Axes], *, pending=None) -> State:
    return dataclasses.replace(state, axes=tuple(axes), pending=state.pending if pending is None else pending)


def _out(view, equation, index: int = 0) -> State:
    return view.state(equation.outvars[index].aval)


def _gathered(view, x, state: State, dims) -> tuple[jax.Array, State]:
    """An operand with the given dimensions whole."""
    after = _at(state, [() if i in dims else axes for i, axes in enumerate(state.axes)])
    return moved(x, state, after, view.sizes), after


def _like(view, x, state: State, axes) -> jax.Array:
    """An operand sliced over the given mesh axes; its sums stay pending."""
    return moved(x, state, _at(state, axes), view.sizes)


def elementwise(view, equation, args, states) -> Result:
    """Each element by itself: the operands are sliced alike."""
    shapes, outs = [v.aval.shape for v in equation.invars], [v.aval.shape for v in equation.outvars]
    if equation.primitive.name in ("optimization_barrier", "threefry2x32") and len(args) == len(outs):
        return _bind(equation, args), list(states)
    rank = len(outs[0])
    axes = [()] * rank
    for shape, state in zip(shapes, states, strict=True):  # a dimension of size 1 meets all elements of the others'
        for d, mine in enumerate(state.axes if len(shape) == rank else ()):
            if shape[d] == outs[0][d] and not set(mine) & {a for other in (*axes[:d], *axes[d + 1 :]) for a in other}:
                axes[d] = max(axes[d], mine, key=len)
    for n, (shape, state) in enumerate(zip(shapes, states, strict=True)):
        if len(shape) == rank:
            mine = [axes[d] if shape[d] == outs[0][d] else () for d in range(rank)]
            args = [*args[:n], _like(view, args[n], state, mine), *args[n + 1 :]]
    return _bind(equation, args), [_at(_out(view, equation, i), axes) for i in range(len(outs))]


def _bitcast(view, equation, args, states) -> Result:
    """Each element by itself for types of one width; a wider type's parts are a last dimension, which is whole."""
    (x,), (state,) = args, states
    before, after = (len(v.aval.shape) for v in (equation.invars[0], equation.outvars[0]))
    if before > after:
        x, state = _gathered(view, x, state, (after,))
    axes = [*state.axes, ()][:after]
    return _bind(equation, [x]), [_at(_out(view, equation), axes)]


def _dot_general(view, equation, args, states) -> Result:
    ((left_sum, right_sum), (left_batch, right_batch)) = equation.params["dimension_numbers"]
    sides, axes = list(args), [list(s.axes) for s in states]
    for i, j in (*zip(left_sum, right_sum), *zip(left_batch, right_batch)):
        if axes[0][i] != axes[1][j]:  # the one that is whole takes its slice, or the other is made whole
            side, dim, mine = (1, j, axes[0][i]) if not axes[1][j] else (0, i, axes[1][j])
            if set(mine) & {a for d, other in enumerate(axes[side]) if d != dim for a in other}:
                side, dim, mine = (0, i, axes[1][j]) if side else (1, j, axes[0][i])
            wanted = [*axes[side]]
            wanted[dim] = mine
            sides[side] = _like(view, sides[side], _at(states[side], axes[side]), wanted)
            axes[side] = wanted
    free = [
        [d for d in range(len(axes[s])) if d not in (*sums, *batch)]
        for s, sums, batch in ((0, left_sum, left_batch), (1, right_sum, right_batch))
    ]
    taken = {a for d in free[0] for a in axes[0][d]}
    if clash := [d for d in free[1] if taken & set(axes[1][d])]:
        sides[1], after = _gathered(view, sides[1], _at(states[1], axes[1]), clash)
        axes[1] = list(after.axes)
    made = [axes[0][d] for d in left_batch] + [axes[0][d] for d in free[0]] + [axes[1][d] for d in free[1]]
    pending = {a for d in left_sum for a in axes[0][d]} | states[0].pending | states[1].pending
    return _bind(equation, sides), [_at(_out(view, equation), made, pending=frozenset(pending))]


def _reduction(combine: Callable | None) -> Callable:
    """A reduction; `combine` puts the devices' results together if they are not to be added up."""

    def rule(view, equation, args, states) -> Result:
        over, state = equation.params["axes"], states[0]
        made = [axes for i, axes in enumerate(state.axes) if i not in over]
        across = tuple(a for i in over for a in state.axes[i])
        (x,) = _bind(equation, args)
        if combine is None:
            return [x], [_at(_out(view, equation), made, pending=state.pending | set(across))]
        return [combine(x, across) if across else x], [_at(_out(view, equation), made)]

    return rule


def _boolean(combine: Callable) -> Callable:
    return lambda x, axes: combine(x.astype(jnp.int32), axes).astype(x.dtype)


def _along(find: Callable) -> Callable:
    """An operation that takes some dimensions whole, the same in all operands; its results have all dimensions."""

    def rule(view, equation, args, states) -> Result:
        dims = find(equation)
        both = [_gathered(view, x, s, dims) for x, s in zip(args, states, strict=True)]
        results = _bind(equation, [x for x, _ in both])
        return results, [_at(_out(view, equation, i), both[0][1].axes) for i in range(len(results))]

    return rule


def _argument(view, equation, args, states) -> Result:
    over = equation.params["axes"]
    x, state = _gathered(view, args[0], states[0], over)
    made = [axes for i, axes in enumerate(state.axes) if i not in over]
    return _bind(equation, [x]), [_at(_out(view, equation), made)]


def _transpose(view, equation, args, states) -> Result:
    made = [states[0].axes[i] for i in equation.params["permutation"]]
    return _bind(equation, args), [_at(_out(view, equation), made)]


def _squeeze(view, equation, args, states) -> Result:
    made = [axes for i, axes in enumerate(states[0].axes) if i not in equation.params["dimensions"]]
    return _bind(equation, args), [_at(_out(view, equation), made)]


def _broadcast_in_dim(view, equation, args, states) -> Result:
    out, shape = _out(view, equation), equation.params["shape"]
    to, (x,), (state,) = equation.params["broadcast_dimensions"], args, states
    source = equation.invars[0].aval.shape
    x = _like(view, x, state, [out.axes[d] if n == shape[d] else () for n, d in zip(source, to, strict=True)])
    return _bind(equation, [x], shape=view.local(shape, out.axes)), [out]


def _reshape(view, equation, args, states) -> Result:
    out, (x,), (state,) = _out(view, equation), args, states
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    while True:
        here = {a for axes in state.axes for a in axes}
        made = [tuple(a for a in axes if a in here) for axes in out.axes]
        there = _strides(after, made, view.sizes)
        stay = {a for a, stride in _strides(before, state.axes, view.sizes).items() if there.get(a) == stride}
        if stay == here:
            return [x.reshape(view.local(after, made))], [_at(out, made)]
        x, state = _gathered(view, x, state, [i for i, axes in enumerate(state.axes) if not stay.issuperset(axes)])


def _strides(shape, axes, sizes) -> dict[str, int]:
    """How many elements of a whole array lie between a device's first and that of the next along each mesh axis. A
    device has the same elements of two shapes, in the same order, if these numbers are equal."""
    found, stride = {}, 1
    for size, over in zip(reversed(shape), reversed(axes), strict=True):
        stride *= size // math.prod(sizes[a] for a in over)
        for axis in reversed(over):
            found[axis] = stride
            stride *= sizes[axis]
    return found


def _iota(view, equation, args, states) -> Result:
    out, dim = _out(view, equation), equation.params["dimension"]
    shape = view.local(equation.params["shape"], out.axes)
    (x,) = _bind(equation, args, shape=shape)
    if out.axes[dim]:
        x = x + (lax.axis_index(out.axes[dim]) * shape[dim]).astype(x.dtype)
    return [x], [out]


def _slice(view, equation, args, states) -> Result:
    p, shape = equation.params, equation.invars[0].aval.shape
    steps = p["strides"] or (1,) * len(shape)
    cut = [i for i, n in enumerate(shape) if (p["start_indices"][i], p["limit_indices"][i], steps[i]) != (0, n, 1)]
    x, state = _gathered(view, args[0], states[0], cut)
    limits = [p["limit_indices"][i] if i in cut else x.shape[i] for i in range(len(shape))]
    return _bind(equation, [x], limit_indices=tuple(limits)), [_at(_out(view, equation), state.axes)]


def _dynamic_slice(view, equation, args, states) -> Result:
    shape, sizes = equation.invars[0].aval.shape, equation.params["slice_sizes"]
    cut = [i for i, n in enumerate(shape) if sizes[i] != n]
    x, state = _gathered(view, args[0], states[0], cut)
    local = tuple(sizes[i] if i in cut else x.shape[i] for i in range(len(shape)))
    starts = [a if i in cut else jnp.zeros_like(a) for i, a in enumerate(args[1:])]
    return _bind(equation, [x, *starts], slice_sizes=local), [_at(_out(view, equation), state.axes)]


def _dynamic_update_slice(view, equation, args, states) -> Result:
    shape, part = (v.aval.shape for v in equation.invars[:2])
    cut = [i for i, n in enumerate(shape) if part[i] != n]
    x, state = _gathered(view, args[0], states[0], cut)
    update = _like(view, args[1], states[1], state.axes)
    starts = [a if i in cut else jnp.zeros_like(a) for i, a in enumerate(args[2:])]
    return _bind(equation, [x, update, *starts]), [_at(_out(view, equation), state.axes)]


def _concatenate(view, equation, args, states) -> Result:
    dim = equation.params["dimension"]
    made = tuple(() if i == dim else axes for i, axes in enumerate(_most_sliced(states)))
    args = [_like(view, x, s, made) for x, s in zip(args, states, strict=True)]
    return _bind(equation, args), [_at(_out(view, equation), made)]


def _stack(view, equation, args, states) -> Result:
    """Along a dimension of its own, which is whole."""
    dim, held = equation.params["axis"], _most_sliced(states)
    args = [_like(view, x, s, held) for x, s in zip(args, states, strict=True)]
    return _bind(equation, args), [_at(_out(view, equation), (*held[:dim], (), *held[dim:]))]


def _unstack(view, equation, args, states) -> Result:
    dim = equation.params["axis"]
    x, state = _gathered(view, args[0], states[0], (dim,))
    results = _bind(equation, [x])
    left = (*state.axes[:dim], *state.axes[dim + 1 :])
    return results, [_at(_out(view, equation, i), left) for i in range(len(results))]


def _most_sliced(states) -> tuple[tuple[str, ...], ...]:
    """How the operand that is sliced over the most mesh axes lies."""
    return max((s.axes for s in states), key=lambda axes: sum(map(len, axes)))


def _pad(view, equation, args, states) -> Result:
    padded = [i for i, config in enumerate(equation.params["padding_config"]) if tuple(config) != (0, 0, 0)]
    x, state = _gathered(view, args[0], states[0], padded)
    return _bind(equation, [x, args[1]]), [_at(_out(view, equation), state.axes)]


def _split(view, equation, args, states) -> Result:
    x, state = _gathered(view, args[0], states[0], (equation.params["axis"],))
    results = _bind(equation, [x])
    return results, [_at(_out(view, equation, i), state.axes) for i in range(len(results))]


def _gather(view, equation, args, states) -> Result:
    """A lookup: dimensions that are taken whole stay sliced, and so do those of the indices."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape = equation.invars[0].aval.shape
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    looked = [i for i, n in enumerate(shape) if sizes[i] != n and i not in paired]
    x, state = _gathered(view, args[0], states[0], looked)
    ids, at = _gathered(view, args[1], states[1], (len(states[1].axes) - 1,))
    for i, j in paired.items():
        if state.axes[i] != at.axes[j]:
            x, state = _gathered(view, x, state, (i,))
            ids, at = _gathered(view, ids, at, (j,))
    local = tuple(1 if i in paired else sizes[i] if i in looked else x.shape[i] for i in range(len(shape)))
    gone = (*numbers.collapsed_slice_dims, *paired)
    kept, batch = iter([state.axes[i] for i in range(len(shape)) if i not in gone]), iter(at.axes[:-1])
    rank = len(equation.outvars[0].aval.shape)
    made = [next(kept) if i in numbers.offset_dims else next(batch) for i in range(rank)]
    return _bind(equation, [x, ids], slice_sizes=local), [_at(_out(view, equation), made)]


def _random_bits(view, equation, args, states) -> Result:
    out = _out(view, equation)
    p = equation.params
    return [random_bits(args[0], p["bit_width"], p["shape"], out.axes, view.sizes)], [out]


def _reshard(view, equation, args, states) -> Result:
    """Moves the array here instead of in the caller: within the name scope that says how, if there is one."""
    out = _out(view, equation)
    said = transition_in(str(equation.source_info.name_stack)) is not None
    return [moved(args[0], states[0], out, view.sizes, scoped=said)], [out]


def _device_put(view, equation, args, states) -> Result:
    """Leaves the move to the caller; the memory stays the same."""
    return list(args), list(states)


_dimension = lambda equation: (equation.params["dimension"],)
_last = lambda equation: (len(equation.invars[0].aval.shape) - 1,)
_axis = lambda equation: (equation.params["axis"],)

RULES: dict[str, Callable] = {
    "argmax": _argument,
    "argmin": _argument,
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "cumlogsumexp": _along(_axis),
    "cummax": _along(_axis),
    "cummin": _along(_axis),
    "cumprod": _along(_axis),
    "cumsum": _along(_axis),
    "device_put": _device_put,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "random_bits": _random_bits,
    "reduce_and": _reduction(_boolean(lax.pmin)),
    "reduce_max": _reduction(lax.pmax),
    "reduce_min": _reduction(lax.pmin),
    "reduce_or": _reduction(_boolean(lax.pmax)),
    "reduce_sum": _reduction(None),
    "reshape": _reshape,
    "reshard": _reshard,
    "rev": _along(lambda equation: equation.params["dimensions"]),
    "slice": _slice,
    "sort": _along(_dimension),
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "top_k": _along(_last),
    "transpose": _transpose,
    "unstack": _unstack,
}


# Collectives of programs in which JAX tracks what varies, as those of programs in which it does not.


def _same(equation, args) -> list:
    return list(args)


def _sum(equation, args) -> list:
    return [lax.psum(x, equation.params["axes"]) for x in args]


def _all_gather(equation, args) -> list:
    p = equation.params
    return [lax.all_gather(x, p["axis_name"], axis=p["all_gather_dimension"], tiled=p["tiled"]) for x in args]


def _reduce_scatter(equation, args) -> list:
    p = equation.params
    return [
        lax.psum_scatter(x, p["axis_name"], scatter_dimension=p["scatter_dimension"], tiled=p["tiled"]) for x in args
    ]


COLLECTIVES: dict[str, Callable] = {
    "all_gather_invariant": _all_gather,
    "all_gather_reduced": _all_gather,
    "preduced": _same,
    "psum_invariant": _sum,
    "pvary": _same,
    "reduced_vary_cast": _same,  # in JAX 0.12; in 0.10 with _p
    "reduced_vary_cast_p": _same,
    "unreduced_psum": _sum,
    "unreduced_reduce_scatter": _reduce_scatter,
    "vary_unreduced_cast": _same,
    "vary_unreduced_cast_p": _same,
}
