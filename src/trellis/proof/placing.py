"""Whole arrays and what each device holds of them."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trellis.errors import UserError


def numbers_of(seed: int) -> np.random.Generator:
    """Random numbers from a seed.

    Raises:
        UserError: it is negative.
    """
    if seed < 0:
        raise UserError("The seed must be 0 or more.", seen=seed, where="seed", fix="use 0 or more")
    return np.random.default_rng(seed)


def plain(x: jax.Array | np.ndarray) -> np.ndarray:
    """An array's numbers; a random key's are its words."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def cut(x: np.ndarray, sharding: NamedSharding) -> np.ndarray:
    """What each device holds of an array, `device dim ...`; one row if all hold the same.

    For a pending sum, the first device along its mesh axes holds the whole value, and the others zeros.

    >>> import jax
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    >>> cut(np.arange(4), NamedSharding(mesh, PartitionSpec("data"))).tolist()
    [[0, 1], [2, 3]]
    """
    spec = sharding.spec
    whole = NamedSharding(sharding.mesh, PartitionSpec(*spec.partitions)) if spec.unreduced else sharding
    if whole.is_fully_replicated:
        parts = x[None]
    else:
        index = whole.devices_indices_map(x.shape)
        parts = np.stack([x[index[device]] for device in sharding.mesh.devices.flat])
    if not spec.unreduced:
        return parts
    along = [name in spec.unreduced for name in sharding.mesh.axis_names]
    places = np.indices(sharding.mesh.devices.shape).reshape(len(along), -1)
    first = (places[np.array(along)] == 0).all(0)
    return parts * first.astype(x.dtype).reshape(-1, *[1] * x.ndim)


def sharding_of(axes: Sequence[Sequence[str]], mesh: Mesh) -> NamedSharding:
    """The sharding of a result, from the mesh axes that slice each of its dimensions."""
    return NamedSharding(mesh, PartitionSpec(*(tuple(names) or None for names in axes)))
