"""Checks of what a save or a restore is asked for, before anything is written or read."""

import json
import operator
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh

from trellis.checkpoints.entries import Entry, shown
from trellis.errors import UserError


def number_of(step: int) -> int:
    """The number of a step, which may be given as a NumPy or JAX integer, such as `state.step`.

    Raises:
        UserError: it is not a number of steps.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise UserError(
            "The step of a checkpoint must be a whole number, 0 or more.",
            seen=f"{type(step).__name__} ({step!r:.60})",
            where="save(step, ...)",
            fix="pass the number of steps that made the state",
        )
    return number


def check_content(found: Mapping[str, Entry], data: Mapping | None) -> None:
    """Refuses what neither Orbax nor the manifest can write.

    Raises:
        UserError: there are no leaves, or a leaf without elements, or data that JSON does not take.
    """
    empty = [name for name, entry in found.items() if 0 in entry.shape]
    if empty or not found:
        raise UserError(
            "A checkpoint can store only arrays of at least one element.",
            seen=f"{found[empty[0]].shape}" if empty else "a state without leaves",
            where=shown(empty[0]) if empty else "save(...)",
            fix="leave it out of the state",
        )
    try:
        json.dumps(dict(data or {}))
    except (TypeError, ValueError) as error:
        raise UserError(
            "The data stored beside a state must be valid JSON.",
            seen=str(error),
            where="save(..., data=...)",
            fix="pass numbers, strings, lists and dicts, or make it a leaf of the state",
        ) from error


def check_places(wanted: Mapping[str, Entry]) -> None:
    """Refuses a target whose arrays have no concrete sharding, such as `jax.eval_shape` makes on a mesh.

    Raises:
        UserError: names the first such entry.
    """
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    for name, entry in wanted.items():
        sharding = getattr(entry.leaf, "sharding", None)
        nowhere = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
        if nowhere or (sharding is None and on_mesh and isinstance(entry.leaf, jax.ShapeDtypeStruct)):
            raise UserError(
                "On a mesh, the arrays of a target must have shardings.",
                seen=f"{entry.leaf}",
                where=shown(name),
                fix="pass trellis.abstract(target), under the layout",
            )
