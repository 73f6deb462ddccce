"""What the processes of one program have to have alike: values of the host that a mesh over all of them gets."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from trellis.mesh.meshes import MeshError


@functools.lru_cache(maxsize=64)
def spans_processes(mesh: Any) -> bool:
    """Whether a mesh has devices of every process, of several."""
    if not isinstance(mesh, jax.sharding.Mesh) or jax.process_count() == 1:
        return False
    return {device.process_index for device in mesh.devices.flat} == set(range(jax.process_count()))


def is_of_one_process(array: Any) -> bool:
    """Whether it is NumPy's, or lies on devices of this process alone."""
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def check_alike(values: Sequence[Any], what: str) -> None:
    """Refuses values that differ from one process to another: each would go on with its own, and nobody would tell.

    All processes call it, in the same order. They send each other eight bytes a value, behind what their devices have
    left to do.

    Args:
        values: arrays, keys, numbers, texts; arrays on the mesh are whole on each device.
        what: what takes them, for the message.

    Raises:
        MeshError: one differs; raised in all processes.
    """
    from jax.experimental import multihost_utils

    digests = np.stack([np.frombuffer(_digest(value), np.uint8) for value in values])
    with jax.ensure_compile_time_eval():  # also where a program is traced
        every = np.asarray(multihost_utils.process_allgather(digests))
    apart = np.argwhere((every != every[0]).any(-1))
    if len(apart):
        process, index = apart[0].tolist()
        value = values[index]
        known = f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)[:80]
        raise MeshError(
            f"values that are given to a mesh of several processes must be the same in all of them, got {known} in "
            f"process {jax.process_index()}, which is another in process {process} than in process 0, in {what}: make "
            "it the same way in all, or, of an array of which each process has its own part, write "
            "named(jax.make_array_from_process_local_data(layout.sharding(names), part), names)"
        )


def _digest(value: Any) -> bytes:
    if isinstance(value, jax.Array):  # if it is on the mesh, this process's copy
        value = value.addressable_data(0)
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    made = hashlib.blake2b(digest_size=8)
    if hasattr(value, "shape"):
        array = np.asarray(value)
        made.update(f"{array.dtype}{array.shape}".encode())
        made.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    else:
        made.update(repr(value).encode())
    return made.digest()
