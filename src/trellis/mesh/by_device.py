"""Programs of one device's slices, run from outside of compiled programs, too."""

from collections.abc import Callable

import jax


def by_device(function: Callable, **specs) -> Callable:
    """`jax.shard_map`, as one program where nothing is traced.

    Left to itself JAX compiles and runs every operation of the function as a program of its own there, which takes
    twenty times as long for a lookup. Inside of a trace nothing is left of the difference.

    Args:
        function: of one device's slices.
        specs: `mesh`, `in_specs`, `out_specs` and the like, as `jax.shard_map` has them.
    """
    return jax.jit(jax.shard_map(function, **specs), inline=True)
