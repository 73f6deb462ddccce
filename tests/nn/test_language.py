"""The loss by name: what accelerators get besides."""

import jax
import jax.numpy as jnp
import numpy as np

from trellis.mesh.layout import Layout
from trellis.mesh.meshes import make_mesh
from trellis.mesh.topology import slice_devices
from trellis.named import named
from trellis.nn.language import gradients_together, next_token_loss


def test_gradients_together_changes_no_number():
    x, w = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(4, 3)

    def loss(x, w, fence):
        x, w = fence(x, w)
        return jnp.sum(jnp.tanh(x @ w.T))

    plain = jax.grad(loss, (0, 1))(x, w, lambda x, w: (x, w))
    fenced = jax.grad(loss, (0, 1))(x, w, gradients_together)
    jax.tree.map(np.testing.assert_array_equal, plain, fenced)


def test_the_sum_of_the_unembeddings_gradient_comes_before_the_layers():
    """On a TPU slice the reduction's result and the hidden states' gradient go through one fence."""
    mesh = make_mesh(slice_devices("v5e:2x2"), data=4)
    layout = Layout(mesh, params={"vocab": "data"}, compute={"batch": "data"})

    def loss(x, w, targets):
        found = next_token_loss(named(x, "batch pos embed"), named(w, "vocab embed"), named(targets, "batch pos"))
        return found.total

    with layout:

        def array(shape, dtype, names, which):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(names, which))

        text = str(
            jax.make_jaxpr(jax.grad(loss, (0, 1)))(
                array((4, 8, 16), jnp.float32, ("batch", "pos", "embed"), "compute"),
                array((32, 16), jnp.float32, ("vocab", "embed"), "params"),
                array((4, 8), jnp.int32, ("batch", "pos"), "compute"),
            )
        )
    fence = next(line for line in text.splitlines() if "optimization_barrier" in line)
    assert "f32[4@data,8,16]" in fence and "f32[32@data,16]" in fence
