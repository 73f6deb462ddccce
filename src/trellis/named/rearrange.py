"""Reordering, splitting and merging in one text: `rearrange(x, "batch (heads head_dim) -> batch heads head_dim")`."""

import re

from trellis.named.arguments import text_of
from trellis.named.array import NamedArray
from trellis.named.axis import NamesError
from trellis.named.operand import operand
from trellis.named.reshape import merge_axes, split_axis, transpose
from trellis.notation import NotationError, typeof


def rearrange(x: NamedArray, pattern: str, /, **sizes: int) -> NamedArray:
    """Reorders, splits and merges: `rearrange(x, "batch (heads head_dim) -> batch heads head_dim", heads=8)`.

    On the left a group `(a b)` stands for one dimension that is split; which
    one follows from the position among the array's names, or is written
    `name=(a b)`. On the right a group becomes one dimension, named
    `new=(a b)`, or `a_b` if not named. `...` stands for the names not written.

    Names: those on the right of the pattern.
    Gradient: rearranged back; nothing moves.
    Moves: as `split_axis` and `merge_axes`: nothing, or an all-gather of a name whose slices do not fall on whole
        pieces.

    Raises:
        NamesError: sizes that do not multiply to the dimension's, or absent names.
        NotationError: the pattern is not `before -> after`.
    """
    text_of(pattern, "rearrange", "write rearrange(x, 'a b -> b a')")
    left, arrow, right = pattern.partition("->")
    if not arrow:
        raise NotationError(f"a rearrangement must have one '->', got none, in '{pattern}': write 'before -> after'")
    x = operand(x, "rearrange", pending=True)
    refuse_if = [n for n in _flat(right) if n != "..." and n not in _flat(left) and n not in x.names]
    if refuse_if:
        raise NamesError(
            f"names on the right must also be on the left, got '{refuse_if[0]}' in '{pattern}' for {typeof(x)}: "
            "correct it"
        )
    groups = {name for group_name, group in _named_groups(left) if group_name is not None for name in group}
    if unused := [n for n in sizes if n not in groups]:
        raise NamesError(
            f"sizes can only be given for parts of groups on the left, got {unused[0]}={sizes[unused[0]]} in "
            f"'{pattern}' for {typeof(x)}: leave it out, or correct the name"
        )
    x = _split_groups(x, left, sizes, pattern)
    return _merge_groups(x, right, pattern)


def _flat(side: str) -> list[str]:
    return [name for _, group in _named_groups(side) for name in group]


def _named_groups(side: str) -> list[tuple[str | None, tuple[str, ...]]]:
    """`a name=(b c) (d e)` as [(None, (a,)), (name, (b, c)), ("", (d, e))]: "" marks a group without a name."""
    found = []
    for m in re.finditer(r"(?:(\w+)=)?\(([^()]*)\)|(\S+)", side):
        found.append((None, (m[3],)) if m[3] else (m[1] or "", tuple(m[2].split())))
    return found


def _split_groups(x: NamedArray, side: str, sizes, pattern: str) -> NamedArray:
    groups = _named_groups(side)
    has_rest = any(group == ("...",) for _, group in groups)
    if not has_rest and len(groups) != len(x.names):
        raise NamesError(
            f"a rearrangement must write every dimension, or '...', got {len(groups)} in '{pattern}' for {typeof(x)}: "
            "write each once"
        )
    plain = {group[0] for name, group in groups if name is None}
    free = [n for n in x.names if n not in plain]
    for position, (name, group) in enumerate(groups):
        if name is None:
            if group[0] != "...":
                x.index(group[0])
            continue
        if not name:
            if has_rest and len(free) != 1:
                raise NamesError(
                    f"a group beside '...' must name the dimension it splits, got '({' '.join(group)})' in "
                    f"'{pattern}': write name=({' '.join(group)})"
                )
            name = free[0] if has_rest else x.names[position] if x.names[position] in free else free[0]
        free.remove(name)
        x = split_axis(x, name, {g: sizes.get(g, -1) for g in group})
    return x


def _merge_groups(x: NamedArray, side: str, pattern: str) -> NamedArray:
    groups = _named_groups(side)
    written = [n for _, group in groups for n in group if n != "..."]
    rest = tuple(n for n in x.names if n not in written)
    if rest and ("...",) not in [g for _, g in groups]:
        raise NamesError(
            f"a rearrangement must keep every dimension, got none of '{rest[0]}' on the right of '{pattern}' for "
            f"{typeof(x)}: add it"
        )
    spelled = [(None, (name,)) for name in rest]
    groups = [pair for given in groups for pair in (spelled if given[1] == ("...",) else [given])]
    x = transpose(x, tuple(n for _, group in groups for n in group))
    for name, group in groups:
        if name is not None:
            x = merge_axes(x, group, name or "_".join(group))
    return x
