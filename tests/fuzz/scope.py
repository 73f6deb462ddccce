"""What a step of a program is drawn from: the variables in sight, and chance."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from .layouts import NAMES, Setting
from .program import Dims, Function, Statement, Value

NEW_NAMES = ("key_pos", "head_dim", "picked", "out", "draw", "side")
LARGEST = 4096  # elements of a value, for each eight devices
RANK = 5


class Unfit(Exception):
    """The step that was tried has nothing in sight to work on."""


@dataclasses.dataclass
class Scope:
    """The variables in sight and where the program runs.

    Attributes:
        rng: chance.
        setting: where the program runs.
        sizes: the usual size of each name.
        values: the variables in sight.
        counter: numbers for new variables.
        mapped: names that must not come in again, because a `vmap` or a loop around has taken them off.
        traced: whether the program is compiled, so that no shape may depend on values.
        depth: how many functions are around.
        derived: whether a derivative of it may be taken.
        reversed: whether no derivative is taken forward.
    """

    rng: np.random.Generator
    setting: Setting
    sizes: dict[str, int]
    values: list[Value]
    counter: itertools.count
    mapped: frozenset[str] = frozenset()
    traced: bool = True
    depth: int = 0
    derived: bool = True
    reversed: bool = False

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def one(self, choices: Sequence):
        """One of several."""
        if not len(choices):
            raise Unfit
        return choices[int(self.rng.integers(len(choices)))]

    def some(self, choices: Sequence, least: int = 1, most: int | None = None) -> list:
        """Several of them, in any order."""
        most = min(len(choices), len(choices) if most is None else most)
        if most < least:
            raise Unfit
        count = int(self.rng.integers(least, most + 1))
        return [choices[i] for i in self.rng.permutation(len(choices))[:count]]

    def between(self, low: int, high: int) -> int:
        """An integer from low to high."""
        if high < low:
            raise Unfit
        return int(self.rng.integers(low, high + 1))

    def fresh(self, prefix: str = "h") -> str:
        return f"{prefix}{next(self.counter)}"

    def value(self, dims: Dims, dtype: str = "f32", below: int = 0) -> Value:
        """A new variable, if it may be as large as that."""
        if len(dims) > RANK or np.prod([size for _, size in dims], initial=1) > LARGEST * -(-self.setting.devices // 8):
            raise Unfit
        names = [name for name, _ in dims]
        if len(set(names)) < len(names) or self.mapped & set(names):
            raise Unfit
        return Value(self.fresh(), tuple(dims), dtype, below)

    def pick(self, test: Callable[[Value], bool] = lambda v: True, dtype: str = "f32") -> Value:
        """A variable in sight, later ones more often."""
        found = [v for v in self.values if v.dtype == dtype and test(v)]
        if not found:
            raise Unfit
        back = (
            min(int(self.rng.exponential(2.0)), len(found) - 1) if self.chance(0.7) else self.between(0, len(found) - 1)
        )
        return found[len(found) - 1 - back]

    def float(self) -> str:
        """A type that products and smooth functions take: mostly float32."""
        return "bf16" if self.chance(0.5) and any(v.dtype == "bf16" for v in self.values) else "f32"

    def ranked(self, least: int = 1, dtype: str = "f32") -> Value:
        """A variable with at least so many dimensions."""
        return self.pick(lambda v: len(v.dims) >= least, dtype)

    def new_name(self, *taken: str) -> str:
        """A name that an array does not have yet."""
        pool = [n for n in (*NEW_NAMES, *NEW_NAMES, *NAMES) if n not in taken and n not in self.mapped]
        return self.one(pool)

    def fits(self, name: str, size: int) -> bool:
        """Whether a name may have a size here; now and then it may although the layout does not divide it."""
        return self.setting.divides(name, size) or self.chance(0.01)

    def require(self, met: bool) -> None:
        """Gives the step up where something is not met."""
        if not met:
            raise Unfit

    def name_text(self, name: str, dims: Dims) -> str:
        """A name as operations take it: mostly as text, now and then as an axis."""
        if self.chance(0.12):
            return f'tr.Axis("{name}", {dict(dims)[name]})'
        return f'"{name}"'

    def names_text(self, names: Sequence[str], dims: Dims) -> str:
        """Several names, or one."""
        if len(names) == 1 and self.chance(0.8):
            return self.name_text(names[0], dims)
        texts = [self.name_text(name, dims) for name in names]
        return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"

    def inner(self, params: list[Value], *, mapped: frozenset[str] = frozenset(), closed: bool = True) -> "Scope":
        """The scope inside a function: its parameters, and what it reads from around it."""
        mapped = self.mapped | mapped
        outer = [v for v in self.values if not mapped & set(v.names)] if closed and self.chance(0.3) else []
        return dataclasses.replace(
            self, values=[*outer, *params], mapped=mapped, depth=self.depth + 1, traced=True, derived=self.derived
        )

    def param(self, dims: Dims, like: Value) -> Value:
        """A function's parameter."""
        return Value(self.fresh(), tuple(dims), like.dtype, like.below)


def step(kind: str, result: Value | tuple[Value, ...], ours: str, plain: str, *functions: Function) -> Statement:
    """A statement that sets one variable, or several."""
    results = (result,) if isinstance(result, Value) else result
    left = ", ".join(value.var for value in results) + (
        "," if len(results) == 1 and not isinstance(result, Value) else ""
    )
    return Statement(kind, results, (f"{left} = {ours}",), (f"{left} = {plain}",), functions)
