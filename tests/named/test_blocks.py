"""Numbers in blocks with a scale each: to the bit of `ml_dtypes`, unbiased where rounded at random, on every mesh."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import trellis as tr
from trellis.named.blocks import Blocks, block_of, in_blocks, zeros_in_blocks

WIDE = jax.random.normal(jax.random.key(0), (16, 96)) * jnp.exp(3 * jax.random.normal(jax.random.key(1), (16, 96)))


def emulated(x):
    """MXFP8 by `ml_dtypes` alone: numbers, and their scales in float64."""
    blocks = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, 32)
    scales = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(-1) / 448))
    values = (blocks / scales[..., None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return values.reshape(x.shape), scales


@pytest.mark.slow
def test_blocks_are_those_of_ml_dtypes():
    found = in_blocks(tr.named(WIDE, "embed mlp"), 1)
    values, scales = emulated(WIDE)
    assert str(found.values.dtype) == "float8_e4m3fn" and str(found.scales.dtype) == "float8_e8m0fnu"
    assert found.scales.names == ("embed", "mlp_block")
    np.testing.assert_array_equal(np.asarray(found.values.array).view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(found.scales.array).astype(np.float64), scales)
    opened = values.astype(np.float64).reshape(16, 3, 32) * scales[..., None]
    np.testing.assert_array_equal(found.opened().array, opened.reshape(16, 96))


@pytest.mark.slow
@pytest.mark.parametrize("squares", [False, True])
def test_what_is_rounded_at_random_is_right_in_the_mean(squares):
    x = jnp.square(WIDE) if squares else WIDE
    once = jax.jit(lambda key: in_blocks(x, 1, key=key, squares=squares).opened())
    drawn = np.stack(
        [np.square(once(key)) if squares else once(key) for key in jax.random.split(jax.random.key(2), 256)]
    )
    scales = np.repeat(emulated(WIDE)[1], 32, axis=-1).reshape(16, 96)
    small = np.abs(WIDE) < scales / 64  # below the least normal number: squares' roots do not become zero
    low, high = drawn.min(0), drawn.max(0)  # a draw is one of two: its deviation is known, and depends on no chance
    error = np.abs(drawn.mean(0) - x) / (np.sqrt(np.maximum((x - low) * (high - x), 0)) / 16 + 1e-30)
    moved = (drawn.std(0) > 0) & ~(small & squares)
    assert moved.mean() > 0.7 and error[moved].max() < 6
    if squares:
        assert (drawn > 0).all()
    neighbours = np.stack([np.asarray(in_blocks(WIDE, 1, key=jax.random.key(n)).values) for n in range(32)])
    assert all(len(np.unique(at)) <= 2 for at in neighbours.reshape(32, -1).T.astype(np.float32))


@pytest.mark.slow
def test_a_draw_belongs_to_a_place_in_the_whole_array():
    key = jax.random.key(7)
    alone = in_blocks(tr.named(WIDE, "embed mlp"), 1, key=key)
    for sizes, spec in (({"data": 8}, ("data", None)), ({"data": 2, "model": 3}, ("data", "model"))):
        mesh = tr.make_mesh(jax.devices()[: int(np.prod([*sizes.values()]))], **sizes)
        with jax.set_mesh(mesh):
            x = tr.named(jax.device_put(WIDE, jax.NamedSharding(mesh, jax.P(*spec))), "embed mlp")
            sliced = jax.jit(lambda x: in_blocks(x, 1, key=key))(x)
        assert str(sliced.scales.type) == str(sliced.values.type).replace("mlp", "mlp_block")
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(sliced), strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.slow
def test_zeros_stay_zeros_and_what_is_not_finite_shows():
    for key in (None, jax.random.key(0)):
        assert not in_blocks(jnp.zeros((2, 64)), 1, key=key).opened().any()
        for bad in (jnp.inf, jnp.nan):
            opened = in_blocks(jnp.ones((2, 64)).at[0, 3].set(bad), 1, key=key).opened()
            assert not jnp.isfinite(opened[0, :32]).any() and (opened[0, 32:] == 1).all() and (opened[1] == 1).all()


def test_zeros_are_made_in_blocks_where_rounded_ones_are():
    layout = tr.Layout(tr.make_mesh(data=4, model=2), params={"embed": "data", "mlp": "model"}, compute={})
    with layout:
        x = tr.shard(tr.zeros({"embed": 16, "mlp": 128}))
        made, rounded = jax.jit(lambda x: (zeros_in_blocks(x, 1), in_blocks(x, 1)))(x)
    assert jax.tree.structure(made) == jax.tree.structure(rounded)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(rounded)):
        assert a.sharding == b.sharding and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_block_is_a_divisor_and_no_longer_than_32():
    assert [block_of(n) for n in (1, 7, 32, 64, 96, 100, 257)] == [1, 7, 32, 32, 32, 25, 1]


@pytest.mark.slow
def test_blocks_are_a_tree():
    found = in_blocks(WIDE, 0)
    paths = [jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree_util.tree_leaves_with_path(found)]
    assert paths == ["values", "scales"] and isinstance(jax.tree.map(jnp.copy, found), Blocks)
