"""Values held as copies, whose gradients are partial sums, along mesh axes that slice something else or nothing."""

import jax
import jax.numpy as jnp

import trellis as tr
from trellis.named import NamedArray
from trellis.notation.state import state_of

from .program import Statement
from .scope import Scope


def held(x: NamedArray) -> NamedArray:
    """A value as copies along all mesh axes that do not slice it; as it is where a program is not of whole arrays."""
    state = state_of(x.array)
    if state.mode != "explicit" or state.pending or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    sizes = jax.typeof(x.array).sharding.mesh.shape
    more = [f"~{a}" for a in sizes if sizes[a] > 1 and a not in {*state.sliced, *state.copied}]
    before = state.words(x.names)
    return tr.reshard(" ".join([before, "->", before, *more]), x)


def copies(s: Scope):
    s.require(not s.mapped and s.setting.mode in ("explicit", "types"))
    x = s.pick(dtype=s.float())
    result = s.value(x.dims, x.dtype)
    return Statement("copies", (result,), (f"{result.var} = held({x.var})",), (f"{result.var} = {x.var}",))


STEPS = (copies,)
