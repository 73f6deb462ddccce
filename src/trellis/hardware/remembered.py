"""Measurements of this machine, kept in the user's cache folder from one run to the next."""

import hashlib
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trellis.cores import usable_cores
from trellis.files import cache_folder, write_json
from trellis.hardware.platform import processor


def devices_here(devices: Sequence[Any]) -> str:
    """The key of a measurement on devices: the devices, and the machine that they are part of.

    A folder in a shared home belongs to every machine, and a host's name may pass to another machine.
    """
    host = f"{platform.node()}, {processor()}, {usable_cores()} cores"
    return f"{host}, {len(devices)} x {devices[0].device_kind}"


def digest_of(value: Any) -> str:
    """A name for a plain value; equal values have equal names.

    >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def today() -> str:
    """Today's date as it is kept and printed: `7 Nov 2026`."""
    return time.strftime("%d %b %Y").lstrip("0")


def recall(what: str) -> dict[str, Any]:
    """Everything that is kept of one kind, by key; empty if there is no cache, or none that can be read.

    Args:
        what: the kind: `choices`, `paces`, `peaks`.
    """
    return _dict(_kept().get(what))


def remember(what: str, key: str, value: Any) -> None:
    """Keeps a measurement for later runs. A cache that cannot be written keeps nothing.

    Args:
        what: the kind.
        key: the key to keep it under.
        value: anything that JSON can hold.
    """
    kept = _kept()
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(), kept | {what: _dict(kept.get(what)) | {key: value}})
    except OSError:
        pass


def _kept() -> dict[str, Any]:
    try:
        return _dict(json.loads(_file().read_text()))
    except (OSError, ValueError):
        return {}


def _dict(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _file() -> Path:
    return cache_folder("measured") / "machine.json"
