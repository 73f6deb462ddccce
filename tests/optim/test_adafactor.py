"""Adafactor treats every matrix of a stack by itself, as Optax treats one that is alone, whatever slices or pads it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trellis as tr
from trellis.errors import UserError
from trellis.named import named
from trellis.optim import Adafactor, Constant, make_optimizer, on_arrays
from trellis.train import Checkpoints

# Name, shape, and the axes of the two sides of one matrix or vector of it, behind those that count them.
PARAMS = {
    "embedding": ("vocab embed", (24, 16), (0,), (1,)),
    "q": ("layers embed heads head_dim", (3, 16, 4, 5), (1,), (2, 3)),
    "out": ("layers heads head_dim embed", (3, 4, 5, 16), (3,), (1, 2)),
    "qkv": ("layers embed qkv heads head_dim", (2, 16, 3, 4, 3), (1,), (3, 4)),
    "experts": ("layers experts embed mlp", (2, 3, 16, 12), (2,), (3,)),
    "latent": ("layers q_latent heads head_dim", (2, 12, 4, 3), (1,), (2, 3)),
    "norm": ("layers embed", (16, 16), (1,), ()),
    "bias": ("layers qkv mlp", (2, 3, 16), (2,), ()),
    "final_norm": ("embed", (16,), (0,), ()),
}
FACTORED = ("embedding", "q", "out", "qkv", "experts", "latent")


def tree(seed):
    """Elements of different sizes in every row, column and matrix."""
    random = np.random.default_rng(seed)

    def one(shape):
        array = random.normal(size=shape)
        for axis, length in enumerate(shape):
            array *= np.exp(random.normal(size=length)).reshape([-1 if a == axis else 1 for a in range(len(shape))])
        return jnp.asarray(array.astype(np.float32))

    return {name: named(one(shape), names) for name, (names, shape, *_) in PARAMS.items()}


def adafactor(vocab_size=None, **options):
    config = Adafactor(**{"learning_rate": 1.0, "weight_decay": 0.0, "min_factored_size": 8} | options)
    return make_optimizer(config, Constant(warmup_steps=0), steps=9, vocab_size=vocab_size)


def steps(rule, gradients):
    """The updates of every step, and the last state."""
    state, found = jax.jit(rule.init)(gradients[0]), []
    for each in gradients:
        updates, state = jax.jit(rule.update)(each, state, each)
        found.append(updates)
    return found, state


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"beta1": 0.9}, {"clip_update_rms": None}, {"clip_update_rms": 0.3}], ids=str)
def test_every_matrix_of_a_stack_is_as_optax_has_it_alone(options):
    clip, b1 = options.get("clip_update_rms", 1.0), options.get("beta1")
    alone = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=8),
        optax.identity() if clip is None else optax.clip_by_block_rms(clip),
        optax.identity() if b1 is None else optax.ema(b1, debias=False),
        optax.scale(-1.0),
    )
    gradients = [tree(seed) for seed in range(3)]
    found, _ = steps(adafactor(**options), gradients)
    for name, (_, shape, first, rest) in PARAMS.items():
        many = tuple(a for a in range(len(shape)) if a not in first + rest)
        sizes = [int(np.prod([shape[a] for a in side])) for side in (many, first, rest) if side or side is many]

        def matrices(x, order=many + first + rest, sizes=sizes):
            return np.asarray(x.array).transpose(order).reshape(sizes)

        for i in range(len(matrices(gradients[0][name]))):
            with jax.numpy_dtype_promotion("standard"):
                wanted, _ = steps(alone, [jnp.asarray(matrices(g[name])[i]) for g in gradients])
            for one, all_of_it in zip(wanted, found, strict=True):
                np.testing.assert_allclose(matrices(all_of_it[name])[i], one, rtol=2e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("part", [..., 0], ids=["matrix", "vector"])
def test_plain_arrays_are_as_optax_has_them(part, kind):
    arrays = [tree(seed)["embedding"].array for seed in range(4)]
    gradients = [{"w": (x if kind == "real" else jax.lax.complex(x, arrays[3]))[part]} for x in arrays[:3]]
    rule = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=8), optax.clip_by_block_rms(1.0))
    with jax.numpy_dtype_promotion("standard"):
        wanted, _ = steps(rule, gradients)
    for one, other in zip(wanted, steps(adafactor(), gradients)[0], strict=True):
        np.testing.assert_allclose(-other["w"], one["w"], rtol=2e-5)


def test_a_constant_gradient_with_an_empty_row_and_column():
    """XLA computes ahead with constants: squares of what divides by empty rows and columns are too large."""
    rule, gradient = adafactor(min_factored_size=2), {"w": jnp.diag(jnp.asarray([1.0, 0.0, 2.0, 0.0]))}
    state = rule.init(gradient)
    wanted = np.asarray(jax.jit(rule.update)(gradient, state, gradient)[0]["w"])
    ahead = jax.jit(lambda state: rule.update(jax.tree.map(np.asarray, gradient), state, gradient)[0]["w"])
    np.testing.assert_allclose(ahead(state), wanted, rtol=1e-5)
    assert np.isfinite(wanted).all() and wanted.any()


def test_the_state_keeps_the_names_of_what_it_sums_up():
    state = adafactor().init(tree(0))
    squares = optax.tree.get(state, "squares")
    assert str(tr.typeof(squares["qkv"].rows)) == "f32[layers=2 embed=16 qkv=3]"
    assert str(tr.typeof(squares["qkv"].columns)) == "f32[layers=2 qkv=3 heads=4 head_dim=3]"
    assert str(tr.typeof(squares["experts"].rows)) == "f32[layers=2 experts=3 embed=16]"
    assert str(tr.typeof(squares["norm"])) == "f32[layers=16 embed=16]"
    assert {name for name, x in squares.items() if hasattr(x, "rows")} == {*FACTORED}


def padded(gradients, rows):
    pad = lambda x: named(jnp.pad(x.array, ((0, rows - x.shape["vocab"]), (0, 0))), x.names)
    return [{"embedding": pad(g["embedding"])} for g in gradients]


@pytest.mark.parametrize("least", [8, 16, 25])
def test_the_padding_of_a_vocabulary_changes_nothing(least):
    """24 words, which 25 rows are too few to factor, in 24 and in 32 rows."""
    gradients = [{"embedding": tree(seed)["embedding"]} for seed in range(3)]
    options = {"clip_update_rms": 0.5, "min_factored_size": least, "vocab_size": 24}
    wanted, state = steps(adafactor(**options), gradients)
    found, wide = steps(adafactor(**options), padded(gradients, 32))
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(other["embedding"].array[:24], one["embedding"].array, rtol=1e-5)
        assert not np.any(other["embedding"].array[24:])
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(wide), strict=True):
        np.testing.assert_allclose(other[tuple(map(slice, one.shape))], one, rtol=1e-5)
    assert hasattr(optax.tree.get(wide, "squares")["embedding"], "rows") == (least <= 16)


@pytest.mark.slow
@pytest.mark.parametrize("least", [8, 100], ids=["factored", "whole"])
@pytest.mark.parametrize(("before", "after"), [(24, 32), (32, 24)])
def test_it_goes_on_with_another_padding(tmp_path, least, before, after):
    gradients = [{"embedding": tree(seed)["embedding"]} for seed in range(4)]
    rule = adafactor(min_factored_size=least, clip_update_rms=0.5, vocab_size=24)
    wanted, _ = steps(rule, gradients)
    _, state = steps(rule, padded(gradients[:2], before))
    target = tr.abstract(jax.eval_shape(rule.init, padded(gradients, after)[0]))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
        state = checkpoints.restore(target, resizable={"vocab": 24}).state
    for one, gradient in zip(wanted[2:], padded(gradients, after)[2:], strict=True):
        updates, state = rule.update(gradient, state, gradient)
        np.testing.assert_allclose(updates["embedding"].array[:24], one["embedding"].array, rtol=1e-5)


@pytest.mark.slow
def test_a_state_of_optax_is_refused(tmp_path):
    """As runs kept it before the second moments had names."""
    old, params = on_arrays(optax.scale_by_factored_rms(min_dim_size_to_factor=8)), tree(0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, old.init(params))
        with pytest.raises(UserError, match="not in the state: .*v.embedding") as error:
            checkpoints.restore(tr.abstract(jax.eval_shape(adafactor().init, params)))
    assert error.value.fix.startswith("resume with the model and optimizer that saved it")


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
def test_sums_lie_where_a_layout_places_what_is_left(axis_type):
    """Of `vocab embed` a layout slices the vocabulary alone, of a vector along `embed` just that."""
    gradients = [{name: tree(seed)[name] for name in ("embedding", "out", "norm")} for seed in range(3)]
    alone, _ = steps(adafactor(beta1=0.9), gradients)
    mesh = tr.make_mesh(data=4, model=2, axis_type=axis_type)
    rule = adafactor(beta1=0.9)
    with tr.Layout(mesh, params={"vocab": "data", "embed": "data", "heads": "model"}):
        state = tr.named_jit(rule.init, outputs="params")(tr.shard(gradients[0]))
        for each, wanted in zip(gradients, alone, strict=True):
            each = tr.shard(each)
            updates, state = tr.named_jit(rule.update, outputs="params")(each, state, each)
            for name, x in wanted.items():
                np.testing.assert_allclose(updates[name].array, x.array, rtol=1e-5, atol=1e-7)
        columns = optax.tree.get(state, "squares")["out"].columns
        assert columns.array.sharding.spec[1] == "model"
