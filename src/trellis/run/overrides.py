"""From a recipe, a YAML file and a command line to one resolved configuration."""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from trellis.errors import UserError, did_you_mean
from trellis.files import load_yaml
from trellis.run.other_names import ours
from trellis.run.schema import REQUIRED, Field, build, fields_of, members, plain, show, tag_field, variant_in, variants

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+")  # 4,8 is no number, but perhaps meant as a list


def resolve(
    kind: type, base: Any = None, *, patch: Mapping | None = None, source: str = "", options: Mapping | None = None
) -> Any:
    """One value of the dataclass `kind`.

    Args:
        kind: the dataclass.
        base: a value of it to start from.
        patch: plain data that replaces parts of the base, as a YAML file holds it.
        source: where the patch was read, for messages.
        options: texts by dotted name, as a command line holds them. They replace parts of both.

    Raises:
        UserError: something does not fit the types or is not known; the message makes a suggestion.
    """
    texts = dict(options or {})
    data = overridden(kind, merge(kind, plain(base) if base is not None else {}, patch or {}), texts)

    def origin(*paths: str) -> str:
        nearest_first = sorted(texts, key=len, reverse=True)  # of `--optimizer muon --optimizer.beta 1` the second
        set_by = [o for path in paths for o in nearest_first if path == o or path.startswith(f"{o}.")]
        set_in_part = [o for o in texts if o.startswith(f"{paths[0]}.")]
        for option in (*set_by, *set_in_part):
            return f"--{option}"
        return f"`{paths[0]}` in {source}" if source else f"`{paths[0]}`"

    return build(kind, data, origin=origin)


def overridden(kind: type, data: Any, options: Mapping) -> Any:
    """Plain data of the dataclass `kind` with the parts that options name replaced; it may lack what has no default.

    Raises:
        UserError: an option is not known, or its text is not a value of its type.
    """
    tags_first = sorted(options, key=lambda name: (not _chooses(kind, data, name.split(".")), name.count(".")))
    for name in tags_first:
        data = _put(kind, data, name.split("."), options[name], name, kind)
    return data


def merge(kind: Any, base: Any, patch: Any) -> Any:
    """Plain data with parts replaced.

    If the tag changes, fields for which the new variant has no default keep their values, such as a learning rate;
    everything else is the new variant's own, including what its fields have inside.
    """
    tagged = variants(kind)
    if isinstance(patch, str) and patch in tagged:  # `schedule: cosine` is short for `schedule: {kind: cosine}`
        patch = {tag_field(tagged): patch}
    base = {} if base is None else base
    if not (isinstance(base, Mapping) and isinstance(patch, Mapping)):
        return patch
    before, after = variant_in(kind, base), variant_in(kind, {**base, **patch})
    if after is None:
        return patch if before is None else {**base, **patch}
    fields = fields_of(after)
    kept = {k: v for k, v in base.items() if before is after or (k in fields and fields[k].default is REQUIRED)}
    for key, value in patch.items():
        kept[key] = merge(fields[key].type, kept.get(key, _default(fields[key])), value) if key in fields else value
    return kept


def _default(field: Field) -> Any:
    """A field's default as plain data, None if it has none."""
    return None if field.default is REQUIRED else plain(field.default)


def named_in(kind: type, options: Mapping[str, str]) -> Iterator[str]:
    """The dotted names that options set: their own, and those of the parts to which `{...}` in their text gives a value
    other than the field's default.

    >>> from trellis.run.config import Run
    >>> list(named_in(Run, {"layout": "{context: exchange, gather: joint, compute: {pos: data}}", "steps": "3"}))
    ['layout', 'layout.context', 'layout.compute', 'layout.compute.pos', 'steps']
    """
    fields = dict(every_field(kind))

    def inside(name: str, value: Any) -> Iterator[str]:
        yield name
        for part, inner in value.items() if isinstance(value, Mapping) else ():
            dotted = f"{name}.{part}"
            if dotted not in fields or _default(fields[dotted]) != inner:
                yield from inside(dotted, inner)

    for name, text in options.items():
        yield from inside(name, read(fields[name].type, text) if name in fields else text)


