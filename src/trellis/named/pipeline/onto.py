"""Adds gradients onto their sums, a table's in the rows that were looked up.

The gradient of a lookup is zero in all other rows. Making it whole for each microbatch and adding it costs several
passes over the table; scattering it into the sum costs one over the rows.
"""

from collections.abc import Callable

import jax
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import JaxprEqn, Literal


def onto(totals: list[jax.Array], function: Callable, *args) -> list[jax.Array]:
    """Adds to each total what a function gives for it, in the totals' dtypes.

    >>> table, ids, rows = jnp.zeros((4, 2)), jnp.array([2, 0, 2]), jnp.ones((3, 2), jnp.bfloat16)
    >>> gradient = lambda ids, rows: [jnp.zeros((4, 2), jnp.bfloat16).at[ids].add(rows)]
    >>> onto([table], gradient, ids, rows)[0].sum(1)
    Array([2., 0., 4., 0.], dtype=float32)

    Args:
        totals: arrays.
        function: gives a list of as many, of the same shapes; all arrays that it reads are its arguments.
        args: trees of arrays.
    """
    closed = jax.make_jaxpr(function)(*args)
    jaxpr, makes = closed.jaxpr, {v: e for e in closed.jaxpr.eqns for v in e.outvars}
    scatters = [_scatter(v, makes) for v in jaxpr.outvars]
    read = [[v] if e is None else e.invars[1:] for v, e in zip(jaxpr.outvars, scatters, strict=True)]
    program = jaxpr.replace(outvars=[v for mine in read for v in mine])
    values = iter(eval_jaxpr(program, closed.consts, *jax.tree.leaves(args)))
    found = [[next(values) for _ in mine] for mine in read]
    return [_added(total, e, *mine) for total, e, mine in zip(totals, scatters, found, strict=True)]


def _scatter(v, makes: dict) -> JaxprEqn | None:
    """The operation that makes a value, converted or not, by adding rows to zeros alone; None if there is none."""
    maker = None if isinstance(v, Literal) else makes.get(v)
    while maker is not None and maker.primitive.name == "convert_element_type":
        maker = makes.get(maker.invars[0])
    if maker is None or maker.primitive.name != "scatter-add":
        return None
    zeros = makes.get(maker.invars[0])
    filled = zeros is not None and zeros.primitive.name == "broadcast_in_dim"
    return maker if filled and isinstance(zeros.invars[0], Literal) and not zeros.invars[0].val else None


def _added(total: jax.Array, scatter: JaxprEqn | None, *more: jax.Array) -> jax.Array:
    """The total plus an array, or plus a scatter's rows at its places."""
    *places, x = more
    if scatter is None:
        return total + x.astype(total.dtype)
    how = {name: scatter.params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    return lax.scatter_add(total, *places, x.astype(total.dtype), scatter.params["dimension_numbers"], **how)
