"""Checks that copies are equal: what devices hold is compared wherever the types say that it is the same."""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from trellis.checkpoints.checkpoints import LastGood
from trellis.checkpoints.entries import entries, shown
from trellis.inspect.ledger import ledger
from trellis.inspect.rows import Ledger
from trellis.notation.state import state_of
from trellis.run.config import GuardRule
from trellis.train.assemble import Assembled
from trellis.train.digests import digest_table
from trellis.train.stopping import CopiesDiffer

# How many differences a message names.
_NAMED = 3
# One of this many comparisons is of a step that was made twice: half a step's time for each.
_REPLAYED = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Devices that do not hold what other devices do.

    Attributes:
        name: the array's name.
        devices: those in the minority; all of the group if there is no minority.
        axes: the mesh axes along which they differ.
        copies: how many devices were compared.
    """

    name: str
    devices: tuple[Any, ...]
    axes: tuple[str, ...]
    copies: int

    def __str__(self) -> str:
        where = f"`{self.name}` on {_listed(self.devices)}"
        if len(self.devices) < self.copies:
            return f"{where} differs from the other {self.copies - len(self.devices)} along {_words(self.axes)}"
        return f"{where} differs along {_words(self.axes)}"


class Guard:
    """Compares the copies of a run's state and batches after steps N, 2N, ... and before each checkpoint.

    If a part of the state is held only once, steps 2N, 4N, ... are made twice from the same state and batch, by the
    same program, and their results are compared. Comparisons run on the devices behind the steps; nothing waits for
    them.

    Args:
        assembled: the run.
    """

    def __init__(self, assembled: Assembled):
        self._assembled, self._rule = assembled, assembled.run.guard
        self._mesh = assembled.layout.mesh
        self._replays = replays(self._rule, assembled.abstract, self._mesh)
        self._names: list[str] = []
        self._specs: tuple[P, ...] = ()
        self._copy: Callable | None = None

    def replay(self, step: Callable, state: Any, batch: Any, made: int) -> dict[str, jax.Array]:
        """Makes a step on a copy of the state, if it is to be made twice, and returns its digests.

        Args:
            step: the compiled step, which donates its state.
            state, batch: the next arguments of the step.
            made: how many steps will have been made after it.
        """
        if not (self._replays and self._due(made, _REPLAYED)):
            return {}
        if self._copy is None:
            same = jax.tree.map(lambda x: x.sharding, state)
            self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=same)
        again, _ = step(self._copy(state), batch)
        return {"replayed": self._table(again, batch)}

    def digests(
        self, state: Any, batch: Any, made: int, *, save: bool, again: Callable[[], Any] | None = None
    ) -> dict[str, jax.Array]:
        """The digests of a state and of the batch that led to it, still on the devices, if they are to be compared.

        Args:
            state: the state after `made` steps.
            batch: the batch of the last of these.
            made: how many steps have been made.
            save: whether the state is about to be saved.
            again: reads the batch once more, since few devices or none hold copies of it.
        """
        if self._rule.every is None or not (save or self._due(made)):
            return {}
        found = {"digests": self._table(state, batch)}
        if again is not None and self._due(made):
            leaves = [entry.leaf for entry in entries(again()).values()]
            found["read_again"] = digest_table(leaves, self._mesh, tuple(leaf.sharding.spec for leaf in leaves))
        return found

    def check(self, arrays: dict[str, np.ndarray], step: int, last_good: Callable[[], LastGood]) -> None:
        """Compares digests that have arrived.

        Args:
            arrays: what `digests` and `replay` gave, on the host.
            step: how many steps had been made.
            last_good: gives words about the last good checkpoint.

        Raises:
            CopiesDiffer: devices hold different values, the batch was a different one, or the step gave two results.
        """
        if "digests" not in arrays:
            return
        table = arrays["digests"]
        if found := differences(table, self._names, self._specs, self._mesh):
            raise CopiesDiffer(
                "The copies of a value on several devices must be the same, to the bit.",
                seen=f"after step {step}: {_some([str(d) for d in found])}",
                **_told(last_good(), "leave out a device that is named again"),
            )
        if "read_again" in arrays and (unlike := self._unlike(table, arrays["read_again"])):
            raise CopiesDiffer(
                "The batch on the devices must be the same when its data are read again, to the bit.",
                seen=f"the batch of step {step}: {unlike}",
                **_told(last_good(), "leave out a machine or a disk that is named again"),
            )
        if "replayed" in arrays and (unlike := self._unlike(table, arrays["replayed"])):
            raise CopiesDiffer(
                "A step that is replayed from the same state and batch must give the same result, to the bit.",
                seen=f"step {step} gave two: {unlike}",
                **_told(
                    last_good(),
                    "leave out a device that is named again, or use --guard.replay false if steps are random",
                ),
            )

    def _unlike(self, table: np.ndarray, other: np.ndarray) -> str:
        """Where two tables differ, in words; the other's arrays are the last ones of the table."""
        names = self._names[-other.shape[-1] :]
        differ = {
            name: at for name, at in zip(names, np.moveaxis(table[..., -len(names) :] != other, -1, 0)) if at.any()
        }
        return _some([f"`{name}` on {_listed(self._mesh.devices[at])}" for name, at in differ.items()])

    def ledger(self) -> Ledger:
        """The communication of a comparison, including that of a batch that is read again."""
        batch = self._assembled.abstract_batch()
        leaves = [*_leaves(self._assembled.abstract, batch).values(), *(e.leaf for e in entries(batch).values())]
        specs = tuple(leaf.sharding.spec for leaf in leaves)
        with self._assembled.layout:
            return ledger(lambda leaves: digest_table(leaves, self._mesh, specs), leaves)

    def _due(self, made: int, comparisons: int = 1) -> bool:
        return self._rule.every is not None and made % (comparisons * self._rule.every) == 0

    def _table(self, state: Any, batch: Any) -> jax.Array:
        found = _leaves(state, batch)
        self._names = list(found)
        self._specs = tuple(leaf.sharding.spec for leaf in found.values())
        return digest_table(list(found.values()), self._mesh, self._specs)


