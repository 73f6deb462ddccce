"""Attention of named slices in a manual program: right, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import f32, nn
from trellis.named import NamesError

Q, K = "batch pos heads head_dim", "batch key_pos kv_heads head_dim"


def arrays(heads, kv_heads):
    random = np.random.default_rng(0)
    return tuple(random.normal(size=(2, 4, n, 4)).astype(np.float32) for n in (heads, kv_heads, heads))


def sliced(names, over):
    return " ".join(f"{name}/{over[name]}" if name in over else name for name in names.split())


def attend(over, **options):
    @tr.shard_map
    def manual(q: f32[sliced(Q, over)], k: f32[sliced(K, over)]) -> f32[sliced(Q, over)]:
        return nn.attend(q, k, k, **options)

    return manual


def placed(mesh, x, names, over):
    spec = jax.P(*(over.get(name) for name in names.split()))
    return tr.named(jax.device_put(x, jax.NamedSharding(mesh, spec)), names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over", "heads", "kv_heads", "options"),
    [
        ({"heads": "model"}, 4, 2, {}),
        ({"heads": "model"}, 8, 2, {}),
        ({"heads": "model"}, 4, 1, {}),
        ({"heads": "model"}, 4, 4, {}),
        ({"heads": "model", "kv_heads": "model"}, 8, 4, {"window": 2}),
        ({"pos": "model"}, 4, 2, {"causal": False}),
        ({"batch": "model"}, 4, 2, {}),
    ],
)
def test_values_and_gradients_are_those_of_one_device(over, heads, kv_heads, options):
    """Also where a device's query heads read key heads that are whole on each: it takes its own."""
    mesh = tr.make_mesh(jax.devices()[:2], model=2)
    q, k, weights = arrays(heads, kv_heads)
    manual = attend(over, **options)
    with jax.set_mesh(mesh):
        loss = lambda q, k: tr.settle((manual(q, k) * placed(mesh, weights, Q, over)).sum()).array
        ours = jax.jit(jax.value_and_grad(loss, (0, 1)))(placed(mesh, q, Q, over), placed(mesh, k, K, over))
    plain = lambda q, k: jnp.sum(nn.dot_product_attention(q, k, k, **options) * weights)
    wanted = jax.jit(jax.value_and_grad(plain, (0, 1)))(q, k)
    for seen, right in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(seen), np.asarray(right), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("over", "options", "words"),
    [
        ({"pos": "model"}, {}, "'pos' must be whole, since a device's queries begin at position 0 of the keys"),
        (
            {"pos": "model"},
            {"causal": False, "window": 2},
            "'pos' must be whole, since a device's queries begin at position 0 of the keys",
        ),
        ({"pos": "model", "key_pos": "model"}, {}, "'key_pos' must be whole, since queries see all keys"),
        ({"kv_heads": "model"}, {}, "key heads must be sliced like the query heads that read them"),
        ({"head_dim": "model"}, {}, "'head_dim' must be whole, since scores sum over it"),
    ],
)
def test_what_a_device_cannot_do_by_itself_is_refused(over, options, words):
    mesh = tr.make_mesh(jax.devices()[:2], model=2)
    q, k, _ = arrays(4, 2)
    with jax.set_mesh(mesh), pytest.raises(NamesError, match=words) as told:
        attend(over, **options)(placed(mesh, q, Q, over), placed(mesh, k, K, over))
    assert "reshard" in str(told.value) and "/model" in str(told.value)


@pytest.mark.slow
def test_the_result_is_sliced_as_the_queries_are():
    mesh = tr.make_mesh(jax.devices()[:2], model=2)
    q, k, _ = arrays(4, 2)

    @tr.shard_map
    def program(q: f32[sliced(Q, {"heads": "model"})], k: f32[K]) -> f32["batch pos head_dim +model"]:
        return nn.attend(q, k, k).sum("heads")

    with jax.set_mesh(mesh):
        made = tr.settle(program(placed(mesh, q, Q, {"heads": "model"}), placed(mesh, k, K, {})))
    wanted = nn.dot_product_attention(q, k, k).sum(2)
    np.testing.assert_allclose(np.asarray(made.array), np.asarray(wanted), rtol=1e-5, atol=1e-5)


def test_slices_that_only_look_alike_are_refused():
    """Of the same size on each device, so that no shape tells: another part of the batch, other heads' sinks."""
    mesh = tr.make_mesh(jax.devices()[:4], data=2, model=2)
    q, k, _ = arrays(4, 2)
    over, others = {"batch": "data"}, {"batch": "model"}

    @tr.shard_map
    def batches(q: f32[sliced(Q, over)], k: f32[sliced(K, others)]) -> f32[sliced(Q, over)]:
        return nn.attend(q, k, k)

    @tr.shard_map
    def cached(q: f32[Q], k: f32[K], sinks: f32["heads/model"]) -> f32[Q]:
        return nn.attend_cached(q, k, k, jnp.int32(3), sinks=sinks)

    same = "a name must be sliced the same way in all operands, got"
    with jax.set_mesh(mesh):
        with pytest.raises(NamesError, match=f"{same} batch over data and over model"):
            batches(placed(mesh, q, Q, over), placed(mesh, k, K, others))
        sinks = placed(mesh, np.ones(4, np.float32), "heads", {"heads": "model"})
        with pytest.raises(NamesError, match=f"{same} heads over nothing and over model"):
            cached(placed(mesh, q[:, :1], Q, {}), placed(mesh, k, K, {}), sinks)
