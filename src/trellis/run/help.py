"""The help text of a configuration: every field with its type, value and doc."""

import dataclasses
import textwrap
import typing
from collections.abc import Mapping
from typing import Any

from trellis.run.overrides import leaves, overridden
from trellis.run.schema import REQUIRED, fields_of, members, plain, show, tag_field, variants


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A field that can be set by itself.

    Attributes:
        name: its dotted name.
        section: the field of the run that it is part of; "" for the run's own fields.
        kind: what it takes, in words.
        now: its value, as text.
        doc: what it is, and when to change it; if it picks a kind, also the fields of the other kinds.
    """

    name: str
    section: str
    kind: str
    now: str
    doc: tuple[str, ...]


def entries(value: Any, options: Mapping[str, str]) -> list[Entry]:
    """Every field that can be set by itself, of a configuration with options; those outside of sections come first."""
    found = []
    data = overridden(type(value), plain(value), options)
    for name, kind, now, doc in sorted(leaves(type(value), data), key=lambda leaf: "." in leaf[0]):
        parent, _, last = name.rpartition(".")
        kinds = variants(_type_at(type(value), parent)) if parent else {}
        picks = bool(kinds) and last == tag_field(kinds)
        found.append(
            Entry(
                name=name,
                section=name.partition(".")[0] if parent else "",
                kind=" | ".join(kinds) if picks else show(kind),
                now=now if picks else text_of(now),
                doc=tuple(_others(kinds, now)) if picks else (doc, *_each(_type_at(type(value), name))),
            )
        )
    return found


def help_text(value: Any, options: Mapping[str, str] | None = None) -> str:
    """Every option of a configuration, with its current value.

    A field that takes one of several kinds lists the other kinds with their fields.

    Args:
        value: the configuration.
        options: texts by dotted name that replace parts of it. If they pick another kind, the fields of that kind are
            listed, also those that have no value yet.

    Raises:
        UserError: an option is not known, or its text is not a value of its type.
    """
    lines, section = [], ""
    for entry in entries(value, options or {}):
        if entry.section != section:
            section = entry.section
            lines += ["", f"{section}: {fields_of(type(value))[section].doc}"]
        lines.append(f"  --{entry.name}  <{entry.kind}>  [{entry.now}]")
        for text in entry.doc:
            lines += textwrap.wrap(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _type_at(kind: Any, path: str) -> Any:
    for name in path.split("."):
        options = [c for c in (variants(kind) or {"": kind}).values() if name in fields_of(c)]
        kind = fields_of(options[0])[name].type
    return kind


def text_of(now: Any) -> str:
    """A field's plain value, as it is written on the command line; "required" if it has none."""
    if now is REQUIRED:
        return "required"
    if isinstance(now, list):
        return ",".join(map(text_of, now))
    if isinstance(now, dict):
        return "{" + ", ".join(f"{key}: {text_of(item)}" for key, item in now.items()) + "}"
    return "null" if now is None else str(now).lower() if isinstance(now, bool) else str(now)


def _each(kind: Any) -> list[str]:
    """The fields of a list's entries, if they have any."""
    listed = [args[0] for member in members(kind) if (args := typing.get_args(member)) and len(args) == 2]
    return [
        f"{name} <{show(field.type)}>: {field.doc}"
        for cls in listed
        if dataclasses.is_dataclass(cls)
        for name, field in fields_of(cls).items()
    ]


def _others(kinds: dict[str, type], now: str) -> list[str]:
    """The other variants of a union, by their tag, with the names of their fields."""
    lines = [
        (tag, ", ".join(name for name in fields_of(cls) if name != tag_field(kinds))) for tag, cls in kinds.items()
    ]
    return [f"{tag} has {names}" for tag, names in lines if tag != now]
