"""Which loops over layers are written out, by what they are compiled for, and what their backward passes make again."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from trellis import nn
from trellis.hardware.described import described_devices
from trellis.inspect.memory import memory_of
from trellis.mesh.platform import longest_written_out
from trellis.nn import gate
from trellis.nn.loss import formulas
from trellis.pages.plan_pictures import timeline_picture
from trellis.plan import quick_plan, target
from trellis.program import trace
from trellis.recipes import load_run
from trellis.train.assemble import assemble


class Block(eqx.Module):
    w: tr.NamedArray

    def __call__(self, x):
        return tr.tanh(tr.save(tr.einsum("... embed, embed out -> ... out", x, self.w), "hidden")).rename(
            {"out": "embed"}
        )


def gradient_on(hardware: str, layers: int = 4, count: int = 1, **how) -> str:
    """The program of the gradient of some layers that keep nothing, on described devices."""
    mesh = tr.make_mesh(described_devices(target(hardware))[:count], data=count)

    def loss(w, x):
        stack = tr.Stacked(Block(w), tr.Axis("layers", layers), **how)
        return stack.fold(x, policy=tr.Keep()).sum().array

    with tr.Layout(mesh, compute={"batch": "data"}) as layout:
        given = [
            tr.named(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout.sharding(names.split(), which)), names)
            for shape, names, which in (
                ((layers, 8, 8), "layers embed out", "params"),
                ((4, 8), "batch embed", "compute"),
            )
        ]
        return str(jax.make_jaxpr(jax.grad(loss))(*given))


@pytest.mark.parametrize(
    ("hardware", "layers", "count", "loops"),
    [("1xH100", 4, 1, 0), ("1xH100", 65, 1, 2), ("8xH100", 4, 2, 0), ("8xH100", 65, 2, 2), ("v5e:2x2", 4, 1, 2)],
)
def test_layers_are_written_out_on_gpus(hardware, layers, count, loops):
    assert gradient_on(hardware, layers, count).count("scan[") == loops


@pytest.mark.parametrize("hardware", ["1xH100", "v5e:2x2"])
def test_what_is_made_again_is_hidden_from_the_compiler(hardware):
    """Which would keep it from the forward pass, since it sees both; and so is what a gradient is made of."""
    program = gradient_on(hardware, unrolled=True)
    assert "scan[" not in program and program.count("prevent_cse=True") >= 4
    assert program.count("optimization_barrier") >= 4
    assert "prevent_cse=True" not in gradient_on("v5e:2x2")


def test_nothing_goes_through_the_loop():
    assert longest_written_out(()) == 0


@pytest.mark.parametrize(
    ("hardware", "weights", "most"), [("8xH100", 1e10, 64), ("8xH100", 1.1e10, 16), ("v5e:2x2", 1, 0)]
)
def test_more_layers_are_written_out_on_several_gpus_if_their_weights_are_few(hardware, weights, most):
    """Those of many would be gathered long before they are needed."""
    mesh = tr.make_mesh(described_devices(target(hardware))[:2], data=2)
    carried = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("data")))
    assert longest_written_out(carried, lambda: weights) == most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options", "gib", "milliseconds", "before"),
    [
        ("llama_1b", {"batch_size": "64", "remat.policy": "saved"}, 62.16, 688.3, True),
        ("llama_1b", {"batch_size": "64"}, 81.20, 665.2, False),
        ("llama_1b", {"batch_size": "64", "remat.policy": "full"}, 26.01, None, False),
        ("llama_1b", {"microbatches": "4"}, 35.2, 719.7, True),
        ("llama_1b", {"batch_size": "128", "microbatches": "4"}, 51.66, None, False),
        ("llama_1b", {"batch_size": "128", "microbatches": "2"}, 86.17, 1367.8, True),
        ("llama_2b", {"microbatches": "2", "remat.policy": "saved"}, 62.55, 1345.8, True),
        ("llama_540m", {"microbatches": "2"}, 32.99, 449.3, True),
        ("llama_270m", {"microbatches": "2"}, 25.17, 266.1, True),
        ("llama_84m", {}, 22.16, 99.5, True),
        ("llama_8b", {"batch_size": "2", "data.sequence_length": "4096", "remat.policy": "none"}, 138.7, None, False),
    ],
    ids=str,
)
def test_steps_whose_layers_are_written_out(monkeypatch, recipe, options, gib, milliseconds, before):
    """Beside what XLA for GPUs (JAX 0.11.2) says of the compiled step, or an H200 had and took. In the last, weights in
    bfloat16 are kept for the backward pass beside those in float32: cuDNN and cuBLAS read what is in memory. Those of
    before were measured when a gate's gradients were two kernels and a loss read its logits three times."""
    given = {"data.mask_documents": "false", "layout.preset": "fsdp", "mesh.data": "1"}
    plan = quick_plan(load_run(recipe, given | options), target("1xH200"))
    assert plan.memory.peak / 2**30 == pytest.approx(gib, rel=0.04)
    if milliseconds is not None:
        measured = plan
        if before:
            monkeypatch.setattr(gate, "fences_gradients", lambda a: False)
            monkeypatch.setattr(formulas, "pairs_at_once", lambda a: False)
            measured = quick_plan(load_run(recipe, given | options), target("1xH200"))
            assert plan.seconds < measured.seconds
        assert 1e3 * measured.seconds == pytest.approx(milliseconds, rel=0.08)
    runs = {"llama_8b": 32}.get(recipe, 8) * int(options.get("microbatches", 1))
    assert f"one layer, of which a step runs {runs};" in str(timeline_picture(plan))


