"""What was measured on this machine, kept in the user's cache folder from one run to the next."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trellis.files import cache_folder, write_json
from trellis.hardware.platform import processor


def devices_here(devices: Sequence[Any]) -> str:
    """What a measurement on devices is kept under: them, and the machine that they are part of.

    A folder in a shared home is every machine's, and a host's name may go on to another machine.
    """
    host = f"{platform.node()}, {processor()}, {os.cpu_count()} cores"
    return f"{host}, {len(devices)} x {devices[0].device_kind}"


def recall(what: str) -> dict[str, Any]:
    """All that is kept of one kind, by what it was kept under; nothing where there is no cache, or none that is whole.

    Args:
        what: the kind: `peaks`, `paces`.
    """
    try:
        found = json.loads(_file().read_text())[what]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(what: str, key: str, value: Any) -> None:
    """Keeps a measurement for later runs. A cache that cannot be written keeps nothing.

    Args:
        what: the kind.
        key: what it is kept under.
        value: anything that JSON has.
    """
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        found = {}
    kept = found if isinstance(found, dict) else {}
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(), kept | {what: recall(what) | {key: value}})
    except OSError:
        pass


def _file() -> Path:
    return cache_folder("measured") / "machine.json"
