"""A mixture of experts of named slices in a manual program: right, or refused."""

import jax
import numpy as np
import pytest

import trellis as tr
from trellis.named import NamesError
from trellis.nn import moe

TEXTS = ("batch pos embed", *("batch pos choices",) * 2, *("experts embed mlp",) * 2, "experts mlp embed")


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    draw = lambda key, names: tr.random.normal(
        key, {n: {"batch": 4, "pos": 6, "embed": 8, "experts": 4, "mlp": 16, "routes": 4}[n] for n in names.split()}
    )
    choices = moe.choose(draw(keys[0], "batch pos routes"), 2)
    x, *weights = (draw(key, TEXTS[i]) for key, i in zip(keys[1:], (0, 3, 4, 5), strict=True))
    return [x, *choices, *weights]


def mixed(x, ids, weights, *products, way="auto"):
    return moe.mix(x, moe.Choices(ids, weights), *products, way=way)


def manual(texts, way="auto"):
    """`mix` in a program whose arguments are sliced so."""
    x, ids, weights, gate, up, down = texts

    @tr.shard_map
    def program(
        x: tr.f32[x], ids: tr.i32[ids], weights: tr.f32[weights], gate: tr.f32[gate], up: tr.f32[up], down: tr.f32[down]
    ) -> tr.f32[x]:
        return mixed(x, ids, weights, gate, up, down, way=way)

    return program


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch", "pos"])
def test_tokens_in_slices_are_mixed_where_they_are(arrays, name):
    """Values, and gradients, which are summed over devices where each has all of a weight."""
    x, ids, weights, *products = arrays
    program = manual([text.replace(name, f"{name}/data") for text in TEXTS])
    loss = lambda fn: jax.value_and_grad(lambda x, *w: tr.settle((fn(x, ids, *w) ** 2).sum()).array, (0, 1, 2, 3, 4))
    wanted = loss(mixed)(x, weights, *products)
    with jax.set_mesh(tr.make_mesh(jax.devices()[:2], data=2)):
        seen = jax.jit(loss(program))(x, weights, *products)
    for mine, theirs in zip(jax.tree.leaves(seen), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["auto", "gather", "slots"])
@pytest.mark.parametrize("name", ["experts", "mlp", "embed", "choices"])
def test_slices_that_need_other_devices_are_refused(arrays, name, way):
    """Each device would multiply with its slice as if it were the whole."""
    program = manual([text.replace(name, f"{name}/data") for text in TEXTS], way)
    with (
        jax.set_mesh(tr.make_mesh(jax.devices()[:2], data=2)),
        pytest.raises(NamesError, match=f"mix needs the whole of '{name}', got .*{name}/data.*: reshard it first"),
    ):
        program(*arrays)


@pytest.mark.slow
def test_tokens_and_choices_in_other_slices_are_refused(arrays):
    """Of the same size on each device, so that no shape tells."""
    over = ("data", "model", "model")
    texts = [text.replace("batch", f"batch/{axis}") for text, axis in zip(TEXTS, over)] + list(TEXTS[3:])
    with (
        jax.set_mesh(tr.make_mesh(jax.devices()[:4], data=2, model=2)),
        pytest.raises(NamesError, match="sliced the same way in all operands, got batch over data and over model"),
    ):
        manual(texts)(*arrays)
