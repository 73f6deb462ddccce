"""The user's cache folder, and files that are there whole or not at all."""

import json
import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """A folder of Trellis's in the user's cache: `compiled`, `data` or `plan`. It need not be there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trellis" / name


def write_whole(path: Path, text: str) -> None:
    """Writes a file that exists whole or not at all: under another name first, then renamed."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def write_json(path: Path, value: object) -> None:
    """The same for a value as JSON."""
    write_whole(path, json.dumps(value, indent=1))
