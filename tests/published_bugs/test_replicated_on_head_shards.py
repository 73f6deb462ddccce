"""A replicated value meets head shards, and its gradient is summed over no or not all of the devices that used it.

1. pytorch/torchtitan pull request 1373: the rotary part of multi-latent attention's keys is the same on all devices of
   the tensor axis and is added to keys that are sliced by head. Its gradient was never summed over that axis.
2. NVIDIA/Megatron-LM issue 7452: the weight of an output norm is used on head shards, and its gradient was summed over
   the tensor axis only with sequence parallelism.
"""

import re

import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from tests.mesh.told import told
from trellis import Axis, f32


def axes(**sizes):
    return [Axis(name, size) for name, size in sizes.items()]


# Bug 1.


def key_loss(x, w_key, w_rope, w_query):
    """One device: squared attention scores of keys that share their rotary part over heads."""
    key = jnp.einsum("bpe,ehd->bphd", x, w_key) + jnp.einsum("bpe,ed->bpd", x, w_rope)[:, :, None]
    query = jnp.einsum("bpe,ehd->bphd", x, w_query)
    return jnp.sum(jnp.einsum("bphd,bqhd->bhpq", query, key) ** 2)


WEIGHTS = {"x": "batch/data pos embed", "key": "embed heads/model dim", "rope": "embed dim"}


@tr.shard_map
def key_scores(
    x: f32["batch/data pos embed"],
    w_key: f32["embed heads/model dim"],
    w_rope: f32["embed dim"],
    w_query: f32["embed heads/model dim"],
) -> f32["batch/data heads/model pos key_pos"]:
    key = tr.einsum("batch/data pos embed, embed heads/model dim -> batch/data pos heads/model dim", x, w_key)
    rope = tr.einsum("batch/data pos embed, embed dim -> batch/data pos dim", x, w_rope)
    query = tr.einsum("batch/data pos embed, embed heads/model dim -> batch/data pos heads/model dim", x, w_query)
    key = key + rope[:, :, None]  # the published line: replicated meets sliced
    return tr.einsum(
        "batch/data pos heads/model dim, batch/data key_pos heads/model dim -> batch/data heads/model pos key_pos",
        query,
        key,
    )


@pytest.mark.slow
def test_1_manual_the_published_forward_pass_has_the_right_gradient(put, alone, close):
    arrays = (
        put("b/data p e", 8, 3, 4),
        put("e h/model d", 4, 2, 6, seed=1),
        put("e d", 4, 6, seed=2),
        put("e h/model d", 4, 2, 6, seed=3),
    )
    got = jax.jit(jax.grad(lambda *a: jnp.sum(key_scores(*a) ** 2), argnums=(0, 1, 2, 3)))(*arrays)
    close(got, jax.grad(key_loss, argnums=(0, 1, 2, 3))(*alone(*arrays)))


@pytest.mark.slow
def test_1_manual_a_gradient_by_hand_cannot_leave_out_an_axis(put):
    @tr.shard_map
    def rope_gradient(x: f32["batch/data pos embed"], d_key: f32["batch/data pos heads/model dim"]) -> f32["embed dim"]:
        gradient = tr.einsum("batch/data pos embed, batch/data pos heads/model dim -> embed dim +data +model", x, d_key)
        return tr.reshard("embed dim +data +model -> embed dim +model", gradient)  # summed over data only

    @tr.shard_map
    def unwritten(x: f32["batch/data pos embed"], d_key: f32["batch/data pos heads/model dim"]) -> f32["embed dim"]:
        gradient = tr.einsum("batch/data pos embed, batch/data pos heads/model dim -> embed dim +data", x, d_key)
        return tr.reshard("embed dim +data -> embed dim", gradient)

    x, d_key = put("b/data p e", 8, 3, 4), put("b/data p h/model d", 8, 3, 2, 6)
    message = (
        "a result must match its annotation, got a sum pending along model for f32[embed dim], in result of "
        '`rope_gradient`: end the function with reshard("embed dim +model -> embed dim", ...)'
    )
    with pytest.raises(tr.PendingSumError, match=re.escape(message)):
        rope_gradient(x, d_key)
    message = (
        "a sum over a sliced name must be marked as pending, got 'heads/model' summed and no '+model' in the result, "
        "in einsum('batch/data pos embed, batch/data pos heads/model dim -> embed dim +data'): write '-> embed dim "
        "+data +model', and settle it with "
        'reshard("embed dim +data +model -> embed dim", ...)'
    )
    with pytest.raises(tr.NotationError) as error:
        unwritten(x, d_key)
    assert message in told(error, by_line=True)


