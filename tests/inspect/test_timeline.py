"""What is in memory when: calls and loops."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from trellis.hardware.chips import target
from trellis.inspect import memory
from trellis.plan import quick_plan
from trellis.recipes import load_run


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


@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.parametrize("read_later", [False, True])
def test_an_update_of_what_is_read_later_is_a_copy(viewed, read_later):
    def changed(x, w):
        x = jnp.tanh(x @ w) @ w
        y = x.reshape(8, 8, 64).at[0].set(0.0).reshape(64, 64) if viewed else x.at[2].set(0.0)
        return (x if read_later else y) @ y

    x = jnp.ones((64, 64))
    found = memory(changed, x, x, compile=False)
    assert found.bytes_of("temporaries") // x.nbytes == 2 + read_later


def test_what_a_product_in_blocks_makes_is_there():
    """A kernel writes it, although what reads it is elementwise."""

    def product(x, y, of_x, of_y):
        out = jax.nn.scaled_matmul(x, y, of_x, of_y, preferred_element_type=jnp.float32)
        return jnp.tanh(out).sum()

    factor, scales = jnp.ones((1, 64, 32), jnp.float8_e4m3fn), jnp.ones((1, 64, 1), jnp.float8_e8m0fnu)
    found = memory(product, factor, factor, scales, scales, compile=False)
    assert found.bytes_of("temporaries") >= 4 * 64 * 64


def test_what_loops_within_loops_carry_is_there_once():
    """A store that each turn writes rows of, as the stages of a pipeline do with what they keep."""

    def fill(x):
        put = lambda store, at: (lax.dynamic_update_index_in_dim(store, jnp.sin(x + store[0]), at, 0), None)
        turn = lambda store, t: (lax.scan(put, store, 4 * t + jnp.arange(4))[0], None)
        return lax.scan(turn, jnp.zeros((16, *x.shape)), jnp.arange(4))[0].sum()

    found = memory(fill, jnp.ones((64, 64)))
    store = 16 * 64 * 64 * 4
    assert store <= found.peak < 1.5 * store and store <= found.total < 1.5 * store


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_8b_v5p_64", "mixtral_8x7b_v5p_64"])
def test_layers_written_out_keep_what_those_of_a_loop_do(family):
    """A kernel's sums of scores lie in 128 lanes, of which the backward pass reads one, and rotated queries are made of
    a product and a turned one: what is read later is written, and what it is made of ends."""
    sizes = {"model.layers": "3", "model.embed": "512", "model.mlp": "1024", "model.vocab": "2048"}
    sizes |= {"model.heads": "16", "model.kv_heads": "4", "data.sequence_length": "2048", "remat.policy": "saved"}
    plans = [
        quick_plan(load_run(family, sizes | {"scan_layers": scanned}), target("v5p:4x4x4"))
        for scanned in ("true", "false")
    ]
    loop, out = (plan.memory.peak for plan in plans)
    assert abs(out - loop) < 0.08 * loop
    assert not [buffer for buffer in plans[1].memory.kept if "pallas_call" in buffer.name and "f32" in buffer.what]


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "lanes"), [(64, 2), (128, 1)])
def test_heads_of_layers_written_out_lie_as_kernels_have_them(head_dim, lanes):
    """In whole lanes of 128. In a loop libtpu keeps them as they are, in one array for all turns."""
    sizes = {"model.layers": "2", "model.embed": "512", "model.mlp": "1024", "model.vocab": "2048"}
    sizes |= {"model.heads": "8", "model.kv_heads": "8", "model.head_dim": str(head_dim), "remat.policy": "saved"}

    def kept(scan_layers: str) -> dict[str, int]:
        plan = quick_plan(load_run("llama_8b_v5p_64", sizes | {"scan_layers": scan_layers}), target("v5p:4x4x4"))
        return {buffer.name: buffer.num_bytes for buffer in plan.memory.kept_by_name() if buffer.name in saved}

    saved = ("query", "key")
    loop, out = kept("true"), kept("false")
    assert set(loop) == set(saved)
    assert out == {name: lanes * size for name, size in loop.items()}


@pytest.mark.slow
def test_weights_are_gathered_ahead_where_the_forward_pass_hides_no_more():
    """On a v6e, where SparseCores gather beside computation: with few tokens there is more to move than to compute."""
    sizes = {"model.layers": "4", "model.vocab": "2048", "scan_layers": "false"}
    long, short = (
        quick_plan(load_run("llama_8b_v6e_256", sizes | {"data.sequence_length": length}), target("v6e:16x16"))
        for length in ("8192", "1024")
    )
    ahead = lambda plan: sum(b.num_bytes for b in plan.memory.buffers if b.name.endswith("gathered ahead"))
    assert long.times.ahead == 0 == ahead(long)
    assert short.times.ahead == pytest.approx(1 / 3) and ahead(short) > 0


@pytest.mark.slow
def test_gradients_that_gpus_round_in_one_kernel_are_there_together():
    """Those of gate and up: each is transformed in float32 first, in blocks of 16."""
    sizes = {"model.layers": "1", "model.vocab": "512", "data.sequence_length": "256", "batch_size": "16"}
    plan = quick_plan(load_run("llama_84m", sizes | {"precision.products.mlp": "nvfp4"}), target("4xB200"))
    transformed = [buffer for buffer in plan.memory.buffers if buffer.what == "f32[16/data 16 4096 16]"]
    assert len(transformed) == 2


@pytest.mark.parametrize(
    "made",
    [
        lambda x: lax.cumprod(x, 0),
        lambda x: lax.cummax(x, 0),
        lambda x: lax.cumlogsumexp(x, 0),
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"),
        lambda x: lax.linalg.triangular_solve(jnp.eye(64), x, left_side=True, lower=True),
        lambda x: x.at[jnp.arange(8)].add(2.0),
        lambda x: x.at[jnp.arange(8)].max(2.0),
        lambda x: x.at[jnp.arange(8)].multiply(2.0),
        lambda x: x.at[jnp.arange(8)].set(2.0),
    ],
)
def test_what_no_compiler_fuses_is_there(made):
    """Although elementwise work makes what it reads, and a sum reads what it makes."""
    x = jnp.ones((64, 256))
    found = memory(lambda x: (jnp.tanh(made(jnp.sin(x))) * 3).sum(), x, compile=False)
    assert found.total > 1.9 * x.nbytes
