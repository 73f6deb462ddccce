"""Runs and functions that are proven, and some that are not."""

import contextlib
import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from tests.models.small import CONFIGS
from trellis.commands.line import main
from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.mesh import make_mesh
from trellis.proof.report import as_json
from trellis.proof.runs import prove_run
from trellis.recipes import load_run
from trellis.run.layouts import LayoutChoice, MeshSizes


@pytest.fixture
def four():
    return make_mesh(jax.devices()[:4], x=4)


def gradient(w, parts):
    """Sums of gradients over parts of a batch: each is settled in the loop and made pending again.

    XLA moves that sum out of the loop and leaves the cast where it was, so that it sums twice: docs/published-bugs.md.
    """
    copies = jax.reshard(w, P(None, None, reduced={"x"}))

    def loss(copies, part):
        whole = jax.reshard(copies, P(None, None))
        local = lambda w, x: jax.lax.psum(jnp.sum(jnp.tanh(x @ w)), "x")
        return jax.shard_map(local, in_specs=(P(None, None), P("x", None)), out_specs=P())(whole, part)

    zero = jax.lax.broadcast_in_dim(jnp.float32(0), w.shape, (), out_sharding=P(None, None, unreduced={"x"}))
    total, _ = jax.lax.scan(lambda total, part: (total + jax.grad(loss)(copies, part), None), zero, parts)
    return jax.reshard(total, P(None, None))


def given(mesh):
    """A weight, and three parts of a batch."""
    spec = lambda *axes: NamedSharding(mesh, P(*axes))
    w = jax.device_put(jax.random.normal(jax.random.key(1), (8, 16)), spec(None, None))
    return w, jax.device_put(jax.random.normal(jax.random.key(0), (3, 8, 8)), spec(None, "x", None))


def alone(w, parts):
    """The same on one device."""
    return jax.grad(lambda w: sum(jnp.sum(jnp.tanh(part @ w)) for part in parts))(w)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_sum_that_the_compiler_takes_twice_is_found(four, on):
    proof = tr.prove(gradient, *given(four), on=on, reference=alone)
    (output,) = proof.outputs
    assert not proof.proven and output.error > 0.1 and output.devices
    assert "while-loop-all-reduce-code-motion" in proof.finding.culprit
    assert proof.finding.right and proof.finding.wrong and proof.finding.place.source
    assert len(proof.structure.twice) == 1 and "summed twice: all-reduce over x" in proof.structure.faults[0]
    off = {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"}
    assert tr.prove(gradient, *given(four), on=on, reference=alone, options=off).proven


def test_a_function_is_held_against_another(four):
    w, parts = given(four)
    right = tr.prove(lambda w, x: jnp.tanh(x[0] @ w), w, parts, on="v5e:2x2", reference=lambda w, x: jnp.tanh(x[0] @ w))
    assert right.proven
    wrong = tr.prove(
        lambda w, x: jnp.tanh(x[0] @ w), w, parts, on="v5e:2x2", reference=lambda w, x: x[0] @ w, explain=False
    )
    assert not wrong.proven and wrong.outputs[0].devices == (0, 1, 2, 3)
    assert "NOT PROVEN: 1 of 1 results are wrong" in str(wrong)
    unsaid = dataclasses.replace(wrong, unknown="the operation scan, as cumsum.9")
    assert "the interpreter does not know the operation scan, as cumsum.9" in str(unsaid)


@pytest.mark.slow
def test_named_arrays_under_a_layout():
    params, compute = {"embed": "data", "mlp": "model"}, {"batch": "data", "mlp": "model"}
    layout = tr.Layout(make_mesh(jax.devices()[:4], data=2, model=2), params, compute)

    def loss(up, x):
        return (tr.einsum("batch embed, embed mlp -> batch mlp", x, up) ** 2).mean().array

    with layout:
        up = tr.shard(tr.random.normal(jax.random.key(0), {"embed": 256, "mlp": 512}), "params")
        x = tr.shard(tr.random.normal(jax.random.key(2), {"batch": 16, "embed": 256}))
        proof = tr.prove(jax.value_and_grad(loss), up, x, on="v5e:2x2")
    assert proof.proven
    assert [output.type for output in proof.outputs] == ["f32[]", "f32[embed/data=256 mlp/model=512]"]


@pytest.mark.slow
def test_pending_sums_are_compared_as_the_sums_they_are(four):
    """Devices may hold other parts of it; a sum that is too large is found."""
    w, parts = given(four)
    x = jax.device_put(parts[0], NamedSharding(four, P("x", None)))

    def gradients(w, x, factor=1.0):
        copies = jax.reshard(w, P(None, None, reduced={"x"}))
        d = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) * factor))(copies, x)
        return d, copies

    proof = tr.prove(gradients, w, x, on="v5e:2x2")
    assert proof.proven
    assert [output.type for output in proof.outputs] == ["f32[8 16 +x]", "f32[8 16 ~x]"]
    alone = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    assert tr.prove(gradients, w, x, on="v5e:2x2", reference=lambda w, x: (alone(w, x), w)).proven
    twice = tr.prove(partial(gradients, factor=2.0), w, x, on="v5e:2x2", reference=lambda w, x: (alone(w, x), w))
    assert [output.devices for output in twice.outputs] == [(0, 1, 2, 3), ()]
    assert twice.outputs[0].error == pytest.approx(1.0)
    with jax.set_mesh(four):
        pending = jax.jit(lambda x: jnp.einsum("nk,nm->km", x, x, out_sharding=P(unreduced={"x"})))(x)
    settled, whole = (lambda pending: jax.reshard(pending, P("x"))), jax.device_get(x)
    assert tr.prove(settled, pending, on="v5e:2x2", reference=lambda _: jnp.asarray(whole.T @ whole)).proven


