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
            "A checkpoint is that of a number of steps.",
            seen=f"{type(step).__name__} ({step!r:.60})",
            where="save(step, ...)",
            fix="pass how many steps made the state: 0 or more",
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
            "A checkpoint stores arrays of one element at least.",
            seen=f"{found[empty[0]].shape}" if empty else "a state without leaves",
            where=shown(empty[0]) if empty else "save(...)",
            fix="leave it out of what is saved",
        )
    try:
        json.dumps(dict(data or {}))
    except (TypeError, ValueError) as error:
        raise UserError(
            "What is stored beside a state is written as JSON.",
            seen=str(error),
            where="save(..., data=...)",
            fix="pass numbers, texts, lists and maps, or make it a leaf of the state",
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
                "On a mesh a target says where its arrays are to lie.",
                seen=f"{entry.leaf}",
                where=shown(name),
                fix="pass trellis.abstract(target), under the layout",
            )
