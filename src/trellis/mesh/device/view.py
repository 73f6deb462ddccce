"""A program of whole arrays (explicit mode), as the program of one device.

In explicit mode, the type of every value says how it lies on the mesh, forward and backward. So what one device does
follows from the program, equation by equation. Most are the same operation on a slice. If a result's type puts it
elsewhere than the operands do, the equation moves data, by the collectives of that transition. A `shard_map` is a
device's program already and stays as it is. The outcome can stand in a `shard_map` over all mesh axes, with loops,
conditions and permutes around it and kernels within, as a pipeline's stages do.

Do not differentiate it: take the gradient first, of the program of whole arrays, whose types promise what it moves.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from trellis._compat import bind, scan_counts, within_equation
from trellis.errors import UserError
from trellis.mesh.device import rules
from trellis.mesh.device.moves import moved
from trellis.notation.state import State, axes_in
from trellis.notation.typeof import typeof
from trellis.program.manual import axes_over
from trellis.program.sizes import state_at
from trellis.program.source import source_of
from trellis.program.trace import Untraced


class DeviceViewError(UserError, NotImplementedError):
    """An operation for which a device's part is not known."""


class View:
    """Runs jaxprs on one device's parts of their values.

    Args:
        sizes: the sizes of all mesh axes.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)

    def run(self, closed: ClosedJaxpr, *args: jax.Array) -> list[jax.Array]:
        """The results' parts on this device, from those of the arguments.

        Raises:
            DeviceViewError: an operation of which no device's part is known.
        """
        return self.jaxpr(closed.jaxpr, [self._constant(c, v.aval) for c, v in _constants(closed)], args)

    def jaxpr(self, jaxpr: Jaxpr, consts: Sequence, args: Sequence) -> list:
        """The same for a jaxpr and its constants' parts."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        read = lambda v: np.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else values[v]
        last = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not isinstance(v, Literal)}
        kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
        for number, equation in enumerate(jaxpr.eqns):
            with within_equation(equation):
                results = self.equation(equation, [read(v) for v in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
            for v in equation.invars:  # lets go of what is not read again
                if not isinstance(v, Literal) and last[v] == number and v not in kept:
                    values.pop(v, None)
        return [read(v) for v in jaxpr.outvars]

    def equation(self, equation: JaxprEqn, args: list) -> list:
        """One equation on parts of its operands."""
        name = equation.primitive.name
        if name in _CONTROL:
            return _CONTROL[name](self, equation, args)
        if (inner := _called(equation)) is not None:
            return self.run(inner, *args)
        if name in ("psum", *rules.COLLECTIVES) and not self._moves(equation):
            return list(args)
        if name in rules.COLLECTIVES:
            return rules.COLLECTIVES[name](equation, args)
        states = [self.state(v.aval) for v in equation.invars]
        outs = [self.state(v.aval) for v in equation.outvars]
        if name != "reshard" and not any(_placed(s) for s in (*states, *outs)):
            return _bound(equation, args)
        rule = rules.RULES.get(name)
        if name == "device_put" and any(_memory(a) != _memory(b) for a, b in zip(equation.invars, equation.outvars)):
            raise DeviceViewError(
                "A pipeline's stages must keep their arrays in device memory.",
                seen=f"`device_put` to {_memory(equation.outvars[0])}",
                where=source_of(equation) or "an unknown line",
                fix="leave it out, or recompute instead of offloading",
            )
        if rule is None and name not in rules.ELEMENTWISE:
            raise DeviceViewError(
                "Every operation in a pipeline's stages must be computable on each device alone.",
                seen=f"`{name}` of sliced arrays, which has no rule for one device's part",
                where=source_of(equation) or "an unknown line",
                fix="gather its operands first with reshard, or write it in a shard_map",
            )
        results, natural = (rule or rules.elementwise)(self, equation, args, states)
        return [moved(x, at, out, self.sizes) for x, at, out in zip(results, natural, outs, strict=True)]

    def local(self, shape: Sequence[int], axes: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
        """The shape of one device's part."""
        return tuple(n // math.prod(self.sizes.get(a, 1) for a in mine) for n, mine in zip(shape, axes, strict=True))

    def state(self, aval) -> State:
        """Where a value lies by its type, along mesh axes of more than one device."""
        return self.real(state_at(aval))

    def real(self, state: State) -> State:
        """A state without mesh axes of one device, which need not be axes of the mesh that this runs on."""
        real = lambda axes: tuple(a for a in axes if self.sizes.get(a, 1) > 1)
        axes = tuple(map(real, state.axes))
        return dataclasses.replace(
            state, axes=axes, pending=frozenset(real(state.pending)), copied=frozenset(real(state.copied))
        )

    def _moves(self, equation: JaxprEqn) -> bool:
        """Whether a collective is along a mesh axis of this program's mesh."""
        return any(a in self.sizes for a in axes_over(equation))

    def _constant(self, value, aval):
        """A device's part of a constant."""
        state, value = self.state(aval), _plain(value)
        whole = State(state.mode, ((),) * len(state.axes))
        return moved(jnp.asarray(value), whole, state, self.sizes) if _placed(state) else value


def _constants(closed: ClosedJaxpr):
    return zip(closed.consts, closed.jaxpr.constvars, strict=True)


def _plain(x):
    """A constant without the mesh that it was made on, which its type carries along."""
    if isinstance(x, Tracer):
        raise DeviceViewError(
            "A pipeline's stages must receive every array they read as an argument.",
            seen=f"an array {typeof(x)} that a function closes over",
            where="the layers",
            fix="hold a parameter in the stack of layers, without their name if all share it; pass what is made of the "
            "batch alone to layers.fold behind x; let layers carry beside x what is made of both",
        )
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # the loop of the ticks would trace it
            data = np.asarray(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return np.asarray(x)


def _memory(variable) -> str:
    return str(variable.aval.memory_space)


def _placed(state: State) -> bool:
    return bool(any(state.axes) or state.pending)


def _called(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The program of a call: of a jitted, a checkpointed or a linear function, or of one with its own gradient."""
    if equation.primitive.name not in _CALLS:
        return None
    inner = next(equation.params[name] for name in ("jaxpr", "call_jaxpr") if name in equation.params)
    if isinstance(inner, Untraced):
        return inner.program_of([v.aval for v in equation.invars])
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


_CALLS = frozenset("jit pjit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call linear".split())


def _bound(equation: JaxprEqn, args: list) -> list:
    params = rules.without_sharding(equation.primitive.get_bind_params(equation.params))
    if "out_avals" in params:  # a kernel's, which say on which mesh they are
        params["out_avals"] = tuple(ShapedArray(x.shape, x.dtype) for x in params["out_avals"])
    if params.get("update_jaxpr") is not None:  # how a scatter combines two numbers
        params["update_jaxpr"] = _without_mesh(params["update_jaxpr"], params["update_consts"])
    out = bind(equation.primitive, args, params)
    return list(out) if equation.primitive.multiple_results else [out]


def _without_mesh(jaxpr: Jaxpr, consts: Sequence) -> Jaxpr:
    """How two numbers are combined, without the mesh that this was traced on: on another one, XLA ends the process."""
    avals: list[Any] = [v.aval for v in jaxpr.invars]
    numbers = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.make_jaxpr(lambda *args: View({}).jaxpr(jaxpr, consts, args))(*numbers).jaxpr


# Control flow: the same, on parts.


def _scan(view: View, equation: JaxprEqn, args: list) -> list:
    p = equation.params
    count = scan_counts(p)
    consts, carry, xs = _split(args, *count)
    closed = p["jaxpr"]

    def body(carry, x):
        results = view.run(closed, *consts, *carry, *x)
        return results[: count[1]], results[count[1] :]

    carry, ys = lax.scan(body, carry, xs, length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
    return [*carry, *ys]


def _while(view: View, equation: JaxprEqn, args: list) -> list:
    p = equation.params
    cond, body, carry = _split(args, p["cond_nconsts"], p["body_nconsts"])
    goes_on = lambda carry: view.run(p["cond_jaxpr"], *cond, *carry)[0]
    return lax.while_loop(goes_on, lambda carry: view.run(p["body_jaxpr"], *body, *carry), carry)


def _cond(view: View, equation: JaxprEqn, args: list) -> list:
    index, *operands = args
    branches = [lambda *xs, b=branch: view.run(b, *xs) for branch in equation.params["branches"]]
    return lax.switch(jnp.asarray(index, jnp.int32), branches, *operands)


def _shard_map(view: View, equation: JaxprEqn, args: list) -> list:
    """A device's program already; its operands lie as it says, or are brought there."""
    p = equation.params
    manual = set(p["newly_manual_axes"]) | set(p["mesh"].manual_axes)
    if set(p["mesh"].axis_names) - manual - {a for a, n in view.sizes.items() if n == 1}:
        raise DeviceViewError(
            "A shard_map in a pipeline's stages must be manual over all mesh axes.",
            seen=f"{', '.join(sorted(manual))} of {', '.join(p['mesh'].axis_names)}",
            where=source_of(equation) or "an unknown line",
            fix="leave out its `axes`",
        )
    wanted = [view.real(_specified(spec, v.aval)) for spec, v in zip(p["in_specs"], equation.invars, strict=True)]
    args = [moved(x, view.state(v.aval), s, view.sizes) for x, v, s in zip(args, equation.invars, wanted, strict=True)]
    results = view.jaxpr(p["jaxpr"], (), args)
    made = [view.real(_specified(spec, v.aval)) for spec, v in zip(p["out_specs"], equation.outvars, strict=True)]
    return [
        moved(x, s, view.state(v.aval), view.sizes) for x, s, v in zip(results, made, equation.outvars, strict=True)
    ]


def _specified(spec, aval) -> State:
    return State("explicit", axes_in(spec, len(aval.shape)), frozenset(spec.unreduced), frozenset(spec.reduced))


def _split(args: list, *counts: int) -> list[list]:
    parts, start = [], 0
    for count in counts:
        parts.append(args[start : start + count])
        start += count
    return [*parts, args[start:]]


_CONTROL: dict[str, Callable] = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}
