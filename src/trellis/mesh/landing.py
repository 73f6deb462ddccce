"""Arrays that lie on no mesh, as NumPy's do, placed on one."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from trellis._compat import is_tracer
from trellis.notation import spec_of
from trellis.notation.state import mode_of


def on_mesh_in_force(array):
    """An array that lies on no mesh, or on one device, is whole on the mesh in force, and so is its gradient.

    Others, and all where no mesh is in force or in manual mode, are given back as they are.
    """
    here = jax.sharding.get_abstract_mesh()
    mode = mode_of(here)
    if mode not in ("explicit", "auto") or not jax.typeof(array).sharding.mesh.empty:
        return array
    whole = spec_of([()] * len(array.shape))
    if mode == "auto" and not on_one_device(array):
        array = array if is_tracer(array) else jnp.asarray(jax.device_get(array))
        return jax.lax.with_sharding_constraint(array, NamedSharding(here, whole))
    return placed(array, whole)


def placed(array, spec: PartitionSpec, mesh=None):
    """An array that lies on no mesh is whole on every device of one, and each takes its slice.

    Args:
        array: a plain array or a tracer, on no mesh or on one device.
        spec: how it is to lie.
        mesh: the mesh; the one in force if none is given.
    """
    place = lambda spec: spec if mesh is None else NamedSharding(mesh, spec)
    if is_tracer(array):  # its gradient is whole, too
        return jax.reshard(jax.reshard(array, place(spec_of([()] * len(array.shape)))), place(spec))
    if not on_one_device(array):
        return jax.reshard(array, place(spec))
    try:
        return put(array, NamedSharding(jax.sharding.get_mesh() if mesh is None else mesh, spec))
    except ValueError:  # inside of `jit` there is only its shape
        return jax.reshard(jax.device_get(array), place(spec))


def on_one_device(array) -> bool:
    """Whether somebody put an array on a device: JAX does not take it from there by itself."""
    return isinstance(array, jax.Array) and not is_tracer(array) and array.committed


def put(array, sharding: NamedSharding) -> jax.Array:
    """`jax.device_put`, also of what a callback gives as the result of a program: that is on the first device alone,
    and called an array of all of them (docs/published-bugs.md, 37)."""
    called = getattr(array, "sharding", None)
    alone = called is not None and not isinstance(called, NamedSharding) and len(called.device_set) > 1
    return jax.device_put(jax.device_get(array) if alone else array, sharding)