def test_what_a_device_is_along_some_axes_is_known_before_a_compiler_partitions():
    """With some axes by hand, JAX asks for a device's place in a region within the region."""
    mesh = make_mesh(jax.devices()[:4], data=2, model=2)

    def turned(x):
        turn = lambda x: jnp.roll(x, jax.lax.axis_index("data"), 1) * (1.0 + jax.lax.axis_index("data").astype(x.dtype))
        return jax.shard_map(turn, mesh=mesh, axis_names={"data"}, in_specs=P("data"), out_specs=P("data"))(x)

    x = jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(mesh, P("data", None)))
    assert tr.prove(jax.jit(turned), x, on="v5e:2x2").proven
    whole = lambda x: jnp.concatenate([x[:2], 2 * jnp.roll(x[2:], 1, 1)])
    assert tr.prove(jax.jit(turned), x, on="v5e:2x2", reference=whole).proven


@pytest.mark.slow
def test_what_may_be_rounding_is_decided_with_more_bits(four):
    """Of large numbers nearly nothing is left: devices add them in another order than one device does."""
    x = jax.random.normal(jax.random.key(0), (4096,)) * 1e3
    x = jax.random.permutation(jax.random.key(1), jnp.concatenate([x, -x]))
    x = jax.device_put(x, NamedSharding(four, P("x")))
    proof = tr.prove(lambda x: jnp.sum(x) + 0.01, x, on="v5e:2x2")
    assert proof.proven and proof.rounding > 1e-4 and proof.error < 1e-6
    assert "floats      of 64 bits: with 32, rounding makes deviations of up to" in str(proof)
    assert json.loads(json.dumps(as_json(proof)))["rounding"] == proof.rounding


@pytest.mark.slow
def test_rounding_of_which_nothing_else_is_left_proves_a_function_with_a_reference(four):
    """A bias that all scores share has no gradient. A variance is a difference of means, divided by constants whose
    texts have nine digits."""
    x, q = (jax.random.normal(jax.random.key(i), (4096, 4)) for i in range(2))
    x, q = (jax.device_put(a, NamedSharding(four, P("x"))) for a in (x + 1000, q))

    @jax.jit
    def both(b, q, x):
        scores = lambda b: jnp.sum(jax.nn.softmax(q @ (jnp.eye(4) + b).T) ** 2)
        return jax.grad(scores)(b), jnp.mean(x * x) - jnp.mean(x) ** 2

    proof = tr.prove(both, jnp.ones((1, 4)), q, x, on="v5e:2x2", reference=both)
    assert proof.proven and proof.rounding > 1e-3 and proof.error < 1e-6
    wrong = jax.jit(lambda b, q, x: [1.001 * y for y in both(b, q, x)])
    assert not tr.prove(both, jnp.ones((1, 4)), q, x, on="v5e:2x2", reference=wrong, explain=False).proven


