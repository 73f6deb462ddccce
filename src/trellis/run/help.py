"""The help text of a configuration: every field with its type, value and doc."""

import textwrap
from typing import Any

from trellis.run.overrides import leaves
from trellis.run.schema import fields_of, plain, show, tag_field, variants


def help_text(value: Any, width: int = 110) -> str:
    """Every option of a configuration, with the value that it has now.

    A field that takes one of several kinds lists the other kinds with their fields.
    """
    found = list(leaves(type(value), plain(value)))
    lines, section = [], ""
    for name, kind, now, doc in sorted(found, key=lambda leaf: "." in leaf[0]):  # single fields first
        if (head := name.partition(".")[0]) != section and "." in name:
            section = head
            lines += ["", f"{head}: {fields_of(type(value))[head].doc}"]
        parent, _, last = name.rpartition(".")
        kinds = variants(_type_at(type(value), parent)) if parent else {}
        if kinds and last == tag_field(kinds):
            lines += [f"  --{name}  <{' | '.join(kinds)}>  [{now}]", *_others(kinds, now)]
            continue
        lines.append(f"  --{name}  <{show(kind)}>  [{_text(now)}]")
        lines += textwrap.wrap(doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _type_at(kind: Any, path: str) -> Any:
    for name in path.split("."):
        options = [c for c in (variants(kind) or {"": kind}).values() if name in fields_of(c)]
        kind = fields_of(options[0])[name].type
    return kind


def _text(now: Any) -> str:
    if isinstance(now, list):
        return ",".join(map(_text, now))
    if isinstance(now, dict):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in now.items()) + "}"
    return "null" if now is None else str(now).lower() if isinstance(now, bool) else str(now)


def _others(kinds: dict[str, type], now: str) -> list[str]:
    """The other variants of a union, by their tag, with the names of their fields."""
    lines = [
        (tag, ", ".join(name for name in fields_of(cls) if name != tag_field(kinds))) for tag, cls in kinds.items()
    ]
    return [f"      {tag} has {names}" for tag, names in lines if tag != now]
