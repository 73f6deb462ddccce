"""Checks of what a save or a restore is asked for, before anything is written or read."""

import json
import numbers
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from trellis._compat import is_tracer
from trellis.checkpoints.entries import Entry, shown
from trellis.checkpoints.manifest import read_manifest
from trellis.choices import is_count
from trellis.errors import UserError, shortened


def folder_of(folder: Any) -> Path:
    """The folder of checkpoints that is asked for.

    Raises:
        UserError: it is no path, or an empty one, which would be the current folder.
    """
    found = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not found or not isinstance(found, str):
        raise UserError(
            "Checkpoints need the path of a folder.",
            seen=f"folder={folder!r:.80}",
            where="Checkpoints",
            fix="write it as a text, or as a pathlib.Path",
        )
    return Path(found)


def check_options(keep_latest: Any, keep_every: Any, timeout: Any, host_bytes: Any) -> None:
    """Refuses numbers that `Checkpoints` cannot go by.

    Raises:
        UserError: names the first.
    """
    if not is_count(keep_latest):
        raise UserError(
            "A run must keep a whole number of its newest checkpoints, at least one.",
            seen=f"keep_latest={keep_latest!r}",
            where="checkpoints.keep_latest",
            fix="use 1 or more",
        )
    if keep_every is not None and not is_count(keep_every):
        raise UserError(
            "Checkpoints of multiples of a step are kept from step 1 on.",
            seen=f"keep_every={keep_every!r}",
            where="checkpoints.keep_every",
            fix="use 1 or more, or None to keep no others",
        )
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not float(timeout) > 0:
        raise UserError(
            "A process must wait a number of seconds above 0 for the others' files.",
            seen=f"timeout={timeout!r}",
            where="Checkpoints",
            fix="use 600, for example, or leave it out",
        )
    if host_bytes is not None and not is_count(host_bytes):
        raise UserError(
            "The host's memory for a save must be a whole number of bytes, at least one.",
            seen=f"host_bytes={host_bytes!r}",
            where="Checkpoints",
            fix="use 10**9, for example, or None to copy all of a state first",
        )


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


def check_newest(step: int, newest: int | None, folder: Path) -> None:
    """Refuses a checkpoint that is older than the newest: the rule would remove it, and a restore pass it over.

    Raises:
        UserError: names both steps.
    """
    if newest is not None and step < newest:
        raise UserError(
            "A folder's checkpoints must be saved in the order of their steps.",
            seen=f"step {step} after step {newest}",
            where=str(folder),
            fix="use another folder for another run, or one that branches off; or remove the later checkpoints",
        )


def stored_name(folder: Path, finished: bool, name: str, layer: int | None) -> str:
    """The name on disk of an entry of a checkpoint.

    Raises:
        UserError: the checkpoint has no such entry or layer, or is not finished.
    """
    rule = "What is read of a checkpoint must be in it."
    if not finished:
        seen, fix = "no finished checkpoint of this step", "use one of `steps()`"
        raise UserError(rule, seen=seen, where=str(folder), fix=fix)
    saved = read_manifest(folder)["entries"]
    found = [stored for stored in saved if shown(stored) == shown(name)]
    if not found:
        seen, fix = f"no `{shown(name)}`", f"use one of: {', '.join(map(shown, saved))}"
        raise UserError(rule, seen=seen, where=str(folder), fix=shortened(fix, 400))
    shape = saved[found[0]]["shape"]
    if layer is not None and not (shape and 0 <= layer < shape[0]):
        seen = f"layer {layer} of `{shown(name)}` of shape {tuple(shape)}"
        fix = f"use 0 to {shape[0] - 1}" if shape else "leave it out"
        raise UserError(rule, seen=seen, where=str(folder), fix=fix)
    return found[0]


def check_content(found: Mapping[str, Entry], data: Mapping | None) -> None:
    """Refuses what neither Orbax nor the manifest can write.

    Raises:
        UserError: there are no leaves, or a leaf without elements, of a type that does not come back, that was donated
            or that is being traced, or data that JSON does not take.
    """
    for name, entry in found.items():
        traced = is_tracer(entry.leaf)
        if traced or (isinstance(entry.leaf, jax.Array) and entry.leaf.is_deleted()):
            raise UserError(
                "A checkpoint can store only arrays that hold their values.",
                seen="an array which " + ("is being traced" if traced else "was donated"),
                where=shown(name),
                fix="save outside of jax.jit" if traced else "save the state that the step returned",
            )
        _check_type(name, entry)
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


def _check_type(name: str, entry: Entry) -> None:
    """Refuses a type that a checkpoint does not store, or of which a restored array, which is JAX's, has fewer bits."""
    import tensorstore

    dtype = np.dtype(entry.leaf.dtype)
    held = jax.dtypes.canonicalize_dtype(dtype)
    try:
        stored = dtype.isnative and tensorstore.dtype(dtype.name) is not None
    except (TypeError, ValueError):
        stored = False
    if not stored or held != dtype:
        raise UserError(
            "An array of a checkpoint must have a type that it is stored in, and that JAX holds.",
            seen=f"{dtype}, of which JAX holds {held}" if stored else f"{dtype}",
            where=shown(name),
            fix=f"make it an array of {held}, keep a number in `data`, or set jax_enable_x64"
            if stored
            else "save it in another type, or leave it out of the state",
        )


def check_places(wanted: Mapping[str, Entry]) -> None:
    """Refuses a target whose arrays have no concrete sharding, such as `jax.eval_shape` makes on a mesh.

    Raises:
        UserError: names the first such entry, or one that its slices do not divide, or whose type JAX does not hold;
            or there is none.
    """
    if not wanted:
        rule, fix = "The target of a restore must have leaves.", "pass the state to fill"
        raise UserError(rule, seen="a target without leaves", where="restore(...)", fix=fix)
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    for name, entry in wanted.items():
        _check_type(name, entry)
        sharding = getattr(entry.leaf, "sharding", None)
        nowhere = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
        if nowhere or (sharding is None and on_mesh and isinstance(entry.leaf, jax.ShapeDtypeStruct)):
            raise UserError(
                "On a mesh, the arrays of a target must have shardings.",
                seen=f"{entry.leaf}",
                where=shown(name),
                fix="pass trellis.abstract(target), under the layout",
            )
        if isinstance(sharding, jax.sharding.NamedSharding):
            try:
                sharding.shard_shape(entry.shape)
            except ValueError:
                raise UserError(
                    "Slices of a target must be of one size.",
                    seen=f"{entry.shape} over {sharding.spec} of a mesh of {dict(sharding.mesh.shape)}",
                    where=shown(name),
                    fix="use another mesh, or leave this axis whole",
                ) from None
