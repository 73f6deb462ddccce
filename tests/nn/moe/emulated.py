"""A ragged all-to-all made of what every backend has, for tests on CPUs."""

import jax.numpy as jnp
from jax import lax


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """As the documentation of `jax.lax.ragged_all_to_all` describes it, by gathering everything everywhere.

    Sizes that senders and receivers do not agree on give numbers that are none.
    """
    me = lax.axis_index(axis_name)
    gather = lambda x: lax.all_gather(x, axis_name, axis=0)
    operands, offsets, sizes, lands = map(gather, (operand, input_offsets, send_sizes, output_offsets))
    agreed = (sizes[:, me] == recv_sizes).all()
    first, count, begin = offsets[:, me], sizes[:, me], lands[:, me]
    place = jnp.arange(output.shape[0])
    inside = (place[None] >= begin[:, None]) & (place[None] < (begin + count)[:, None])  # "senders rows"
    sender = inside.argmax(axis=0)
    row = jnp.clip(first[sender] + place - begin[sender], 0, operand.shape[0] - 1)
    output = jnp.where(inside.any(axis=0).reshape(-1, *[1] * (output.ndim - 1)), operands[sender, row], output)
    return jnp.where(
        agreed, output, jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else jnp.iinfo(output.dtype).max
    )