def leaves(kind: Any, data: Any, path: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Dotted name, type, value and doc of every field that can be set by itself, as the data stands.

    A value that the data does not have is the field's default, or `REQUIRED`.
    """
    cls = variant_in(kind, data)
    for name, field in fields_of(cls).items() if cls else ():
        inner = (data or {}).get(name, REQUIRED if field.default is REQUIRED else _default(field))
        dotted = f"{path}.{name}" if path else name
        if variant_in(field.type, inner) and inner is not None:
            yield from leaves(field.type, inner, dotted)
        else:
            yield dotted, field.type, inner, field.doc


def _chooses(kind: Any, data: Any, names: list[str]) -> bool:
    """Whether an option picks the variant of a union. Such options go first, since others depend on them."""
    if not names:
        return bool(variants(kind))
    if variants(kind) and names == [tag_field(variants(kind))]:
        return True
    cls = variant_in(kind, data if isinstance(data, Mapping) else {})
    if cls is None or names[0] not in fields_of(cls):
        return False
    return _chooses(fields_of(cls)[names[0]].type, (data or {}).get(names[0]), names[1:])


def _put(kind: Any, data: Any, names: list[str], text: str, option: str, root: Any) -> Any:
    """The data with the field at `names` read from text."""
    if not names:
        return merge(kind, data, read(kind, text))
    head, *rest = names
    if tagged := variants(kind):
        if [head] == names and head == tag_field(tagged):
            if text not in tagged:  # refused here: other options depend on it
                build(kind, {head: text}, option.rpartition(".")[0], origin=lambda *_: f"--{option}")
            return merge(kind, data, {head: text})
    if cls := variant_in(kind, data if isinstance(data, Mapping) else {}):
        if head not in (fields := fields_of(cls)):
            raise _unknown(option, head, cls, tagged, root)
        old = dict(data or {})
        before = old.get(head, _default(fields[head]))
        return {**old, head: _put(fields[head].type, before, rest, text, option, root)}
    for member in members(kind):
        container, args = typing.get_origin(member), typing.get_args(member)
        if container is tuple and isinstance(data, list) and head.isdigit() and int(head) < len(data):
            return [_put(args[0], x, rest, text, option, root) if i == int(head) else x for i, x in enumerate(data)]
        if isinstance(container, type) and issubclass(container, Mapping):
            return {**(data or {}), ".".join(names): read(args[1], text)}  # keys may have dots: parameters' names do
    raise UserError(
        f"`{option.removesuffix('.' + '.'.join(names))}` is of type {show(kind)}, which has no field of this name.",
        seen=f"`{'.'.join(names)}`",
        where=f"--{option}",
        fix=f"set the whole value: --{option.removesuffix('.' + '.'.join(names))} {show(kind)}",
    )


def _unknown(option: str, head: str, cls: type, tagged: Mapping[str, type], root: Any) -> UserError:
    parent = option[: option.index(f".{head}")] if f".{head}" in option else ""
    if of := [tag for tag, variant in tagged.items() if head in fields_of(variant)]:
        fix = f"it is a field if --{parent}.{tag_field(tagged)} is {' or '.join(of)}: set that too"
    elif (name := ours(option)) in (names := {name for name, _ in every_field(root)}):
        fix = f"here it is called --{name}"
    elif not option.endswith(head) and (near := difflib.get_close_matches(option, sorted(names), n=1, cutoff=0.8)):
        fix = f"did you mean `--{near[0]}`?"  # what is written wrong is the group
    else:
        last = option.rpartition(".")[2] if not option.endswith(head) else option
        elsewhere = {name for name in names if name.endswith(f".{last}")}
        known = elsewhere or {f"{parent}.{name}".lstrip(".") for name in fields_of(cls)}
        fix = did_you_mean(option, known, shown="--{}")
    rule = f"`{parent or cls.__name__}` has no field of this name."
    return UserError(rule, seen=f"`{head}`", where=f"--{option}", fix=fix)


def every_field(kind: Any, path: str = "") -> Iterator[tuple[str, Field]]:
    """Dotted name and field of everything that can be set, in every variant; a field of several variants comes as
    often."""
    for member in members(kind):
        if isinstance(member, type) and hasattr(member, "__dataclass_fields__"):
            for name, field in fields_of(member).items():
                dotted = f"{path}.{name}" if path else name
                yield dotted, field
                yield from every_field(field.type, dotted)


def choices(kind: Any) -> tuple[str, ...]:
    """The words that a field of this type takes, if they can be listed; those of its elements for a list.

    >>> choices(Literal["none", "full"] | None), choices(tuple[bool, ...]), choices(int)
    (('none', 'full', 'null'), ('true', 'false'), ())
    """
    found: list[str] = list(variants(kind))
    for member in members(kind):
        if typing.get_origin(member) is Literal:
            found += map(str, typing.get_args(member))
        elif member is bool:
            found += ["true", "false"]
        elif typing.get_origin(member) is tuple:
            found += choices(typing.get_args(member)[0])
        elif member is type(None) and found:
            found.append("null")
    return tuple(found)


def read(kind: Any, text: str) -> Any:
    """Plain data from the text of an option, read as the type asks. What does not fit is left for `build` to refuse.

    >>> read(int | None, "null"), read(float, "3e-4"), read(tuple[str, ...], "data,model"), read(bool, "true")
    (None, 0.0003, ['data', 'model'], True)
    >>> read(int, "32,768"), read(int, "4,8")
    (32768, '4,8')
    """
    if text[:1] in ("[", "{"):
        import yaml

        try:
            return load_yaml(text)
        except yaml.YAMLError:
            return text
    if text in variants(kind):
        return text
    for member in members(kind):
        container, args = typing.get_origin(member), typing.get_args(member)
        if container is Literal and text in map(str, args):
            return next(a for a in args if str(a) == text)
        if member is type(None) and text in ("null", "none"):
            return None
        if member is bool and text in ("true", "false"):
            return text == "true"
        if member in (int, float):
            try:
                return member(text.replace(",", "") if member is int and _THOUSANDS.fullmatch(text) else text)
            except ValueError:
                continue
        if container is tuple and str not in members(kind) and not dataclasses.is_dataclass(args[0]):
            return [read(args[0], part) for part in text.split(",") if part]
    return text
