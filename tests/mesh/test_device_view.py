"""A program of whole arrays, run as the program of one device inside a program of more mesh axes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from trellis.mesh import make_mesh
from trellis.mesh.device.view import View
from trellis.mesh.meshes import on_another, without_axis


def test_an_operation_that_jax_writes_out_late_is_run_where_it_stands():
    """Such an operation (searchsorted of JAX 0.12) says on which mesh it was traced, which is not where it runs."""
    mesh = make_mesh(jax.devices()[:4], stage=2, data=2)
    inner = without_axis(mesh, "stage")
    ends, x = jnp.array([1, 4, 9]), jnp.arange(8)

    def place(ends, part):
        return jnp.searchsorted(ends, part, side="right") + part

    with on_another(inner):
        whole = jax.shard_map(place, in_specs=(P(), P("data")), out_specs=P("data"))
        types = (jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(inner.abstract_mesh, spec))
                 for a, spec in ((ends, P()), (x, P("data"))))  # fmt: skip
        closed = jax.make_jaxpr(whole)(*types)
    view = View(dict(mesh.shape))
    with jax.set_mesh(mesh):
        run = jax.shard_map(lambda *parts: view.run(closed, *parts)[0], in_specs=(P(), P("data")), out_specs=P("data"),
                            check_vma=False)  # fmt: skip
        found = jax.jit(run)(ends, jax.device_put(x, jax.NamedSharding(mesh, P("data"))))
    np.testing.assert_array_equal(found, place(ends, x))
