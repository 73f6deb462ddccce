"""Checks that a checkpoint's entries fit the state that they fill, and makes the one allowed change: of padding."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from trellis.checkpoints.entries import Entry, shown
from trellis.errors import UserError


def check_names(folder: Path, saved: dict, wanted: dict[str, Entry], partial: bool) -> None:
    missing = sorted(set(wanted) - set(saved))
    extra = [] if partial else sorted(set(saved) - set(wanted))
    if missing or extra:
        raise UserError(
            "A checkpoint must have the entries of the state that it fills.",
            seen=f"not in the checkpoint: {_some(missing)}; not in the state: {_some(extra)}",
            where=str(folder),
            fix="resume with the model and optimizer that saved it, or use another run folder",
        )


def check_fit(folder: Path, name: str, saved: dict, entry: Entry, resizable: dict[str, int]) -> bool:
    """Refuses an entry that does not fit its target. Returns whether an axis changes its length, where allowed."""

    def refuse(fix: str) -> UserError:
        stored = "x".join(map(str, saved["shape"])), saved["dtype"], saved.get("names"), saved.get("key")
        asked = entry.describe()
        needed = "x".join(map(str, asked["shape"])), asked["dtype"], asked.get("names"), asked.get("key")
        return UserError(
            "An entry of a checkpoint must have its target's axes, lengths and dtype.",
            seen=f"saved {_type(*stored)}, wanted {_type(*needed)}",
            where=f"{shown(name)} in {folder}",
            fix=fix,
        )

    if saved["dtype"] != str(entry.leaf.dtype) or saved.get("key") != entry.key_impl:
        raise refuse("resume with the dtypes and random generator that saved it")
    names = list(entry.names) if entry.names is not None else None
    if len(saved["shape"]) != len(entry.shape) or (saved.get("names") or names) != (names or saved.get("names")):
        raise refuse("resume with the model that saved it")
    differ = [i for i, (a, b) in enumerate(zip(saved["shape"], entry.shape, strict=True)) if a != b]
    axes = names or saved.get("names")
    for i in differ:
        true_size = resizable.get(axes[i]) if axes else None
        if true_size is None or min(saved["shape"][i], entry.shape[i]) < true_size:
            raise refuse("resume with the sizes that saved it; only the padding of a vocabulary can change")
    return bool(differ)


def clear_padding(array: jax.Array, saved: dict, resizable: dict[str, int]) -> jax.Array:
    """Puts zeros beyond the true size of each axis that changed its length: padding may have held anything.

    A type that holds only powers of two has no zero: there it is 1.
    """
    blank = jnp.ones_like if array.dtype == jnp.float8_e8m0fnu else jnp.zeros_like
    for i, name in enumerate(saved.get("names", ())):
        if name in resizable and saved["shape"][i] != array.shape[i]:
            inside = np.arange(array.shape[i]) < resizable[name]
            keep = inside.reshape([-1 if j == i else 1 for j in range(array.ndim)])
            clear = jax.jit(lambda a, k=keep: jnp.where(k, a, blank(a)), out_shardings=array.sharding)
            array = clear(array)
    return array


def _type(shape: str, dtype: str, names: list[str] | None, key: str | None) -> str:
    return f"{dtype}[{shape or 'scalar'}]" + (f" ({' '.join(names)})" if names else "") + (f" key {key}" if key else "")


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(map(shown, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
