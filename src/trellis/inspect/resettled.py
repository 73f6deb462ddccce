"""A construct that compilers get wrong: a sum that is settled in a loop, made pending again, and settled after it.

    loop:  g = reshard("embed +data -> embed", ...)    one all-reduce a turn
           total = total + reshard("embed -> embed +data", g)
    reshard("embed +data -> embed", total)             and another one

The second line is what the gradient of `reshard("embed ~data -> embed", w)` does. XLA's
`while-loop-all-reduce-code-motion` moves the first sum out of the loop and past the cast, so that both sums follow each
other on the same values: on TPUs one device's part is counted twice and the others' not at all. Keeping the sum pending
until it is settled once is right whatever the compiler moves, and moves fewer bytes.
"""

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from trellis.notation import PendingSumError
from trellis.notation.typeof import short_dtype

from .calls import called
from .manual import COLLECTIVES
from .rules import Placements, place_of
from .source import names_of, source_of

Settled = frozenset[str]
_NONE: Settled = frozenset()

# What a compiler moves a sum past: a sum of results is the result of the sum.
_LINEAR = frozenset(
    "add add_any sub neg mul div select_n convert_element_type reduce_precision reshape transpose broadcast_in_dim "
    "squeeze expand_dims slice dynamic_slice dynamic_update_slice concatenate pad rev split copy name reduce_sum "
    "reshard pvary optimization_barrier".split()
)
_SUMS = ("all-reduce", "reduce-scatter")


def refuse_resettled(jaxpr: Jaxpr, sizes: dict[str, int]) -> None:
    """Refuses a program in which a sum is settled within a loop and made pending again.

    Args:
        jaxpr: of the whole program.
        sizes: of the mesh axes.

    Raises:
        PendingSumError: with the lines of the sum and of the cast.
    """
    _Reader(sizes).read(jaxpr, [_NONE] * len(jaxpr.invars), in_loop=False, scope="")


class _Reader:
    """Follows, through one jaxpr and those it calls, along which mesh axes values are sums that were settled."""

    def __init__(self, sizes: dict[str, int]):
        self.sizes = dict(sizes)
        self.made: dict[str, str] = {}  # mesh axis -> the line that settled last along it

    def read(self, jaxpr: Jaxpr, inputs: list[Settled], *, in_loop: bool, scope: str) -> list[Settled]:
        """The settled axes of the results, from those of the arguments."""
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        of = lambda v: _NONE if isinstance(v, Literal) else known.get(v, _NONE)
        placements = Placements(self.sizes)
        for equation in jaxpr.eqns:
            operands = [of(v) for v in equation.invars]
            here = f"{scope}/{equation.source_info.name_stack}"
            results = self.results(equation, operands, placements, in_loop, here)
            known.update(zip(equation.outvars, results, strict=True))
        return [of(v) for v in jaxpr.outvars]

    def results(self, equation: JaxprEqn, operands, placements: Placements, in_loop: bool, scope: str) -> list[Settled]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name in ("scan", "while", "cond") or called(equation):
            return self.inner(equation, operands, in_loop, scope)
        carried = _NONE.union(*operands) if name in _LINEAR else _NONE
        if in_loop and (again := carried & frozenset(self.cast(equation))):
            self.refuse(equation, sorted(again), scope)
        settled = frozenset(self.sums(equation, placements))
        for axis in settled:
            self.made[axis] = source_of(equation)
        return [carried | settled] * count

    def inner(self, equation: JaxprEqn, operands, in_loop: bool, scope: str) -> list[Settled]:
        name, params, count = equation.primitive.name, equation.params, len(equation.outvars)
        if name == "scan":
            return self.read(params["jaxpr"].jaxpr, operands, in_loop=True, scope=scope)
        if name == "while":
            carried = operands[params["cond_nconsts"] :]
            return self.read(params["body_jaxpr"].jaxpr, carried, in_loop=True, scope=scope)
        if name == "cond":
            branches = [self.read(b.jaxpr, operands[1:], in_loop=in_loop, scope=scope) for b in params["branches"]]
            return [_NONE.union(*each) for each in zip(*branches, strict=True)]
        body = called(equation)[0]
        fits = len(body.invars) == len(operands)
        found = self.read(body, operands if fits else [_NONE] * len(body.invars), in_loop=in_loop, scope=scope)
        return found if len(found) == count else [_NONE] * count

    def sums(self, equation: JaxprEqn, placements: Placements) -> Iterator[str]:
        """The mesh axes along which this equation settles a sum."""
        kind = COLLECTIVES.get(equation.primitive.name)
        if kind in _SUMS and equation.primitive.name not in ("pmax", "pmin"):
            named = equation.params.get("axes", equation.params.get("axis_name", ()))
            yield from (named,) if isinstance(named, str) else (a for a in named if isinstance(a, str))
        elif kind is None:
            for implied in placements.implied(equation):
                if implied.move.kind in _SUMS:
                    yield from implied.move.axes

    def cast(self, equation: JaxprEqn) -> Iterator[str]:
        """The mesh axes along which this equation makes a value a pending sum that was none."""
        if equation.primitive.name == "reshard":
            before, after = place_of(equation.invars[0].aval), place_of(equation.outvars[0].aval)
            yield from (a for a in after.pending - before.pending - set(before.sharded) if self.sizes.get(a, 1) > 1)

    def refuse(self, equation: JaxprEqn, axes: list[str], scope: str) -> None:
        aval, over = equation.invars[0].aval, " and ".join(f"'{a}'" for a in axes)
        names = names_of(scope, len(aval.shape)) or tuple(map(str, aval.shape))
        before, after = place_of(aval).words(names), place_of(equation.outvars[0].aval).words(names)
        made = ", ".join(filter(None, dict.fromkeys(self.made.get(a, "") for a in axes)))
        raise PendingSumError(
            f"a sum that is settled in a loop stays settled, got one over {over}{f' from {made}' if made else ''} that "
            f"is made pending again as {short_dtype(aval.dtype)}[{before} -> {after}], in "
            f"{source_of(equation) or scope}: compilers sum it twice; keep the copies "
            f"({' '.join('~' + a for a in axes)}) of what it is the gradient of up to the product that uses them, so "
            f"that it stays pending and is settled once, after the loop"
        )
