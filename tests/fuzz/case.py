"""A case: a program with its inputs, where it runs and how, and what is to come of it, as text that runs on its own."""

import dataclasses
from collections.abc import Sequence

from .layouts import MOST, Setting
from .program import Function, Statement, Value, pruned, squares

HEADER = """\
import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import trellis as tr
from tests.fuzz.copies import held
from trellis import bf16, bool_, f32, i32, nn
from trellis.named import saving
"""

ALONE = """
jax.config.update("jax_num_cpu_devices", {devices})
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """An argument, and the text that puts it where it is when the program starts."""

    value: Value
    placing: str
    outside: bool = False  # made before the layout is entered

    def drawn(self) -> str:
        """The text that makes its values."""
        v = self.value
        match v.dtype:
            case "f32":
                return f"{v.var} = rng.normal(size={v.shape}).astype(np.float32)"
            case "i32":
                return f"{v.var} = rng.integers(0, {max(v.below, 1)}, size={v.shape}).astype(np.int32)"
        return f"{v.var} = rng.random(size={v.shape}) < 0.5"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        seed: what it was drawn from.
        setting: where it runs.
        inputs, statements, outputs: the program.
        run: "eager", "jax.jit" or "tr.named_jit".
        derivative: "none", "reverse" or "forward".
        broken: the rule that it breaks, empty for none.
        must: of a broken one: it must be refused; else it may also be right.
        annotations: manual mode: the types of the arguments and of the results.
        axes: manual mode: the arguments of `shard_map`.
        earlier: a layout on the same mesh under which it has run before.
        late: it runs after its layout has been left.
    """

    seed: int
    setting: Setting
    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[Value, ...]
    run: str = "jax.jit"
    derivative: str = "none"
    broken: str = ""
    must: bool = False
    annotations: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    axes: str = ""
    earlier: Setting | None = None
    late: bool = False

    @property
    def manual(self) -> bool:
        return self.annotations is not None

    @property
    def named(self) -> bool:
        """Whether the arguments are named arrays."""
        return any("tr.named" in x.placing or "tr.from_numpy" in x.placing for x in self.inputs)

    def floats(self) -> list[int]:
        """The positions of the arguments that derivatives are taken by."""
        return [i for i, x in enumerate(self.inputs) if x.value.dtype == "f32"]

    @property
    def rounded(self) -> bool:
        """Whether some of it is in bfloat16."""
        return any("bfloat16" in line for statement in self.statements for line in statement.lines(True))

    def kinds(self) -> set[str]:
        return {kind for statement in self.statements for kind in statement.kinds()}

    def pruned(self) -> "Case":
        """Without statements and inputs that no output needs."""
        statements = pruned(self.statements, {v.var for v in self.outputs})
        used = {v.var for v in self.outputs}.union(*(s.uses() for s in statements))
        kept = [i for i, x in enumerate(self.inputs) if x.value.var in used]
        annotations = self.annotations
        if annotations is not None:
            annotations = (tuple(annotations[0][i] for i in kept), annotations[1])
        inputs = tuple(self.inputs[i] for i in kept)
        return dataclasses.replace(self, inputs=inputs, statements=statements, annotations=annotations)

    # The text.

    def plain_text(self) -> str:
        """The inputs and the plain program."""
        names = ", ".join(x.value.var for x in self.inputs)
        seed = [f"rng = np.random.default_rng({self.seed})", *(x.drawn() for x in self.inputs)]
        plain = [f"def plain({names}):", *self._body(ours=False), ""]
        forward = ["", self.forward()] if self.derivative == "forward" else []
        return "\n".join((HEADER, *seed, "", "", *plain, *forward))

    def ours_text(self) -> str:
        """The mesh and our program."""
        return "\n".join((*self._ours(", ".join(x.value.var for x in self.inputs)), ""))

    def _hoisted(self) -> list[Function]:
        """Functions that are one object in all runs: what is cached by them is found again."""
        if self.earlier is None:
            return []
        return [f for statement in self.statements for f in statement.functions if not f.uses()]

    def _body(self, *, ours: bool, hoisted: Sequence[Function] = ()) -> list[str]:
        inside = [
            dataclasses.replace(s, functions=tuple(f for f in s.functions if f not in hoisted)) for s in self.statements
        ]
        lines = [line for statement in inside for line in statement.lines(ours)]
        outputs = ", ".join(v.var for v in self.outputs) + ("," if len(self.outputs) == 1 else "")
        lines.append(f"return {self._loss(ours)}({outputs})")
        return [f"    {line}" for line in lines]

    def _loss(self, ours: bool) -> str:
        return f"{squares(self.outputs, ours and self.named)}, " if self.derivative == "reverse" else ""

    def _ours(self, names: str) -> list[str]:
        mesh = f"mesh = {self.setting.mesh_text()}"
        if not self.manual:
            hoisted = self._hoisted()
            defined = [line for f in hoisted for line in (*f.lines(True), "", "")]
            return [mesh, "", "", *defined, f"def ours({names}):", *self._body(ours=True, hoisted=hoisted)]
        params, results = self.annotations
        typed = ", ".join(f"{x.value.var}: {t}" for x, t in zip(self.inputs, params, strict=True))
        outputs = ", ".join(v.var for v in self.outputs) + ("," if len(self.outputs) == 1 else "")
        lines = [line for statement in self.statements for line in statement.lines(True)]
        return [
            mesh, "", "",
            f"@tr.shard_map{self.axes}",
            f"def slices({typed}) -> tuple[{', '.join(results)}]:",
            *(f"    {line}" for line in lines),
            f"    return ({outputs})",
            "", "",
            f"def ours({names}):",
            f"    {outputs} = slices({names})",
            f"    return {self._loss(True)}({outputs})",
        ]  # fmt: skip

    def placing(self) -> tuple[list[str], list[str]]:
        """The lines that place the inputs before the context is entered, and inside it."""
        lines = ([], [])
        for x in self.inputs:
            if x.placing:
                lines[not x.outside].append(f"{x.value.var} = {x.placing}")
        return lines

    def call(self) -> str:
        """The expression that runs our program on its arguments."""
        names = ", ".join(x.value.var for x in self.inputs)
        return f"{self.wrapped('ours', self.run)}({names})"

    def plain_call(self) -> str:
        names = ", ".join(x.value.var for x in self.inputs)
        return f"{self.wrapped('plain', 'jax.jit')}({names})"

    def wrapped(self, fn: str, run: str) -> str:
        """A function's text with the derivative and the compilation around it."""
        by = tuple(self.floats())
        if self.derivative == "reverse":
            fn = f"jax.value_and_grad({fn}, argnums={by}, has_aux=True)"
        elif self.derivative == "forward":
            fn = f"forward({fn})"
        return fn if run == "eager" else f"{run}({fn})"

    def forward(self) -> str:
        """The function that takes a derivative forward, along their hyperbolic tangents."""
        names = [x.value.var for x in self.inputs]
        moving = ", ".join(names[i] for i in self.floats())
        tangents = ", ".join(f"jax.tree.map(jnp.tanh, {names[i]})" for i in self.floats())
        comma = "," if len(self.floats()) == 1 else ""
        return "\n".join(
            (
                "def forward(fn):",
                f"    def run({', '.join(names)}):",
                f"        of = lambda {moving}: fn({', '.join(names)})",
                f"        return jax.jvp(of, ({moving}{comma}), ({tangents}{comma}))",
                "",
                "    return run",
                "",
            )
        )

    def text(self, what: str = "") -> str:
        """A program that shows the case, to be pasted."""
        outside, inside = self.placing()
        head = [f"# Seed {self.seed}" + (f", which breaks a rule: {self.broken}." if self.broken else ".")]
        head += [f"# {line}".rstrip() for line in what.splitlines()]
        alone = ALONE.format(devices=MOST if self.setting.devices > 8 else 8)
        definitions = self.plain_text().replace(HEADER, HEADER + alone) + "\n\n" + self.ours_text()
        show = ["print(jax.tree.map(np.asarray, got))"]
        names = ", ".join(x.value.var for x in self.inputs)
        run = [f"    got = {self.call()}"]
        if self.late:
            run = [f"got = {self.call()}"]
        if self.earlier is not None:
            run = [
                f"fn = {self.wrapped('ours', self.run)}",
                f"with {self.earlier.text()}:",
                f"    fn({names})",
                f"with {self.setting.text()}:",
                f"    got = fn({names})",
            ]
            show.append("print(jax.tree.map(tr.typeof, got))")
        if not inside:
            inside = ["pass"]
        end = [] if self.must else [f"expected = {self.plain_call()}", "print(expected)"]
        return "\n".join(
            (
                *head, definitions, "", *end, *outside,
                f"with {self.setting.text()}:",
                *(f"    {line}" for line in inside),
                *run, *show,
                "",
            )
        )  # fmt: skip
