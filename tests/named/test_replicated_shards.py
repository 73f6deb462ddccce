"""Weights sliced over one mesh axis and copied over another: what the gradient's way back costs."""

import jax
import jax.numpy as jnp

from trellis.inspect import ledger
from trellis.mesh import Layout, make_mesh
from trellis.named import einsum, named, shard


def test_a_gradient_is_scattered_before_it_is_summed_over_copies():
    """Over replica 2 x data 4, B bytes of gradient: a scatter of B over data, then an all-reduce of B/4 over replica.

    One joint all-reduce would send 2 * 7/8 B; this sends 3/4 B + 2 * 1/2 * B/4 = B.
    """
    mesh = make_mesh(replica=2, data=4)
    with Layout(mesh, params={"embed": "data"}, compute={"batch": ("replica", "data")}):
        x = shard(named(jnp.ones((8, 16)), "batch embed"), "compute")
        w = shard(named(jnp.ones((16, 32)), "embed mlp"))

        def loss(w, x):
            return (einsum("batch embed, embed mlp -> batch mlp", x, w) ** 2).sum().array

        rows = [row for row in ledger(jax.grad(loss), w, x) if row.direction == "backward"]
    size = 16 * 32 * 4
    assert [(row.kind, row.axis, row.wire) for row in rows] == [
        ("reduce-scatter", "data", 3 * size // 4),
        ("all-reduce", "replica", size // 4),
    ]
    assert [row.what for row in rows] == [
        "embed mlp +data +replica -> embed/data mlp +replica",
        "embed/data mlp +replica -> embed/data mlp",
    ]