@pytest.mark.slow
def test_a_constant_that_the_compiler_rounds_is_held_as_it_is_written(four):
    """A weight that a function closes over: products round it, and the compiler does so once and for all."""
    x, w = jax.random.normal(jax.random.key(0), (8, 128)), np.asarray(jax.random.normal(jax.random.key(1), (128, 64)))
    x = jax.device_put(x, NamedSharding(four, P("x")))
    proof = tr.prove(jax.grad(lambda x: jnp.mean((x @ w) ** 2)), x, on="v5e:2x2")
    assert proof.proven and proof.written and as_json(proof)["written"] and proof.error < 1e-5, proof
    assert "constants   held as they are written" in str(proof)
    other = w.copy()
    other[5, 7] += 0.5  # another number than the one that was rounded
    wrong = tr.prove(lambda x: x @ w, x, on="v5e:2x2", reference=lambda x: x @ other, explain=False)
    assert not wrong.proven and not wrong.written


def test_a_value_that_a_function_returns_twice_is_not_taken_for_a_partial_sum(four):
    """One result goes on whole, and one is made a partial sum: libtpu took what is whole for it."""

    @jax.jit
    def layer(x, w):
        return jnp.tanh(x + jnp.sum(x * w, 1, keepdims=True))

    def loss(x, w):
        x = jax.reshard(jax.reshard(x, P(None, None, reduced={"x"})), P(None, None))
        return jnp.sum(layer(layer(x, w), w) ** 2)

    x, w = jax.device_put(jax.random.normal(jax.random.key(0), (2, 2, 4)), NamedSharding(four, P()))
    proof = tr.prove(jax.grad(loss), x, w, on="v5e:2x2")
    assert proof.proven, proof


@pytest.mark.slow
def test_whole_numbers_of_eight_bits_are_held_as_what_they_are_rounded_from():
    """Rounded, two right programs are as far apart as a step of the numbers."""
    proof = prove_run(load_run("tiny", {"precision.products.mlp": "int8"}), target("v5e:2x2"))
    assert proof.proven and proof.unrounded and as_json(proof)["unrounded"], proof
    assert "s8[" in proof.compiled.text and "int8        held as the floats" in str(proof)


@pytest.mark.slow
def test_blocks_of_floats_of_eight_bits_are_proven():
    run = load_run("tiny", {"precision.products.mlp": "mxfp8", "model.embed": "128", "model.mlp": "256"})
    proof = prove_run(run, target("v5e:2x2"))
    assert proof.proven and not proof.unrounded and "f8e8m0fnu[" in proof.compiled.text, proof


@pytest.mark.slow
def test_a_product_of_whole_numbers_of_eight_bits(four):
    """One that is too large is found, rounded or not."""
    shape = {"batch": 64, "embed": 128, "mlp": 128}
    layout = tr.Layout(four, {}, {"batch": "x"})

    def product(x, w, by=1.0):
        return tr.dot(x * by, tr.Narrow(w, "int8"), over="embed")

    with layout:
        x = tr.shard(tr.random.normal(jax.random.key(0), {n: shape[n] for n in ("batch", "embed")}))
        w = tr.shard(tr.random.normal(jax.random.key(1), {n: shape[n] for n in ("embed", "mlp")}))
        assert tr.prove(product, x, w, on="v5e:2x2").proven
        wrong = tr.prove(partial(product, by=1.5), x, w, on="v5e:2x2", reference=product, explain=False)
    assert not wrong.proven and wrong.error == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_run_whose_communication_the_compiler_places(family):
    """TPUs have kernels for attention and for experts, which their compiler cannot slice: the layout does."""
    layout = LayoutChoice(mode="auto", preset="hybrid")
    run, sizes = load_run("tiny"), dict(heads=4, kv_heads=2, head_dim=128)
    model, data = dataclasses.replace(CONFIGS[family], **sizes), dataclasses.replace(run.data, sequence_length=128)
    run = dataclasses.replace(run, model=model, data=data, mesh=MeshSizes(data=2, model=2), layout=layout)
    proof = prove_run(run, target("v5e:2x2"), explain=False)
    assert proof.proven and any("splash" in name for name in proof.kernels), proof
    assert ("ragged-dot-none" in proof.kernels) == (family == "mixtral"), proof


