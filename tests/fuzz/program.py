"""A random program: values, statements and functions, each written twice, in Trellis and in plain `jax.numpy`.

Variables are `x1, h2, ...`, unique in a program, so that what a text uses can be read off it, and one variable can be
put in the place of another.
"""

import dataclasses
import re

Dims = tuple[tuple[str, int], ...]
VARIABLE = re.compile(r"\b[xh]\d+\b")
FLOATS = ("f32", "bf16")


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A variable: its named dimensions in order, and its type.

    Attributes:
        var: the variable.
        dims: names and sizes, in the order of the plain array's dimensions.
        dtype: "f32", "bf16", "i32" or "bool".
        below: of positions: all are at least 0 and below this.
    """

    var: str
    dims: Dims
    dtype: str = "f32"
    below: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dims)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.dims)

    def axis(self, name: str) -> int:
        """The position of a name."""
        return self.names.index(name)

    def like(self, other: "Value") -> bool:
        """Whether one can stand where the other does."""
        return (self.dims, self.dtype) == (other.dims, other.dtype) and (
            not other.below or 0 < self.below <= other.below
        )


def without(dims: Dims, *names: str) -> Dims:
    """The dimensions without some."""
    return tuple(dim for dim in dims if dim[0] not in names)


def written(items) -> str:
    """Items as a Python tuple, `(1, 2)` or `(1,)`."""
    items = [str(item) for item in items]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def axes_text(dims: Dims) -> str:
    """Dimensions as creation takes them, `{"batch": 4}`."""
    return "{" + ", ".join(f'"{name}": {size}' for name, size in dims) + "}"


def ordered(value: Value, names) -> str:
    """The plain text of a value with its dimensions in the given order."""
    order = [value.axis(name) for name in names]
    return value.var if order == sorted(order) else f"jnp.transpose({value.var}, {written(order)})"


def aligned(value: Value, names) -> str:
    """The plain text of a value that broadcasts against the given names: its own in order, size 1 for the others."""
    text = ordered(value, [name for name in names if name in value.names])
    if value.names and len(value.names) < len(names):
        text += "[" + ", ".join(":" if name in value.names else "None" for name in names) + "]"
    return text


@dataclasses.dataclass(frozen=True, slots=True)
class Statement:
    """One step of a program.

    Attributes:
        kind: what it does, for the counts.
        results: the variables that it sets.
        ours, plain: its lines.
        functions: defined just before it, and called by it.
    """

    kind: str
    results: tuple[Value, ...]
    ours: tuple[str, ...]
    plain: tuple[str, ...]
    functions: tuple["Function", ...] = ()

    def lines(self, ours: bool) -> list[str]:
        defined = [line for function in self.functions for line in function.lines(ours)]
        return [*defined, *(self.ours if ours else self.plain)]

    def uses(self) -> set[str]:
        """The variables that it reads."""
        found = {var for line in (*self.ours, *self.plain) for var in VARIABLE.findall(line)}
        for function in self.functions:
            found |= function.uses()
        return found - {value.var for value in self.results}

    def substitute(self, old: str, new: str) -> "Statement":
        """With one variable read in the place of another."""
        change = lambda lines: tuple(re.sub(rf"\b{old}\b", new, line) for line in lines)
        functions = tuple(function.substitute(old, new) for function in self.functions)
        return dataclasses.replace(self, ours=change(self.ours), plain=change(self.plain), functions=functions)

    def kinds(self) -> list[str]:
        """Its kind, and those of the steps inside."""
        return [self.kind, *(kind for f in self.functions for step in f.statements for kind in step.kinds())]


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function inside a program; it may also read variables from around it.

    Attributes:
        loss: it returns the sum of the squares of what it would return, for a gradient.
    """

    name: str
    params: tuple[Value, ...]
    statements: tuple[Statement, ...]
    returns: tuple[Value, ...]
    loss: bool = False

    def lines(self, ours: bool) -> list[str]:
        inside = [line for statement in self.statements for line in statement.lines(ours)]
        result = squares(self.returns, ours) if self.loss else ", ".join(value.var for value in self.returns)
        head = f"def {self.name}({', '.join(value.var for value in self.params)}):"
        return [head, *(f"    {line}" for line in (*inside, f"return {result}"))]

    def uses(self) -> set[str]:
        found = {value.var for value in self.returns}.union(*(s.uses() for s in self.statements))
        return found - self.defined()

    def defined(self) -> set[str]:
        return {v.var for v in self.params}.union(*({v.var for v in s.results} for s in self.statements))

    def substitute(self, old: str, new: str) -> "Function":
        statements = tuple(statement.substitute(old, new) for statement in self.statements)
        returns = tuple(dataclasses.replace(v, var=new) if v.var == old else v for v in self.returns)
        return dataclasses.replace(self, statements=statements, returns=returns)


def squares(values: tuple[Value, ...], ours: bool) -> str:
    """A scalar in which every float of these values counts."""
    wide = {"f32": "{0}", "bf16": "{0}.astype(jnp.float32)"}
    floats = [wide[v.dtype].format(v.var) for v in values if v.dtype in FLOATS]
    if not floats:
        return "jnp.float32(0)"
    total = " + ".join(f"({text} * {text}).sum()" for text in floats)
    return f"({total}).array" if ours else total


def pruned(statements: tuple[Statement, ...], wanted: set[str]) -> tuple[Statement, ...]:
    """The statements that the wanted variables need, and those inside their functions that their results need."""
    kept: list[Statement] = []
    for statement in reversed(statements):
        # A statement without results changes a variable in place.
        changed = {value.var for value in statement.results} or {line.split(" = ")[0] for line in statement.ours}
        if not wanted & changed:
            continue
        functions = tuple(
            dataclasses.replace(f, statements=pruned(f.statements, {v.var for v in f.returns}))
            for f in statement.functions
        )
        statement = dataclasses.replace(statement, functions=functions)
        kept.append(statement)
        wanted = wanted | statement.uses()
    return tuple(reversed(kept))