def named_key_loss(weights, x):
    key = tr.einsum("batch pos embed, embed heads dim -> batch pos heads dim", x, weights["key"])
    rope = tr.einsum("batch pos embed, embed dim -> batch pos dim", x, weights["rope"])
    query = tr.einsum("batch pos embed, embed heads dim -> batch pos heads dim", x, weights["query"])
    key = tr.rename(key + rope, {"pos": "key_pos"})
    scores = tr.einsum("batch pos heads dim, batch key_pos heads dim -> batch heads pos key_pos", query, key)
    return (scores * scores).sum().array


@pytest.mark.slow
def test_1_explicit_the_gradient_is_summed_where_the_types_say_so(mesh, alone, close):
    layout = tr.Layout(mesh, compute={"batch": "data", "heads": "model"})
    with layout:
        keys = jax.random.split(jax.random.key(0), 4)
        weights = {
            "key": tr.random.normal(keys[0], axes(embed=4, heads=2, dim=6)),
            "rope": tr.random.normal(keys[1], axes(embed=4, dim=6)),
            "query": tr.random.normal(keys[2], axes(embed=4, heads=2, dim=6)),
        }
        x = tr.random.normal(keys[3], axes(batch=8, pos=3, embed=4))
        got = jax.jit(jax.grad(named_key_loss))(weights, x)
        assert tr.typeof(got["rope"]) == "f32[embed=4 dim=6]"
        rows = tr.ledger(jax.grad(named_key_loss), weights, x)
    # The sum that was missing: of the rotary part's gradient, over the tensor axis, in the backward pass.
    sums = [row.what for row in rows if row.axes == ("model",)]
    assert sums == ["batch/data pos dim +model -> batch/data pos dim"]
    a, w = alone(x.array, {name: value.array for name, value in weights.items()})
    want = jax.jit(jax.grad(lambda w: key_loss(a, w["key"], w["rope"], w["query"])))(w)
    close({name: value.array for name, value in got.items()}, want)


# Bug 2.


def norm_loss(x, weight):
    normal = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return jnp.sum(jnp.tanh(normal * weight[None, None, None]))


@tr.shard_map
def normalize(x: f32["batch/data pos heads/model dim"], weight: f32["dim"]) -> f32["batch/data pos heads/model dim"]:
    normal = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return jnp.tanh(normal * weight[None, None, None])


@tr.shard_map
def normalize_positions(
    x: f32["batch/data pos/model heads dim"], weight: f32["dim"]
) -> f32["batch/data pos/model heads dim"]:
    normal = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return jnp.tanh(normal * weight[None, None, None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "text"), [(normalize, "b/data p h/model d"), (normalize_positions, "b/data p/model h d")]
)
def test_2_manual_with_and_without_sequence_parallelism(put, alone, close, program, text):
    x, weight = put(text, 8, 4, 2, 6), put("d", 6, seed=1)
    got = jax.jit(jax.grad(lambda x, w: jnp.sum(program(x, w)), argnums=(0, 1)))(x, weight)
    close(got, jax.grad(norm_loss, argnums=(0, 1))(*alone(x, weight)))


@pytest.mark.slow
def test_2_manual_a_switch_that_leaves_out_the_sum_is_refused(put):
    def weight_gradient(sequence_parallel: bool):
        @tr.shard_map
        def gradient(
            normal: f32["batch/data pos heads/model dim"], d_out: f32["batch/data pos heads/model dim"]
        ) -> f32["dim"]:
            total = tr.einsum(
                "batch/data pos heads/model dim, batch/data pos heads/model dim -> dim +data +model", normal, d_out
            )
            if sequence_parallel:
                return tr.all_reduce("dim +data +model -> dim", total)
            return tr.all_reduce("dim +data +model -> dim +model", total)

        return gradient

    x = put("b/data p h/model d", 8, 4, 2, 6)
    assert weight_gradient(True)(x, x).shape == (6,)
    with pytest.raises(
        tr.PendingSumError, match="got a sum pending along model for f32\\[dim\\], in result of `gradient`"
    ):
        weight_gradient(False)(x, x)


@pytest.mark.slow
@pytest.mark.parametrize("positions", [{}, {"pos": "model"}], ids=["heads", "sequence"])
def test_2_explicit_with_and_without_sequence_parallelism(mesh, alone, close, positions):
    layout = tr.Layout(mesh, compute={"batch": "data", **({} if positions else {"heads": "model"}), **positions})

    def loss(weight, x):
        normal = x / tr.sqrt((x * x).mean("dim") + 1e-6)
        return tr.tanh(normal * weight).sum().array

    with layout:
        x = tr.random.normal(jax.random.key(0), axes(batch=8, pos=4, heads=2, dim=6))
        weight = tr.random.normal(jax.random.key(1), axes(dim=6))
        got = jax.jit(jax.grad(loss))(weight, x)
        assert tr.typeof(got) == "f32[dim=6]"
    a, w = alone(x.array, weight.array)
    close(got.array, jax.grad(norm_loss, argnums=1)(a, w))
