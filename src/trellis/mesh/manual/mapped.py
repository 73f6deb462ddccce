"""Maps over what begins or ends pending sums and copies, which JAX (0.10.2 to 0.12.0) has no rules for.

`jax.vmap`, and what is made of it, Jacobians and Hessians, would end in an error without words. Casts and sums over
devices do to each element what they do to all, and a gather or a scatter is of the dimension behind the mapped one.
"""

import jax.numpy as jnp
from jax.interpreters import batching

from trellis._compat import of_states

# The primitives, and the parameter that has a dimension.
_PRIMITIVES = {
    "preduced_p": "",
    "vary_unreduced_cast_p": "",
    "reduced_vary_cast_p": "",
    "unreduced_psum_p": "",
    "all_gather_reduced_p": "all_gather_dimension",
    "unreduced_reduce_scatter_p": "scatter_dimension",
}


def map_over_states() -> None:
    """Gives JAX the rules. If the private names are missing, nothing changes."""
    for name, dim in _PRIMITIVES.items():
        if (primitive := of_states(name)) is not None:
            batching.fancy_primitive_batchers[primitive] = _mapping(primitive, dim)


def _mapping(primitive, dim: str):
    def mapped(_, values, dims, **params):
        (x,), (at,) = values, dims
        if not dim or at is None:
            return primitive.bind(x, **params), at
        return primitive.bind(jnp.moveaxis(x, at, 0), **params | {dim: params[dim] + 1}), 0

    return mapped
