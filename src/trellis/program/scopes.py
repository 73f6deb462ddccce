"""What name scopes say of an operation: its pass, and the names that Trellis wrote there.

A `reshard` runs under the scope `reshard[embed/data mlp -> embed mlp ~data]`; types themselves have no names.
"""

import contextlib
import math
import re
from collections.abc import Sequence

import jax

from trellis.notation import Shape, parse_transition


def direction_of(scope: str) -> str:
    """The pass of an operation in this scope, as JAX's transformations write it: "forward", "recomputed", "backward",
    or "update" for what is neither differentiated nor a derivative."""
    if "rematted_computation" in scope:
        return "recomputed"
    if "transpose(" in scope:
        return "backward"
    return "forward" if "jvp(" in scope else "update"


_SCOPE = re.compile(r"[A-Za-z_]\w*\[([^\[\]]*)\]")


def names_of(scope: str, ndim: int) -> tuple[str, ...] | None:
    """The dimension names that Trellis wrote into a name scope, if it has that many dimensions.

    >>> names_of("jit(f)/transpose(jvp(reshard[embed/data mlp -> embed mlp ~data]))", 2)
    ('embed', 'mlp')
    """
    texts = _SCOPE.findall(scope)
    if not texts:
        return None
    names = tuple(name for name, _ in _dims(texts[-1].rpartition("->")[0] or texts[-1]))
    if len(names) != ndim or any(name.startswith("_") for name in names):
        return None
    return names


def names_behind(scope: str, dims: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """`names_of` under a `vmap`, whose dimensions come first: the names of the others, sliced as in the text.

    Args:
        scope: a name stack.
        dims: for each dimension the mesh axes that slice it.

    >>> names_behind("vmap(reshard[pos/model embed -> pos embed])", [("stage",), ("model",), ()])
    ('pos', 'embed')
    """
    for side in (_SCOPE.findall(scope) or [""])[-1].split("->"):
        found = _dims(side)
        names, axes = tuple(name for name, _ in found), [axes for _, axes in found]
        if names and axes == list(dims)[len(dims) - len(names) :] and not any(n.startswith("_") for n in names):
            return names
    return None


def _dims(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """The dimensions of one side of a transition: names, and the mesh axes that slice them."""
    words = [word.split("/") for word in text.split() if word[0] not in "+~"]
    return [(name, tuple(axes)) for name, *axes in words]


_TEXT = re.compile(r"(?:reshard|ring)\[([^\[\]]*->[^\[\]]*)\]")


def transition_in(scope: str) -> tuple[Shape, Shape] | None:
    """The transition that Trellis wrote into a name scope.

    In the backward pass it is the transition's gradient: the other way round, with `+x` for `~x`.

    >>> " -> ".join(map(str, transition_in("transpose(jvp(reshard[embed/data mlp -> embed mlp ~data]))")))
    'embed mlp +data -> embed/data mlp'
    """
    texts = _TEXT.findall(scope)
    if not texts:
        return None
    before, after = parse_transition(texts[-1])
    if direction_of(scope) == "backward":
        before, after = (Shape(s.dims, s.copied, s.pending, s.ellipsis) for s in (after, before))
    return before, after


def sometimes(runs: int, of: int) -> contextlib.AbstractContextManager:
    """The scope of a conditional in a loop: says in how many of its turns some device takes the costly branch."""
    return jax.named_scope(f"sometimes({runs} of {of})")


def turn(position: int, of: int) -> contextlib.AbstractContextManager:
    """The scope of one turn of a loop that is written out: says which one, and of how many."""
    return jax.named_scope(f"turn({position} of {of})")


_TURN = re.compile(r"\bturn\(\d+ of (\d+)\)")


def turns_written_out(scope: str) -> int:
    """How many turns there are of the loops in one of whose turns, written out, an operation is; 1 outside of them.

    >>> turns_written_out("jit(step)/transpose(jvp(turn(3 of 16)))/dot_general"), turns_written_out("jit(step)/add")
    (16, 1)
    """
    return math.prod(map(int, _TURN.findall(scope)))


_SOMETIMES = re.compile(r"sometimes\((\d+) of (\d+)\)(?:/cond)?$")


def share_of_turns(scope: str) -> tuple[int, int]:
    """In how many of how many turns a conditional takes its costly branch: in all, if nothing is said.

    >>> share_of_turns("while/body/sometimes(4 of 16)"), share_of_turns("while/body")
    ((4, 16), (1, 1))
    >>> share_of_turns("while/body/sometimes(4 of 16)/cond")  # as a compiled program has it
    (4, 16)
    """
    found = _SOMETIMES.search(scope)
    return (int(found[1]), int(found[2])) if found else (1, 1)
