"""Bits that are flipped in what one device holds, one in each array, and what a guard says of them."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from tests.train.small import GOOD
from trellis.checkpoints.entries import entries, rebuild
from trellis.run.config import GuardRule, Run
from trellis.train.assemble import Assembled, assemble
from trellis.train.guard import Guard, replays
from trellis.train.stopping import CopiesDiffer


def flipped(array: jax.Array, device: jax.Device, bit: int) -> jax.Array:
    """The array with one bit of its first element changed in what one device holds."""
    parts = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1)[:1].view(np.uint8)[bit // 8] ^= 1 << bit % 8
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def change(tree, name: str, device: jax.Device, bit: int = 3):
    found = entries(tree)
    arrays = {n: flipped(e.leaf, device, bit) if n == name else e.leaf for n, e in found.items()}
    return rebuild(tree, arrays)


def _filled(x: jax.ShapeDtypeStruct) -> jax.Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.random.key(0), x.sharding)
    return jax.device_put(np.arange(np.prod(x.shape)).reshape(x.shape).astype(x.dtype), x.sharding)


def flipped_in(run: Run, devices: Sequence[jax.Device]) -> tuple[int, int, bool]:
    """The same of a run with a guard on some devices, and whether its steps are made twice."""
    assembled = assemble(dataclasses.replace(run, guard=GuardRule(every=2)), devices)
    twice = replays(assembled.run.guard, assembled.abstract, assembled.layout.mesh)
    return *flip_each(assembled), twice


def flip_each(assembled: Assembled) -> tuple[int, int]:
    """Flips a bit in each array of a state and a batch, on one device after another, and holds what the guard says.

    Returns:
        How many arrays have copies or are the batch's, whose flips were found and named rightly, and how many have
        nothing to be compared with.
    """
    guard, mesh = Guard(assembled), assembled.layout.mesh
    with assembled.layout:
        state, batch = jax.tree.map(_filled, (assembled.abstract, assembled.abstract_batch()))

        def check(state, batch, read=batch):
            tables = guard.digests(state, batch, 4, save=False, again=lambda: read)
            arrays = {n: np.asarray(a) for n, a in tables.items()}
            guard.check(arrays, 4, lambda: GOOD)

        check(state, batch)  # no false alarm
        found, alone = 0, 0
        for number, (name, entry) in enumerate(entries({"state": state, "batch": batch}).items()):
            where = entry.leaf.sharding.devices_indices_map(entry.leaf.shape)
            device = mesh.devices.flat[(3 * number + 1) % mesh.size]
            copies = [d for d in mesh.devices.flat if where[d] == where[device]]
            both = change({"state": state, "batch": batch}, name, device, bit=(5 * number) % 8)
            if len(copies) == 1 and name.startswith("state/"):
                check(both["state"], both["batch"])  # nobody holds it besides: comparing cannot tell
                alone += 1
                continue
            with pytest.raises(CopiesDiffer) as error:
                check(both["state"], both["batch"])
            found += 1
            if len(copies) == 1:
                assert error.value.seen == f"the batch of step 4: `{name.replace('/', '.')}` on device {device.id}"
                continue
            place = lambda d: np.argwhere(mesh.devices == d)[0]
            along = {mesh.axis_names[i] for d in copies for i in np.flatnonzero(place(d) != place(device))}
            shown = name.removeprefix("state/").replace("/", ".")
            axes = " and ".join(f"`{a}`" for a in mesh.axis_names if a in along)
            if len(copies) == 2:
                pair = ", ".join(str(d.id) for d in copies)
                expected = f"after step 4: `{shown}` on devices {pair} differs along {axes}"
            else:
                others = len(copies) - 1
                expected = f"`{shown}` on device {device.id} differs from the other {others} along {axes}"
                expected = f"after step 4: {expected}"
            assert error.value.seen == expected and error.value.where == "last good checkpoint: c"
    return found, alone
