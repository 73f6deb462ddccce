"""Experts compiled for TPU slices that are not here: what runs on them, forward and backward."""

import re

import jax
import jax.numpy as jnp
import pytest

from trellis.mesh import Layout, make_mesh
from trellis.mesh.topology import slice_devices
from trellis.named import named
from trellis.nn.moe import choose, mix, score

EXPERTS = 8
SHAPES = {
    "batch pos embed": (4, 128, 256),
    "embed routes": (256, EXPERTS),
    "experts embed mlp": (EXPERTS, 256, 256),
    "experts mlp embed": (EXPERTS, 256, 256),
}


def loss(x, router, into, out):
    made = mix(x, choose(score(x, router), 2), into, into, out)
    return (made * made).sum().array.astype(jnp.float32)


@pytest.mark.slow
def test_tokens_are_exchanged_ragged():
    """Two experts a chip: a ragged exchange there and back in both passes, and kernels for grouped products."""
    devices = slice_devices("v5e:2x2")
    with Layout(
        make_mesh(devices, expert=4), {"experts": "expert"}, {"experts": "expert", "batch": "expert"}
    ) as layout:
        given = [
            named(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=layout.sharding(names.split())), names)
            for names, shape in SHAPES.items()
        ]
        text = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*given).compile().as_text()
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", text)) >= 4
    assert len(re.findall(r"%ragged-dot-none[\w.]* = ", text)) >= 3
    assert not re.search(r"bf16\[\d+,1,256\]\S* copy\(", text)  # rows travel as tiles, and are not laid out for it
    tokens = r"4,128,256\]|512,256\]"
    assert not re.search(rf"bf16\[(?:{tokens})\S* all-gather", text)
