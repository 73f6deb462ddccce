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
    """An array's numbers; a random key's are its words, and a pending sum's are those of the sum."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.spec.unreduced:
        x = jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions)))
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


def sharding_of(sliced: Sequence[Sequence[str]], pending: Sequence[str], mesh: Mesh) -> NamedSharding:
    """The sharding of a result, from the mesh axes that slice each of its dimensions, and those that it is a pending
    sum along."""
    return NamedSharding(mesh, PartitionSpec(*(tuple(names) or None for names in sliced), unreduced={*pending}))


def settled(x: np.ndarray, sharding: NamedSharding) -> tuple[np.ndarray, NamedSharding]:
    """What devices hold once their parts of a pending sum are added, and how that lies.

    >>> import jax
    >>> mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    >>> x = np.array([[1], [2], [30], [40]])
    >>> settled(x, NamedSharding(mesh, PartitionSpec(None, unreduced={"model"})))[0].tolist()
    [[3], [3], [70], [70]]
    """
    mesh, spec = sharding.mesh, sharding.spec
    if not spec.unreduced:
        return x, sharding
    axes = tuple(i for i, name in enumerate(mesh.axis_names) if name in spec.unreduced)
    parts = np.broadcast_to(x, (mesh.size, *x.shape[1:])).reshape(*mesh.devices.shape, *x.shape[1:])
    whole = np.broadcast_to(parts.sum(axes, x.dtype, keepdims=True), parts.shape).reshape(mesh.size, *x.shape[1:])
    return whole, NamedSharding(mesh, PartitionSpec(*spec.partitions))
