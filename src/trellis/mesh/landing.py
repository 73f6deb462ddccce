"""Places arrays that are on no mesh, such as NumPy's, on one."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from trellis._compat import is_tracer
from trellis.mesh.platform import are_cpus
from trellis.mesh.processes import check_alike, is_of_one_process, spans_processes
from trellis.notation import spec_of
from trellis.notation.state import mode_of


def on_mesh_in_force(array):
    """Puts an array that is on no mesh, or on one device, whole on the mesh in force; its gradient is whole, too.

    Other arrays are returned as they are, and so are all arrays in manual mode or if no mesh is in force.
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
    """Places an array that is on no mesh: it is whole on every device of one, and each takes its slice.

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
    except ValueError:  # inside `jit` there is only the mesh's shape
        return jax.reshard(jax.device_get(array), place(spec))


def on_one_device(array) -> bool:
    """Whether the user put an array on a device: JAX does not take it from there by itself."""
    return isinstance(array, jax.Array) and not is_tracer(array) and array.committed


def put(array, sharding: NamedSharding, what: str = "jax.device_put") -> jax.Array:
    """`jax.device_put`, by way of NumPy if that would otherwise be wrong or slow.

    If a callback's result is that of a program, it is on the first device alone, but the array says that it is on all
    (docs/published-bugs.md, 37). And to cut the array of one CPU device into slices, JAX compiles a program for each
    shape, although its memory can be read as NumPy's can. Donating the result leaves that array as it is.

    Of several processes each places its part of what all of them have. JAX compares arrays of NumPy by sending all of
    each to every process, and no others: here all are compared, by digests.

    Args:
        array: a plain array.
        sharding: where it is to lie.
        what: what asks for it, for messages.

    Raises:
        MeshError: it is not the same in all processes.
    """
    if spans_processes(sharding.mesh) and is_of_one_process(array):
        check_alike([array], what)
        if isinstance(array, np.ndarray):
            known = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
            return jax.make_array_from_callback(known.shape, sharding, lambda index: known[index])
    through_memory = _called_of_all(array) or (sharding.is_fully_addressable and _in_memory(array))
    return jax.device_put(jax.device_get(array) if through_memory else array, sharding)


def _called_of_all(array) -> bool:
    sharding = getattr(array, "sharding", None)
    return sharding is not None and not isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1


def _in_memory(array) -> bool:
    """Whether an array is on one CPU device and NumPy has its type: keys and weakly typed numbers are JAX's own."""
    if not isinstance(array, jax.Array) or is_tracer(array) or jax.typeof(array).weak_type:
        return False
    devices = list(array.devices())
    known = not jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
    return known and len(devices) == 1 and are_cpus(devices)
