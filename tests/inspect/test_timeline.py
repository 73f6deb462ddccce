"""What is in memory when: calls and loops."""

import jax
import jax.numpy as jnp
from jax import lax

from trellis.inspect import memory


def test_a_function_called_twice_keeps_two_values():
    squash = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def twice(x, w):
        return jnp.sum(squash(squash(x, w), w))

    found = memory(jax.grad(twice), jnp.ones((4, 4)), jnp.ones((4, 4)), compile=False)
    assert [b.num_bytes for b in found.kept] == [64, 64]


def test_what_a_call_takes_ends_with_it_where_a_loop_ends_it():
    """The last operation of the call is one of the loop's body."""

    @jax.jit
    def call(x, wide):
        shift = wide.sum()
        return lax.fori_loop(0, jnp.int32(shift), lambda _, x: jnp.sin(x + shift), x)

    def several(x):
        for _ in range(4):
            x = call(x, jnp.cumsum(jnp.broadcast_to(x, (1024, *x.shape)), 0))
        return x

    found = memory(several, jnp.ones(64), compile=False)
    wide = 1024 * 64 * 4
    assert wide <= found.total < 2.5 * wide


def test_what_loops_within_loops_carry_is_there_once():
    """A store that each turn writes rows of, as the stages of a pipeline do with what they keep."""

    def fill(x):
        put = lambda store, at: (lax.dynamic_update_index_in_dim(store, jnp.sin(x + store[0]), at, 0), None)
        turn = lambda store, t: (lax.scan(put, store, 4 * t + jnp.arange(4))[0], None)
        return lax.scan(turn, jnp.zeros((16, *x.shape)), jnp.arange(4))[0].sum()

    found = memory(fill, jnp.ones((64, 64)))
    store = 16 * 64 * 64 * 4
    assert store <= found.peak < 1.5 * store and store <= found.total < 1.5 * store
