"""Experts compiled for TPU slices that are not here: what runs on them, forward and backward."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.mesh import Layout, make_mesh
from trellis.mesh.topology import slice_devices, target_devices
from trellis.named import named
from trellis.nn.moe import choose, mix, score

EXPERTS, EMBED, MLP = 8, 1024, 512
SHAPES = {
    "batch pos embed": (4, 128, EMBED),
    "embed routes": (EMBED, EXPERTS),
    "experts embed mlp": (EXPERTS, EMBED, MLP),
    "experts mlp embed": (EXPERTS, MLP, EMBED),
}


def loss(x, router, into, out, way="ragged"):
    made = mix(x, choose(score(x, router), 2), into, into, out, way=way)
    return (made * made).sum().array.astype(jnp.float32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # in JAX 0.12
def test_gpus_write_no_sorted_tokens():
    """Nor their sums' gradients: kernels gather these. Rows as wide as tokens are only what the last product makes, and
    the gradient of the first ones' rows, both by kernels.

    As it is traced, and compiled where JAX's CUDA plugin is."""
    plugin = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13")
    devices = target_devices("h100:1") if plugin else described_devices(target("8xH100"))
    step, rows = jax.grad(lambda *a: loss(*a, way="grouped"), argnums=(0, 1, 2, 3)), 2 * 4 * 128
    with Layout(make_mesh(devices[:1], data=1), {}, {}) as layout:
        given = [
            named(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=layout.sharding(names.split())), names)
            for names, shape in SHAPES.items()
        ]
        traced = jax.jit(step).trace(*given)
        text = str(traced.jaxpr)
        kernels = ("product_gathers", "product_swapped_gathers", "gradient_gathers_rows", "gradient_gathers_d")
        assert all(re.search(rf"\bgrouped_{name}\b", text) for name in kernels)
        sorted_tokens = rf"bf16\[{rows},{EMBED}\]\S*"
        assert re.search(sorted_tokens, text) and not re.search(rf"{sorted_tokens} = gather\b", text)
        if plugin:
            made = re.findall(rf"= {sorted_tokens} ([\w-]+)\(", traced.lower().compile().as_text())
            assert [what for what in made if what != "parameter"] == ["custom-call"] * 2


@pytest.mark.slow
def test_tokens_are_exchanged_ragged():
    """Four experts a chip, two at rest: a ragged exchange there and back in both passes, kernels for grouped products,
    and weights whose slices come together as kernels read them, and whose gradients are not summed whole."""
    mesh, used = make_mesh(slice_devices("v5e:2x2"), expert=2, data=2), {"experts": "expert", "batch": "expert/data"}
    with Layout(mesh, {"experts": "expert/data"}, used) as layout:
        at_rest = ["compute" if "batch" in names else "params" for names in SHAPES]
        given = [
            named(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=layout.sharding(names.split(), which)), names)
            for which, (names, shape) in zip(at_rest, SHAPES.items())
        ]
        text = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*given).compile().as_text()
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", text)) >= 4
    assert len(re.findall(r"%ragged-dot-none[\w.]* = ", text)) >= 3
    weights = rf"bf16\[(?:1,)?4,(?:{EMBED},{MLP}|{MLP},{EMBED})\]\S*"
    assert re.search(rf"{weights} all-gather\(", text)
    assert not re.search(rf"{weights} (?:copy|transpose|all-reduce)\(", text)
    assert not re.search(rf"bf16\[\d+,1,{EMBED}\]\S* copy\(", text)  # rows travel as tiles, and are not laid out for it
    tokens = rf"4,128,{EMBED}\]|512,{EMBED}\]"
    assert not re.search(rf"bf16\[(?:{tokens})\S* all-gather", text)