def replays(rule: GuardRule, abstract: Any, mesh: Mesh) -> bool:
    """Whether steps are made twice: a part of the state has no copy.

    Args:
        rule: the run's rule.
        abstract: the state's types with shardings.
        mesh: the mesh that the state is on.
    """
    whole = [math.prod(mesh.shape[axis] for axis in state_of(e.leaf).sliced) for e in entries(abstract).values()]
    return rule.every is not None and rule.replay and max(whole) == mesh.size


def differences(table: np.ndarray, names: Sequence[str], specs: Sequence[P], mesh: Mesh) -> list[Difference]:
    """The places where a table of digests differs along mesh axes that do not slice an array.

    Args:
        table: `u32`, with a dimension for each mesh axis, and the last for the arrays.
        names: the names of the arrays.
        specs: how the arrays are sliced.
        mesh: the mesh.
    """
    found = []
    axes = mesh.axis_names
    for n, (name, spec) in enumerate(zip(names, specs, strict=True)):
        sliced = {a for part in spec if part is not None for a in ((part,) if isinstance(part, str) else part)}
        order = [i for i, a in enumerate(axes) if a in sliced] + [i for i, a in enumerate(axes) if a not in sliced]
        kept = tuple(range(len(sliced), len(axes)))  # the dimensions along which there are copies
        values, devices = table[..., n].transpose(order), mesh.devices.transpose(order)
        groups = np.ndindex(values.shape[: len(sliced)])
        for held, group in ((values[index], devices[index]) for index in groups):
            counts = collections.Counter(held.flat).most_common(2)
            if len(counts) > 1:
                clear = counts[0][1] > held.size / 2
                minority = held != counts[0][0] if clear else np.ones_like(held, bool)
                along = [axes[order[dim]] for i, dim in enumerate(kept) if (held != held.take([0], axis=i)).any()]
                found.append(Difference(name=name, devices=tuple(group[minority]), axes=tuple(along), copies=held.size))
    return found


def _told(last_good: LastGood, otherwise: str) -> dict[str, str]:
    """The last two parts of a message: where a run can continue, and how."""
    return {"where": last_good.where, "fix": f"{last_good.again}; {otherwise}"}


def _leaves(state: Any, batch: Any) -> dict[str, Any]:
    """The arrays of a state and a batch, by the names that messages use."""
    found = {shown(name): entry.leaf for name, entry in entries(state).items()}
    return found | {f"batch.{shown(name)}": entry.leaf for name, entry in entries(batch).items()}


def _listed(devices: Sequence[Any]) -> str:
    ids = ", ".join(str(d.id) for d in devices[:8]) + (" ..." if len(devices) > 8 else "")
    processes = sorted({d.process_index for d in devices})
    of = f" of process {', '.join(map(str, processes[:8]))}" if jax.process_count() > 1 else ""
    return f"device{'s' if len(devices) > 1 else ''} {ids}{of}"


def _words(axes: Sequence[str]) -> str:
    return " and ".join(f"`{axis}`" for axis in axes)


def _some(found: list[str]) -> str:
    return "; ".join(found[:_NAMED]) + (f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
