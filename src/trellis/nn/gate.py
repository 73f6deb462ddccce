"""The gate of SwiGLU (Shazeer, 2020, arXiv:2002.05202), with gradients that are made once."""

import jax

from trellis.mesh.linear import linear
from trellis.named import is_named, silu
from trellis.named.backend import fences_gradients, made_again, rounded_once


def swiglu(gate, up):
    """`silu(gate) * up`, of named or plain arrays.

    On TPUs the two gradients are made before the four products that read them. Left alone, the compiler makes them
    anew inside each of these products, which then wait for the vector units: by its own schedule that costs 7 % of a
    step of an 8B model on v5e (libtpu 0.0.42). On CPUs the backward pass makes the sigmoid again
    instead of keeping it.

    Names: those of `gate`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.

    >>> swiglu(tr.zeros({"mlp": 2}), tr.ones({"mlp": 2}))
    f32[mlp=2]
    [0. 0.]
    """
    if not is_named(gate):
        return _fenced(gate, up)
    if gate.names != up.names or not fences_gradients(gate.array):
        return silu(gate) * up
    return gate.with_array(_fenced(gate.array, up.array))


@jax.custom_jvp
def _fenced(gate: jax.Array, up: jax.Array) -> jax.Array:
    return _gated(gate, up)


_gated = rounded_once(lambda gate, up: jax.nn.silu(gate) * up)


@_fenced.defjvp
def _derivative(operands, changes):
    return _gated(*operands), _linear(operands, changes)


def _change(kept, changes):
    gate, up = kept
    share = jax.nn.sigmoid(gate)
    return changes[0] * up * share * (1 + gate * (1 - share)) + gate * share * changes[1]


def _backward(kept, d_out):
    gate, up = made_again(kept)
    return jax.lax.optimization_barrier(_gradients(gate, up, d_out))


@rounded_once
def _gradients(gate, up, d_out):
    share = jax.nn.sigmoid(gate)
    d_gate = d_out * up * share * (1 + gate * (1 - share))
    return d_gate, d_out * gate * share


_linear = linear(_change, _backward)
