"""What a loop's body reads from around it: its gradient is summed over the turns in float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from trellis._compat import bind, is_tracer, scan_counts
from trellis.mesh.manual.take import is_narrow
from trellis.named.backend import to_type


def scan_of(body: Callable, carry, moving, *, wide: bool = True, **how):
    """`jax.lax.scan`, in which the gradient of what the body reads from around it is summed in float32.

    JAX sums it in the value's own type, and a sum of equal terms in bfloat16 stops growing after 256. So values of
    fewer bits go into the loop in float32 and are rounded back there, which leaves them as they were. Compilers round
    them before the loop, where nothing is left of the two casts: only the sum is wider.

    Args:
        wide: whether the body may read such values. Then the loop takes longer to trace.
        **how: passed to `jax.lax.scan`.
    """
    run = lambda carry, moving: jax.lax.scan(body, carry, moving, **how)
    if not wide:
        return run(carry, moving)
    program, like = jax.make_jaxpr(run, return_shape=True)(carry, moving)
    given = list(map(jnp.asarray, jax.tree.leaves((carry, moving))))
    if any_narrow(program.consts):
        results = _with_wide_sums(program.jaxpr, program.consts, given)
    else:
        results = jaxpr_as_fun(program)(*given)
    return jax.tree.structure(like).unflatten(results)


def any_narrow(tree) -> bool:
    """Whether a gradient may be taken of any value of fewer bits in a tree."""
    return any(is_tracer(x) and is_narrow(x) for x in jax.tree.leaves(tree))


def _with_wide_sums(jaxpr: Jaxpr, consts: list, given: list) -> list:
    """The results of a program that is a loop."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *given), strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for equation in jaxpr.eqns:
        operands = list(map(read, equation.invars))
        if equation.primitive.name == "scan":
            made = _widened(equation, operands)
        else:  # a cast of what the loop starts with
            made = [bind(equation.primitive, operands, equation.params)]
        values.update(zip(equation.outvars, made, strict=True))
    return list(map(read, jaxpr.outvars))


def _widened(loop: JaxprEqn, operands: list) -> list:
    """A loop over values of few bits, on these values in float32."""
    constants, carried = scan_counts(loop.params)
    run, types = jaxpr_as_fun(loop.params["jaxpr"]), [x.dtype for x in operands[:constants]]
    around = [to_type(x, jnp.float32) if any_narrow(x) else x for x in operands[:constants]]

    def body(carry, moving):
        results = run(*map(to_type, around, types), *carry, *moving)
        return results[:carried], results[carried:]

    rest = operands[constants:]
    how = {name: loop.params[name] for name in ("length", "reverse", "unroll")}
    carry, stacks = jax.lax.scan(body, rest[:carried], rest[carried:], **how)
    return [*carry, *stacks]