def feed_forward(act, bias: bool, layers: int = 8):
    """The gradient of plain feed-forward layers in bfloat16 on an H100, and the bytes of one layer's activations."""
    mesh = tr.make_mesh(described_devices(target("1xH100")), data=1)
    tokens, embed, mlp = 8192, 1024, 8192

    def loss(layers, x):
        for up, down, more in layers:
            hidden = x @ up
            x = x + act(hidden + more[None] if bias else hidden) @ down
        return (x.astype(jnp.float32) ** 2).sum()

    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
    weights = [(array(embed, mlp), array(mlp, embed), array(mlp))] * layers
    return trace(jax.jit(jax.grad(loss)), weights, array(tokens, embed)), 2 * tokens * mlp


@pytest.mark.parametrize(
    ("act", "bias", "compiled"),
    [
        (jax.nn.relu, False, 1.13),
        (jnp.exp, True, 1.13),
        (jnp.tanh, True, 1.13),
        (jax.nn.silu, False, 2.0),
        (jax.nn.silu, True, 2.0),
        (jax.nn.softplus, False, 2.13),
        (tr.gelu, True, 2.0),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_written_out_layers_keep(act, bias, compiled):
    """In units of a layer's activations, temporaries as XLA for an H100 (JAX 0.11.2) has them. What a product's result
    is added to is no reason to make the product twice, or to keep what it multiplied."""
    program, unit = feed_forward(act, bias)
    arguments = sum(value.device_bytes for value in program.inputs)
    assert (memory_of(program).peak - arguments) / (8 * unit) == pytest.approx(compiled, rel=0.15)


def test_a_gpus_program_keeps_what_an_activation_is_made_of():
    kept = {act: feed_forward(act, False)[0] for act in (tr.gelu, tr.mish, jax.nn.gelu)}
    again = {act: any(o.direction == "recomputed" for o in program.operations) for act, program in kept.items()}
    assert again == {tr.gelu: True, tr.mish: True, jax.nn.gelu: False}


def test_a_loss_in_chunks_makes_no_zeros_before_its_loop():
    """XLA for GPUs would keep them in memory, as large as a chunk's logits, and read them for each chunk."""
    x, table = jnp.ones((8, 512, 64), jnp.bfloat16), jnp.ones((128, 64), jnp.bfloat16)
    loss = lambda x, table: (
        nn.linear_cross_entropy(x, table, jnp.zeros((8, 512), jnp.int32), vocab_first=True, chunk=256).total
    )
    program = trace(jax.grad(loss, argnums=(0, 1)), x, table)
    loops = [operation for operation in program.operations if operation.name == "scan"]
    assert loops and not any(value.shape == (256, 128) for loop in loops for value in loop.operands)


@pytest.mark.slow
@pytest.mark.parametrize(("scan_layers", "loops"), [(None, 1), (True, 1), (False, 0)])
def test_a_run_says_whether_its_layers_are_a_loop(scan_layers, loops):
    """On many devices of a CPU, where they are one by themselves."""
    layers = 5
    options = {"mesh.data": "8", "model.layers": str(layers)}
    run = dataclasses.replace(load_run("tiny", options), scan_layers=scan_layers)
    assembled = assemble(run, jax.devices())
    with assembled.layout:
        step = trace(assembled.step, assembled.abstract, assembled.abstract_batch())
    stacks = [
        operation for operation in step.operations if operation.name == "scan" and operation.params["length"] == layers
    ]
    assert len(stacks) == 2 * loops  # forward and backward


@pytest.mark.slow
def test_no_copies_of_stacks_are_left_where_a_mixtures_layers_are_written_out_on_tpus():
    sizes = {"model.layers": "2", "model.embed": "512", "model.mlp": "2048", "data.sequence_length": "2048"}
    copied = {
        scanned: sum(
            "copied, of a loop's stack" in line.formula
            for line in quick_plan(
                load_run("mixtral_8x7b_v5p_64", {**sizes, "scan_layers": scanned}), target("v5p:4x4x4")
            ).times.lines
        )
        for scanned in ("true", "false")
    }
    assert copied["true"] > 0 and copied["false"] == 0
