"""Which loops over layers are written out, by what they are compiled for, and what their backward passes make again."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from trellis.hardware.described import described_devices
from trellis.mesh.platform import longest_written_out
from trellis.plan import quick_plan, target
from trellis.recipes import load_run


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
    [("1xH100", 4, 1, 0), ("1xH100", 65, 1, 2), ("8xH100", 4, 2, 0), ("8xH100", 17, 2, 2), ("v5e:2x2", 4, 1, 2)],
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
    ("recipe", "options", "measured"),
    [
        ("llama_1b", {"batch_size": "64", "remat.policy": "saved"}, 62.16),
        ("llama_1b", {"batch_size": "64"}, 81.20),
        ("llama_1b", {"batch_size": "64", "remat.policy": "full"}, 26.01),
        ("llama_1b", {"batch_size": "128", "microbatches": "4"}, 51.66),
        ("llama_1b", {"batch_size": "128", "microbatches": "2"}, 86.17),
        ("llama_2b", {"microbatches": "2", "remat.policy": "saved"}, 62.55),
        ("llama_540m", {"microbatches": "2"}, 32.99),
        ("llama_8b", {"batch_size": "2", "data.sequence_length": "4096", "remat.policy": "none"}, 138.7),
    ],
    ids=str,
)
def test_memory_of_layers_that_are_written_out(recipe, options, measured):
    """Beside what XLA for GPUs (JAX 0.11.2) says of the compiled step, or an H200 had, in GiB. In the last, weights in
    bfloat16 are kept for the backward pass beside those in float32: cuDNN and cuBLAS read what is in memory."""
    given = {"data.mask_documents": "false", "layout.preset": "fsdp", "mesh.data": "1"}
    plan = quick_plan(load_run(recipe, given | options), target("1xH200"))
    assert plan.memory.peak / 2**30 == pytest.approx(measured, rel=0.03)