def test_devices_that_wait_for_each_other(four):
    """Two of four take a branch with a sum over all of them."""

    def some(x):
        first = jax.lax.axis_index("x") < 2
        return jax.lax.cond(first, lambda x: jax.lax.psum(x, "x"), lambda x: x * 2, x)

    fn = jax.shard_map(some, mesh=four, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    proof = tr.prove(fn, jax.device_put(jnp.arange(8.0), NamedSharding(four, P("x"))), on="v5e:2x2", reference=jnp.sin)
    assert not proof.proven and proof.error == jnp.inf and not proof.outputs
    assert str(proof).splitlines()[-1].startswith("NOT PROVEN: the program does not run to its end: ")
    assert "devices wait for device" in proof.fault and as_json(proof)["fault"] == proof.fault


@pytest.mark.slow
def test_infinities_and_nans_hide_nothing(four):
    """They have to be where they should be (the last device has nothing else), and beside them numbers are compared."""
    x = jax.device_put(jnp.linspace(-2, 2, 64).reshape(8, 8), NamedSharding(four, P("x")))
    masked = lambda mask, factor=1.0: lambda x: jnp.where(x > 1, mask, x * factor)
    prove = partial(tr.prove, on="v5e:2x2", explain=False)
    for mask in (jnp.inf, -jnp.inf, jnp.nan):
        assert prove(masked(mask), x, reference=masked(mask)).proven
        (output,) = prove(masked(mask), x, reference=masked(mask, 1.5)).outputs
        assert output.devices == (0, 1, 2) and 0.3 < output.error < 0.4, mask
        for given, meant in ((mask, 0.0), (0.0, mask)):
            assert prove(masked(given), x, reference=masked(meant)).error == jnp.inf, mask
    with pytest.raises(UserError, match="A proof needs a result with numbers"):
        prove(lambda x: jnp.log(-1 - x * x), x)


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        (lambda x: jnp.broadcast_to(x.sum(), (4,)), r"shape \(4,\) for result, where .* returns \(\)"),
        (lambda x: x.sum().astype(jnp.bfloat16), "bfloat16 for result"),
    ],
)
def test_a_reference_that_cannot_be_compared_is_refused(four, reference, text):
    x = jax.device_put(jnp.ones(8), NamedSharding(four, P("x")))
    with pytest.raises(UserError, match=text):
        tr.prove(jnp.sum, x, on="v5e:2x2", reference=reference)


def test_a_reference_has_the_names_of_the_function(four):
    x = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(four, P("x")))
    named = lambda names: lambda x: {"y": tr.named(x, names)}
    prove = partial(tr.prove, named("rows columns"), x, on="v5e:2x2")
    assert prove(reference=named("rows columns")).proven and prove(reference=lambda x: x).proven
    with pytest.raises(UserError, match="names columns rows for y, where .* returns rows columns"):
        prove(reference=named("columns rows"))


def test_what_cannot_be_proven_says_why(four):
    with pytest.raises(UserError, match="The mesh must have as many devices as the target"):
        tr.prove(jnp.sin, given(four)[0], on="v5e:2x4")
    with pytest.raises(UserError, match="needs the sharding of its arrays"):
        tr.prove(jnp.sin, jnp.ones(3), on="v5e:2x2")
    with pytest.raises(UserError, match="A reference must return the same arrays as the function"):
        tr.prove(jnp.sin, given(four)[0], on="v5e:2x2", reference=lambda w: (w, w))
    with pytest.raises(UserError, match="A reference must return the same arrays as the function") as error:
        tr.prove(jnp.sin, given(four)[0], on="v5e:2x2", reference=jnp.sum)
    shape = given(four)[0].shape
    assert error.value.seen == f"shape () for result, where `sin` returns {shape}"
    with pytest.raises(UserError, match="A function to prove must return arrays"):
        tr.prove(lambda w: (), given(four)[0], on="v5e:2x2")
    with pytest.raises(tr.MeshError, match="only if it knows how the result is sliced, got one where it does not"):
        tr.prove(partial(jnp.cumsum, axis=1), given(four)[1], on="v5e:2x2")
    with pytest.raises(UserError, match="Only a function can be proven"):
        tr.prove(3, given(four)[0], on="v5e:2x2")
    for bound in (-1, 0.0, float("nan"), "1e-4"):
        with pytest.raises(UserError, match="A bound must be a number above 0"):
            tr.prove(jnp.sin, given(four)[0], on="v5e:2x2", bound=bound)
    with pytest.raises(UserError, match="The seed must be 0 or more"):
        tr.prove(jnp.sin, given(four)[0], on="v5e:2x2", seed=-1)

    def noisy(w):
        state, bits = jax.lax.rng_bit_generator(jnp.arange(4, dtype="uint32"), w.shape)
        return w + bits.astype(w.dtype), state

    with pytest.raises(UserError, match="must know every operation of a program") as error:
        tr.prove(noisy, given(four)[0], on="v5e:2x2")
    assert error.value.seen.endswith(", what a chip's own generator of random bits leaves")
    assert error.value.where == "`noisy` for v5e:2x2" and error.value.fix == "leave out what has it, or report it"


