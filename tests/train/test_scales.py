"""Delayed scales: what they are made from, and the same on every mesh, number of microbatches and after a resume."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trellis as tr
from tests.models.small import CONFIGS
from tests.train.small import curve, trellis
from trellis.data.batch import Batch
from trellis.models import Llama, LlamaConfig, Routing
from trellis.models.protocol import Unmeasured
from trellis.nn import Precision, TokenLoss
from trellis.nn.moe import for_each_part
from trellis.train import step as step_module
from trellis.train.scales import largest_of, no_scales, rolled
from trellis.train.state import TrainState
from trellis.train.step import StepOptions, loss_gradients_and_met, make_step

PRECISION = Precision(compute="float32", products={"mlp": "int8", "attention": "fp8"}, amax_history=3)
CONFIG = LlamaConfig(
    vocab=32, embed=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=32, rope_theta=1e4, tie_embeddings=True
)
LAYOUTS = {
    "fsdp": (dict(data=8), {"embed": "data"}, {"batch": "data"}),
    "tensor": (dict(data=4, model=2), {"embed": "data", "mlp": "model"}, {"batch": "data", "mlp": "model"}),
}


@pytest.mark.slow
def test_scales_are_made_from_what_is_given_and_the_gradient_is_what_was_met():
    x, w = tr.random.normal(jax.random.key(0), {"batch": 8, "embed": 16}), tr.ones({"embed": 16, "mlp": 4}) * 0.5
    known = jnp.array([2.0, 0.5, 0.0])

    def out(x, largest):
        return tr.dot(x, tr.Narrow(w, "int8", largest=tr.named(largest, "factor")), over="embed")

    found, pull = jax.vjp(out, x, known)
    values = np.clip(np.asarray(x.array) / np.float32(2 / 127), -127, 127).round()
    np.testing.assert_allclose(found.array, values @ np.full((16, 4), 127.0) * np.float32(2 / 127 * 0.5 / 127), 1e-6)
    met = pull(tr.full({"batch": 8, "mlp": 4}, -3.0))[1]
    np.testing.assert_array_equal(met, [np.abs(x.array).max(), 0.5, 3.0])
    today = tr.dot(x, tr.Narrow(w, "int8"), over="embed")
    np.testing.assert_array_equal(out(x, jnp.zeros(3)).array, today.array)  # zero: the largest of today
    swapped, pull = jax.vjp(lambda m: tr.dot(tr.Narrow(w, "int8", largest=m), x, over="embed"), known)
    np.testing.assert_array_equal(pull(tr.full({"mlp": 4, "batch": 8}, -3.0))[0], met)


def test_of_several_uses_of_a_weight_the_largest_elements_are_kept():
    x, w = tr.full({"batch": 2, "embed": 4}, 2.0), tr.full({"embed": 4, "mlp": 3}, 0.5)

    def both(largest):
        one, other = for_each_part({"up": tr.Narrow(w, "int8", largest=largest), "down": w}, 2)
        return tr.dot(x, one["up"], over="embed"), tr.dot(x * 3.0, other["up"], over="embed")

    made = tr.ones({"batch": 2, "mlp": 3})
    met = jax.vjp(both, tr.named(jnp.zeros(3), "factor"))[1]((made * 7.0, made))[0]
    np.testing.assert_array_equal(met.array, [6.0, 0.5, 7.0])


@pytest.mark.slow
def test_a_mixture_in_parts_that_run_side_by_side_meets_what_the_whole_batch_does():
    precision = Precision(compute="float32", products={"attention": "fp8", "shared": "int8"}, amax_history=2)
    met = []
    for parts in (1, 2):
        config = dataclasses.replace(CONFIGS["mixtral"], shared_mlp=8, routing=Routing(interleave=parts))
        model, options = config.init(key=jax.random.key(0)), StepOptions(precision=precision)
        found = jax.jit(lambda m, b, o=options: loss_gradients_and_met(m, largest_of(no_scales(m, precision)), b, o)[3])
        met.append(jax.tree.map(np.asarray, found(model, batch())))
    for one, other in zip(*map(jax.tree.leaves, met), strict=True):
        np.testing.assert_allclose(other, one, rtol=0.3)  # of each part a product has its own scales
        np.testing.assert_array_equal(other[:, 1], one[:, 1])


def batch():
    """Drawn so that no number lies at the edge of two narrow ones: with key 1 one did on an Intel processor, whose last
    bits are others, and rounded to the other in one of these programs."""
    ids = jax.random.randint(jax.random.key(2), (32, 9), 0, 32)
    return Batch(tokens=ids[:, :-1], targets=ids[:, 1:], loss_mask=jnp.ones((32, 8))).named()


@functools.cache
def model():
    return jax.jit(lambda key: Llama.init(CONFIG, key=key))(jax.random.key(0))


@functools.cache
def kept():
    """A history of two steps, near what the model meets."""
    blank = no_scales(model(), PRECISION)
    met = jax.jit(lambda m, b: loss_gradients_and_met(m, largest_of(blank), b, StepOptions(precision=PRECISION))[3])
    now = met(model(), batch())
    return jax.device_get(
        rolled(rolled(blank, jax.tree.map(lambda x: 0.5 * x, now)), jax.tree.map(lambda x: 0.9 * x, now))
    )


def found(microbatches=1, placed=False):
    options = StepOptions(precision=PRECISION, microbatches=microbatches)
    params, data = model(), batch()
    if placed:
        params, data = tr.shard(params, "params"), tr.shard(data)
    step = tr.named_jit(lambda m, s, b: loss_gradients_and_met(m, largest_of(s), b, options))
    sums, _, gradients, met = step(params, kept(), data)
    return jax.device_get((sums.total, gradients, met))


@functools.cache
def alone():
    return found()


def assert_near(one, other):
    loss, gradients, met = zip(one, other, strict=True)
    np.testing.assert_allclose(*loss, rtol=2e-6)
    for a, b in zip(*map(jax.tree.leaves, met), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):  # a last bit may round a number to another one
        assert np.linalg.norm(a - b) <= 2e-3 * np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 4])
def test_the_same_for_every_number_of_microbatches(microbatches):
    """With scales of today each microbatch would have its own."""
    assert_near(found(microbatches), alone())


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_on_every_layout(name, axis_type, microbatches):
    wanted = alone()  # outside of any layout, as the model is made and its scales are
    sizes, params, compute = LAYOUTS[name]
    with tr.Layout(tr.make_mesh(axis_type=axis_type, **sizes), params=params, compute=compute):
        assert_near(found(microbatches, placed=True), wanted)


def test_what_is_not_finite_is_not_kept():
    scales = {"up": tr.named(jnp.array([[4.0, 2.0], [1.0, 0.0]]), "factor history")}
    new = rolled(scales, {"up": tr.named(jnp.array([jnp.inf, 3.0]), "factor")})["up"]
    np.testing.assert_array_equal(new.array, [[4.0, 4.0], [3.0, 1.0]])
    np.testing.assert_array_equal(largest_of(scales)["up"].array, [4.0, 1.0])


@pytest.mark.slow
def test_a_step_whose_scales_hide_what_is_not_finite_is_left_out(monkeypatch):
    """int8 has no sign of a weight that is not a number, and what is known of earlier steps makes its scale."""
    x = tr.ones({"batch": 2, "embed": 4})
    weight = {"up": tr.ones({"embed": 4, "mlp": 2})}
    weight["up"] = weight["up"].with_array(weight["up"].array.at[1, 1].set(jnp.nan))

    def found(model, largest, *_):
        out = lambda w, m: tr.dot(x, tr.Narrow(w["up"], "int8", largest=m["up"]), over="embed").sum().array
        loss, (gradients, met) = jax.value_and_grad(out, (0, 1))(model, largest)
        assert jnp.isfinite(loss) and all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradients))
        return TokenLoss(loss, loss, loss, loss, tokens=jnp.float32(1)), Unmeasured(), gradients, met

    monkeypatch.setattr(step_module, "loss_gradients_and_met", found)
    scales = {"up": tr.ones({"factor": 3, "history": 2})}
    optimizer = optax.sgd(0.1)
    state = TrainState(jnp.int32(0), weight, optimizer.init(weight), None, jax.random.key(0), scales)
    new, metrics = make_step(optimizer, StepOptions(precision=PRECISION, skip_nonfinite=True))(state, batch())
    assert jnp.isnan(metrics["grad_norm"])
    np.testing.assert_array_equal(new.model["up"].array, weight["up"].array)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.slow
def test_a_run_is_resumed_to_the_bit_also_on_another_mesh(run_file, tmp_path, capsys):
    words = ("--precision.products.mlp", "fp8", "--precision.amax_history", "3", "--layout.preset")

    def trained(folder, *options):
        code, _, said = trellis(capsys, "train", run_file, "--run-dir", folder, *words, *options)
        assert code == 0, said
        return curve(folder)

    fsdp = ("fsdp", "--devices", "4")
    whole = trained(tmp_path / "whole", *fsdp)
    assert trained(tmp_path / "parts", *fsdp, "--until", "3") == whole[:3]
    shutil.copytree(tmp_path / "parts", tmp_path / "many")
    assert trained(tmp_path / "parts", *fsdp) == whole
    many = trained(tmp_path / "many", "fsdp_tensor", "--devices", "8", "--mesh.model", "2")
    assert many[3] == pytest.approx(whole[3], rel=1e-5)  # from the same history, on another mesh
    lines = json.loads((tmp_path / "many/checkpoints/step-00000006/manifest.json").read_text())["entries"]
    up = next(line for name, line in lines.items() if name.startswith("scales/") and name.endswith("mlp.up"))
    assert up["names"] == ["layers", "factor", "history"] and up["shape"] == [2, 3, 3]


@pytest.mark.parametrize(
    "options, said",
    [
        ((), "`amax_history` must be 0 or more, and needs products in fp8 or int8"),
        (("--precision.products.mlp", "mxfp8"), "`amax_history` must be 0 or more, and needs products in fp8 or int8"),
        (("--precision.products.mlp", "fp8", "--mesh.stage", "2"), "amax_history=2 with mesh.stage=2"),
        (("--precision.products.vocab", "fp8"), "amax_history=2, products={'vocab': 'fp8'}"),
    ],
)
def test_refused(options, said, run_file, tmp_path, capsys):
    words = ("train", run_file, "--run-dir", tmp_path / "run", "--precision.amax_history", "2", *options)
    code, _, error = trellis(capsys, *words, "--devices", "2")
    assert code == 2 and said in error, error


def test_three_largest_elements_are_for_products_with_one_scale():
    x, w = tr.ones({"batch": 2, "embed": 32}), tr.ones({"embed": 32, "mlp": 32})
    for kind, largest in (("mxfp8", jnp.zeros(3)), ("fp8", jnp.zeros(2))):
        with pytest.raises(tr.NamesError, match="only a product in fp8 or int8 takes largest elements"):
            tr.dot(x, tr.Narrow(w, kind, largest=largest), over="embed")
