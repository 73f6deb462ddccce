"""The gates of SwiGLU and GEGLU (Shazeer, 2020, arXiv:2002.05202), with gradients that are made once."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from trellis.mesh.linear import linear
from trellis.named import NamesError, clip, gelu, is_named, minimum, sigmoid, silu
from trellis.named.arguments import shown
from trellis.named.backend import by_itself, fences_gradients, made_again, rounded_once


def swiglu(gate, up):
    """`silu(gate) * up`, of named or plain arrays.

    On TPUs the two gradients are made before the four products that read them. Left alone, the compiler makes them
    again inside each of these products, which then wait for the vector units: by its own schedule that costs 7 % of a
    step of an 8B model on v5e (libtpu 0.0.42). On GPUs one kernel makes both, which reads the operands once. On CPUs
    the backward pass computes the sigmoid again instead of keeping it, once for each of the two gradients, rather than
    writing it and reading it back.

    Names: those of `gate`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.

    >>> swiglu(tr.zeros({"mlp": 2}), tr.ones({"mlp": 2}))
    f32[mlp=2]
    [0. 0.]
    """
    if not _fences(gate, up):
        return (silu if is_named(gate) else jax.nn.silu)(gate) * up
    return gate.with_array(_swiglu(gate.array, up.array)) if is_named(gate) else _swiglu(gate, up)


def geglu(gate, up):
    """`gelu(gate) * up`, of named or plain arrays, with a GELU by a tanh.

    The backward pass keeps both operands and nothing else, and makes its gradients as `swiglu` does.

    Names: those of `gate`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.

    >>> geglu(tr.zeros({"mlp": 2}), tr.ones({"mlp": 2}))
    f32[mlp=2]
    [0. 0.]
    """
    if not _fences(gate, up):
        return (gelu if is_named(gate) else jax.nn.gelu)(gate) * up
    return gate.with_array(_geglu(gate.array, up.array)) if is_named(gate) else _geglu(gate, up)


def _fences(gate, up) -> bool:
    """Whether a gate's gradients are made before what reads them: of operands that lie alike, where that helps.

    Raises:
        NamesError: one operand alone has names.
    """
    named = is_named(gate)
    if named != is_named(up):
        raise NamesError(
            f"both operands of a gate must have names, or neither, got {shown(gate)} and {shown(up)}, in a gate: "
            "name the other one's dimensions, with named(array, '...')"
        )
    if not named:
        return jax.typeof(gate) == jax.typeof(up)
    alike = (gate.names, gate.slices) == (up.names, up.slices) and jax.typeof(gate.array) == jax.typeof(up.array)
    return alike and fences_gradients(gate.array)


@dataclasses.dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """SwiGLU with bounds on its inputs, so that no activation is far from the others (OpenAI, 2025,
    arXiv:2508.10925, section 2.3): `gate * sigmoid(slope * gate) * (up + 1)`, of named or plain arrays.

    >>> tr.round(ClampedSwiGLU(limit=7.0)(tr.full({"mlp": 2}, 100.0), tr.full({"mlp": 2}, -100.0)))
    f32[mlp=2]
    [-42. -42.]

    Attributes:
        limit: the upper bound of `gate` and of `up`; its negative is the lower bound of `up`.
        slope: of the sigmoid.
    """

    limit: float
    slope: float = 1.702

    def __call__(self, gate, up):
        if is_named(gate):
            gate, up = minimum(gate, self.limit), clip(up, -self.limit, self.limit)
            return gate * sigmoid(gate * self.slope) * (up + 1.0)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(gate * self.slope) * (up + 1.0)


def _fenced(value: Callable, of_gate: Callable, of_up: Callable) -> Callable:
    """A gate's function of plain arrays, whose gradients are made before what reads them.

    Args:
        value: `value(gate, up)`.
        of_gate, of_up: the gradients, `of_gate(gate, up, d_out)` and `of_up(gate, d_out)`.
    """
    value = rounded_once(value)
    gradient_gate, gradient_up = by_itself(rounded_once(of_gate)), by_itself(rounded_once(of_up))

    def change(kept, changes):
        gate, up = kept
        return of_gate(gate, up, changes[0]) + of_up(gate, changes[1])

    def backward(kept, d_out):
        gate, up = made_again(kept)
        return jax.lax.optimization_barrier((gradient_gate(gate, up, d_out), gradient_up(gate, d_out)))

    def derivative(operands, changes):
        out = value(*operands)
        return out, linear(change, backward, like=out)(operands, changes)

    fenced = jax.custom_jvp(value)
    fenced.defjvp(derivative)
    return fenced


def _silu_slope(gate, up, d_out):
    share = jax.nn.sigmoid(gate)
    return d_out * up * share * (1 + gate * (1 - share))


_ROOT, _CUBE = math.sqrt(2 / math.pi), 0.044715  # of the GELU by a tanh


def _gelu_slope(gate, up, d_out):
    """The derivative of `gate * (1 + tanh(_ROOT * (gate + _CUBE * gate**3))) / 2`, times the rest."""
    bent = jnp.tanh(_ROOT * (gate + _CUBE * gate * gate * gate))
    inner = _ROOT * (1 + 3 * _CUBE * gate * gate)
    return d_out * up * (0.5 * (1 + bent) + 0.5 * gate * (1 - bent * bent) * inner)


_swiglu = _fenced(
    lambda gate, up: jax.nn.silu(gate) * up, _silu_slope, lambda gate, d_out: d_out * gate * jax.nn.sigmoid(gate)
)
_geglu = _fenced(lambda gate, up: jax.nn.gelu(gate) * up, _gelu_slope, lambda gate, d_out: d_out * jax.nn.gelu(gate))
