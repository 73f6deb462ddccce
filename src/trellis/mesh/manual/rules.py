"""Backward rules of one's own in a manual program, checked before anybody differentiates it from outside.

The gradient of a call of `shard_map` is JAX's to make, when the function's own program was checked long before. A rule
that sums over devices what JAX's types have summed, as tensor parallelism is written elsewhere, would count it as often
as there are devices. So the gradient of a program with such rules is traced once more here, and checked likewise.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from trellis.frames import in_a_library
from trellis.mesh.manual.check import SecondSum, check_pending
from trellis.notation.binding import Bindings
from trellis.program.reading import Program
from trellis.program.trace import equations_of


def check_rules(traced, slices, bindings: Bindings) -> None:
    """Refuses a backward rule of the user's that sums over devices what is the same on all of them.

    Args:
        traced: the body of a `shard_map`, with its constants.
        slices: its arguments.
        bindings: those of the call, for messages.

    Raises:
        SecondSum: a rule sums a second time.
    """
    if not any(map(_is_users, equations_of(traced.jaxpr, "custom_vjp_call"))):
        return

    def backward(*slices):
        out, pull = jax.vjp(lambda *slices: eval_jaxpr(traced.jaxpr, traced.consts, *slices), *slices)
        return pull([x if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0) for x in out])

    try:
        check_pending(Program(jax.make_jaxpr(backward)(*slices).jaxpr), bindings, None)
    except SecondSum:
        raise
    except Exception:  # what has no gradient is told to whoever asks for one
        return


def _is_users(equation) -> bool:
    """Whether a rule stands in the user's code, by where its function does."""
    place = str(equation.params["call_jaxpr"].jaxpr.debug_info.func_src_info)
    return not in_a_library(place.rpartition(" at ")[2].rpartition(":")[0])