def test_devices_that_wait_for_each_other_for_ever_are_told(four):
    @jax.shard_map(mesh=four, in_specs=P("x"), out_specs=P("x"))
    def waiting(a):
        return jax.lax.cond(a[0] > 1, lambda a: a + jax.lax.psum(a, "x"), lambda a: a, a)

    with pytest.raises(UserError, match="Every device must take part in all collectives of its groups") as error:
        tr.prove(waiting, jax.device_put(jnp.arange(4.0), NamedSharding(four, P("x"))), on="v5e:2x2")
    assert "wait for device" in error.value.seen and error.value.where == "`waiting` for v5e:2x2"


RUN = {"mesh.data": "2", "mesh.model": "2", "layout.preset": "auto", "microbatches": "2"}


@pytest.fixture(scope="module")
def tiny():
    return prove_run(load_run("tiny", RUN), target("v5e:2x2"), tuple(RUN))


@pytest.mark.slow
def test_a_step_is_proven(tiny):
    assert tiny.proven and tiny.error < 1e-5
    assert tiny.structure.right and len(tiny.structure.matches) > 30
    assert tiny.structure.on_the_way_of("model.layers.block.attention.q") == ["all-gather data", "reduce-scatter data"]
    assert "all-reduce model" in tiny.structure.on_the_way_of("model.layers.block.mlp_norm.scale")
    names = [output.name for output in tiny.outputs]
    assert {"model.embedding", "model.layers.block.attention.q", "loss"} <= set(names)
    assert any(name.startswith("optimizer.") and name.endswith("attention.q") for name in names)


