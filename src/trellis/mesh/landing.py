"""Arrays that lie on no mesh, as NumPy's do, placed on one."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from trellis._compat import is_tracer
from trellis.mesh.platform import are_cpus
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
    """`jax.device_put`, where that would be wrong, or slow.

    What a callback gives as the result of a program is on the first device alone, and called an array of all of them
    (docs/published-bugs.md, 37). And to cut into slices what one CPU device has, JAX compiles a program for each shape,
    where its memory can be read as NumPy's are; donating the result leaves that array as it is.
    """
    through_memory = _called_of_all(array) or (sharding.is_fully_addressable and _in_memory(array))
    return jax.device_put(jax.device_get(array) if through_memory else array, sharding)


def _called_of_all(array) -> bool:
    sharding = getattr(array, "sharding", None)
    return sharding is not None and not isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1


def _in_memory(array) -> bool:
    """Whether an array is one CPU device's, and NumPy has its type: keys and numbers without a fixed type are JAX's."""
    if not isinstance(array, jax.Array) or is_tracer(array) or jax.typeof(array).weak_type:
        return False
    devices = list(array.devices())
    known = not jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
    return known and len(devices) == 1 and are_cpus(devices)