@pytest.mark.slow
def test_the_command(tiny, capsys, monkeypatch):
    """As text, after the same was compiled before, and as JSON, of one proof."""
    assert main(["prove", "tiny", "--on", "v5e:2x2", "--mesh.data=3"]) == 2
    capsys.readouterr()
    proofs = []

    def once(*given, **how):
        proofs.append(proofs[0] if proofs else prove_run(*given, **how))
        return proofs[0]

    monkeypatch.setattr("trellis.proof.runs.prove_run", once)
    options = [f"--{name}={value}" for name, value in RUN.items()]
    assert main(["prove", "tiny", "--on", "v5e:2x2", *options]) == 0
    shown = capsys.readouterr().out
    assert "PROVEN: " in shown and "kept from before" in shown and "attention.q" in shown
    assert main(["prove", "tiny", "--on", "v5e:2x2", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["structure"]["right"] and found["structure"]["rows"] > 30
    assert found["proven"] and found["error"] < 1e-5 and found["mesh"] == {"data": 2, "model": 2}


@pytest.mark.slow
def test_a_step_with_rounded_constants_is_held_to_what_is_written():
    """GPT-2's GELU has constants in bfloat16, which the plain step has in float32."""
    options = {"data.sequence_length": "64", "mesh.data": "4", "microbatches": "1", "batch_size": "4"}
    options |= {"model.layers": "1", "model.vocab": "512"}
    proof = prove_run(load_run("gpt2_small", options), target("v5e:2x2"), tuple(options))
    assert proof.proven and proof.error < 1e-5 and 1e-4 < proof.rounded < 2e-2


@pytest.mark.slow
def test_a_pipeline_with_kernels_in_its_stages_is_proven():
    options = {"mesh.stage": "2", "data.sequence_length": "128", "layout.pipeline_microbatches": "2", "batch_size": "8"}
    proof = prove_run(load_run("tiny", options), target("v5e:2x2"), tuple(options))
    assert proof.proven and proof.error < 1e-5
    assert {name.split("_")[0] for name in proof.kernels} == {"splash"}


@pytest.fixture(params=[False, True], ids=["no mesh in force", "a mesh in force"])
def plain_mesh(request):
    """A mesh of this machine's devices, as programs that are not written in Trellis have it."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh) if request.param else contextlib.nullcontext():
        yield mesh


@pytest.mark.slow
def test_a_function_that_names_its_own_mesh_is_proven(plain_mesh):
    def loss(x, w, *, scatter=jax.lax.psum):
        product = lambda x, w: scatter(x @ w, "y")
        specs = P("x", "y"), P("y", None)
        y = jax.shard_map(product, mesh=plain_mesh, in_specs=specs, out_specs=P("x"), check_vma=False)(x, w)
        y = jax.lax.with_sharding_constraint(jnp.tanh(y), NamedSharding(plain_mesh, P("x", "y")))
        return jnp.sum(y * y)

    x, w = jax.ShapeDtypeStruct((8, 256), jnp.float32), jax.ShapeDtypeStruct((256, 128), jnp.float32)
    alone = jax.grad(lambda x, w: jnp.sum(jnp.tanh(x @ w) ** 2), argnums=(0, 1))
    right = tr.prove(jax.grad(loss, argnums=(0, 1)), x, w, on="v5e:2x2", reference=alone)
    assert right.proven and right.mesh == {"x": 2, "y": 2} and right.structure.right
    wrong = partial(loss, scatter=lambda x, _: 2 * x)  # as if both devices had the same
    proof = tr.prove(jax.grad(wrong, argnums=(0, 1)), x, w, on="v5e:2x2", reference=alone, explain=False)
    assert not proof.proven and proof.error > 1e-2


@pytest.mark.slow
def test_why_is_told_where_all_arguments_are_whole_and_results_are_sliced(plain_mesh):
    def sliced(x):
        return jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(plain_mesh, P("x", "y"))) * 1.001

    proof = tr.prove(sliced, jax.ShapeDtypeStruct((8, 256), jnp.float32), on="v5e:2x2", reference=jnp.tanh)
    assert not proof.proven and "wrong as it was written" in proof.finding.culprit


def test_a_jitted_function_with_shardings_is_proven(plain_mesh):
    place = lambda *axes: NamedSharding(plain_mesh, P(*axes))
    product = jax.jit(lambda x, w: x @ w, in_shardings=(place("x", "y"), place("y")), out_shardings=place("x"))
    x, w = (jax.random.normal(jax.random.key(n), (256, 256)) for n in range(2))
    proof = tr.prove(product, x, w, on="v5e:2x2", reference=lambda x, w: x @ w)
    assert proof.proven and proof.outputs[0].error > 0 and "all-reduce" in proof.compiled.text


def test_a_function_of_which_only_explicit_axes_are_manual_is_proven():
    """JAX says of these axes that nothing is sliced along them, which is no pending sum."""
    kinds = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])
    put = lambda shape, *axes: jax.device_put(
        jax.random.normal(jax.random.key(0), shape), NamedSharding(mesh, P(*axes))
    )
    product = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    assert tr.prove(product, put((8, 128), "data"), put((128, 128)), on="v5e:2x2", explain=False).proven


@pytest.mark.slow
def test_a_reference_takes_keys_and_types_and_may_return_plain_numbers(four):
    x = jax.device_put(jnp.ones((8, 128)), NamedSharding(four, P("x")))

    def both(key, x, dtype, y, three=jnp.float32):
        word = jax.random.key_data(jax.random.fold_in(key, 1))[0] % 7
        return x.astype(dtype) + y + word.astype(dtype), three(3)

    plain = lambda *given: both(*given, three=float)
    assert tr.prove(both, jax.random.key(3), x, jnp.float32, 2 * x, on="v5e:2x2", reference=plain).proven


@pytest.mark.slow
def test_indices_that_a_compiler_forgets_are_found(plain_mesh):
    """46 of docs/published-bugs.md."""
    x = jax.device_put(jax.random.normal(jax.random.key(0), (8, 256)), NamedSharding(plain_mesh, P("x", "y")))
    proof = tr.prove(lambda x: jax.lax.top_k(x, 3), x, on="v5e:2x2")
    mended = jax.__version_info__ >= (0, 12)  # with libtpu 0.0.50
    assert [output.right for output in proof.outputs] == [True, mended], "the page says which libtpu has it"
    by_name = lambda x: [found.array for found in tr.top_k(x, "vocab", k=3)]
    with tr.Layout(plain_mesh, compute={"batch": "x", "vocab": "y"}):
        assert tr.prove(by_name, tr.named(x, "batch vocab"), on="v5e:2x2").proven
