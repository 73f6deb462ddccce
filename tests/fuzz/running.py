"""Runs a case and says what came of it."""

import contextlib
import dataclasses
import linecache
import math
import re
import traceback
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

import trellis as tr
from trellis.errors import TrellisError
from trellis.named import NamedArray
from trellis.notation.state import state_of

from .case import Case

TOLERANCE = 3e-4
FAILURES = ("wrong", "not proven", "unknown", "foreign", "accepted", "refused", "ledger", "hang", "crash")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case.

    Attributes:
        what: "right"; "other moves", right, where the compiled program moves something else than the ledger says;
            "kept out", refused as it is to be; "unsteady", wrong, but so sensitive to rounding that the
            plain program differs, too, when its inputs do in the last place; or a failure: "wrong", "foreign" (an error
            that is not ours), "accepted" (a broken program that ran), "refused" (a program that breaks no rule),
            "ledger" (other bytes than in the compiled program), "not proven" (wrong as another compiler makes it),
            "unknown" (what it makes is not understood), "hang", "crash".
        detail: the error, or where values differ.
        rule: of an error, its kind and first words, without names and numbers.
    """

    what: str
    detail: str = ""
    rule: str = ""

    @property
    def failed(self) -> bool:
        return self.what in FAILURES

    def like(self, other: "Outcome") -> bool:
        """Whether both show one mistake."""
        return (self.what, self.rule) == (other.what, other.rule)


@contextlib.contextmanager
def prepared(case: Case) -> Iterator[dict]:
    """The case's functions, and its arguments where they are to be, in the context that it runs in."""
    space: dict = {"__name__": f"seed_{case.seed}"}
    _run(case.plain_text(), case, space)
    _run(case.ours_text(), case, space)
    outside, inside = case.placing()
    _run("\n".join(outside), case, space)
    with eval(case.setting.text(), space):
        _run("\n".join(inside), case, space)
        yield space


def _run(text: str, case: Case, space: dict) -> None:
    """Runs a text whose lines tracebacks and messages can show."""
    name = f"<seed {case.seed}, {zlib.crc32(text.encode()):x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), space)


def run(case: Case) -> Outcome:
    """Runs the plain program, and ours."""
    space, expected = ({}, None) if case.must else meant(case)
    try:
        got = _run_ours(case)
    except Exception as error:
        return _refused(error, case)
    if case.must:
        return Outcome("accepted", f"{case.broken}: not refused", case.broken)
    outcome = _compare(got, expected, case)
    if outcome.rule == "value":
        # XLA compiles some plain programs wrongly: the one that is not compiled is the judge.
        with jax.disable_jit():
            expected = jax.tree.map(np.asarray, eval(case.plain_call(), space))
        outcome = _compare(got, expected, case)
    if outcome.rule == "value" and not steady(case, space, expected):
        return Outcome("unsteady", outcome.detail)
    return outcome


def meant(case: Case) -> tuple[dict, Any]:
    """The plain program's functions and arguments, and its results, as numpy arrays."""
    space: dict = {}
    _run(case.plain_text(), case, space)
    return space, jax.tree.map(np.asarray, eval(case.plain_call(), space))


def steady(case: Case, space: dict, expected: Any) -> bool:
    """Whether the plain program gives nearly the same where its inputs differ by a rounding error, in each of 16 tries.

    The sign of a sum of nothing, or a derivative where a tanh is nearly 1, changes in some of them only. Weights of a
    softmax differ, too: the gradient of one that is 1 is zero by JAX's formula, and a rounding error by another.
    """
    given = {x.value.var: space[x.value.var] for x in case.inputs}
    error, tolerance = (8e-3, TOLERANCE / 3) if case.rounded else (3e-7, TOLERANCE / 10)
    for attempt in range(16):
        rng = np.random.default_rng([case.seed, attempt])
        for var, value in given.items():
            if value.dtype.kind == "f":
                space[var] = value * (1 + error * rng.choice([-1, 1], size=value.shape)).astype(np.float32)
        with mock.patch.object(jax.nn, "softmax", _softmax(error if attempt % 2 else -error)):
            shaken = jax.tree.map(np.asarray, eval(case.plain_call(), space))
        if _compare(shaken, expected, case, tolerance).what != "right":
            return False
    return True


def _softmax(error: float):
    """`jax.nn.softmax` whose weights differ by a rounding error of their scores."""

    def softmax(x, axis=-1):
        return jax.numpy.exp(x - jax.nn.logsumexp(x, axis, keepdims=True) * (1 + error))

    return softmax


def _run_ours(case: Case):
    """What our program gives, as numpy arrays."""
    with prepared(case) as space:
        args = [space[x.value.var] for x in case.inputs]
        fn = eval(case.wrapped("ours", case.run), space)
        if not case.late and case.earlier is None:
            got = fn(*args)
            if case.setting.mode == "explicit" and not case.broken:
                _check_places(got, case, space)
            return _plain(got, case)
    if case.late:
        return _plain(fn(*args), case)
    with eval(case.earlier.text(), space):
        try:
            fn(*args)
        except Exception:  # the other layout need not be one that it runs on
            return _plain(_again(case, space, args), case)
    with eval(case.setting.text(), space):
        got = fn(*args)
    types = [[str(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)] for tree in (got, _again(case, space, args))]
    if types[0] != types[1]:
        raise StaleLayout(f"results {types[0]} are those of another layout; alone they are {types[1]}")
    return _plain(got, case)


def _again(case: Case, space: dict, args):
    """The results of the same program, which nothing has run before."""
    _run(case.ours_text(), case, fresh := {**space})
    with eval(case.setting.text(), fresh):
        return eval(case.wrapped("ours", case.run), fresh)(*args)


def _check_places(got, case: Case, space: dict) -> None:
    """Products come out where the layout puts their names, wherever their operands were."""
    layout = eval(case.setting.text(), space)
    made = {v.var for s in case.statements if s.kind == "product" for v in s.results}
    named = [x for x in jax.tree.leaves(got, is_leaf=_is_named) if _is_named(x)]
    for value, x in zip(case.outputs, named, strict=False):
        held = state_of(x.array)
        if value.var in made and value.dims and (held.mode != "explicit" or held.axes != layout.assign(x.names)):
            raise WrongPlace(f"a product is {tr.typeof(x)}, and the layout has {layout.assign(x.names)}")


class WrongPlace(Exception):
    """A product that is not where the layout puts its names."""


class StaleLayout(Exception):
    """A result as another layout, under which the program ran before, would have it."""


def _plain(tree, case: Case):
    """Numpy arrays in the place of named ones, after their names were checked."""
    if case.manual or (case.broken and case.derivative == "none"):
        return jax.tree.map(lambda x: np.asarray(x.array if _is_named(x) else x), tree, is_leaf=_is_named)
    names = _names(case)
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_named)
    named = [leaf for leaf in leaves if isinstance(leaf, NamedArray)]
    for leaf, value in zip(named, names, strict=True):
        if leaf.names != value:
            raise WrongNames(f"names {leaf.names} where {value} were expected")
    arrays = [leaf.array if isinstance(leaf, NamedArray) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, [np.asarray(array) for array in arrays])


def _is_named(x) -> bool:
    return isinstance(x, NamedArray)


class WrongNames(Exception):
    """A result with other names, or in another order, than the rules give."""


def _names(case: Case) -> list[tuple[str, ...]]:
    outputs = [v.names for v in case.outputs]
    moved = [case.inputs[i].value.names for i in case.floats()]
    match case.derivative:
        case "reverse":
            return [*outputs, *moved]
        case "forward":
            return [*outputs, *outputs]
    return outputs


def own(error: BaseException) -> bool:
    """Whether an error is one of Trellis's, with the values seen and the fix."""
    text = str(error)
    return isinstance(error, TrellisError) and (
        "  fix:" in text or (": " in text and (", got " in text or ", in " in text))
    )


# What a layout may refuse of a program that breaks no rule.
LEGAL = re.compile(
    r"must be divisible by the mesh axes that slice it|strict|pipeline|JAX can map an operation over slices|"
    r"JAX cannot map an operation on copies|pending sums and copies need explicit mesh axes|"
    r"a mapped function can only read arrays that are whole|kv_heads must be sharded like heads"
)


def _refused(error: Exception, case: Case) -> Outcome:
    text = str(error)
    words = re.sub(r"\x1b\[[0-9;]*m", "", text.split("\n")[0])
    rule = f"{type(error).__name__}: {re.split(r', got |: ', words)[0][:90]}"
    rule = re.sub(r"'[^']*'|\d+|\b[xhf]\d+", "_", rule)
    if isinstance(error, WrongNames | StaleLayout | WrongPlace):
        return Outcome("wrong", text, type(error).__name__)
    if case.broken == "jax.numpy on partial sums" and re.search("unreduced|U:", text):
        return Outcome("kept out", text, "JAX: " + rule)
    if "held(" in case.ours_text():  # the gradient of copies is a partial sum, also to jax.numpy and np.asarray
        if isinstance(error, tr.PendingSumError):
            return Outcome("kept out", text, rule)
        if "unreduced" in text and ("jax.tree.map(jnp." in case.ours_text() or "device_indices_map" in text):
            return Outcome("kept out", text, "JAX: " + rule)
    if case.broken == "not by name" and "of all xs should be replicated" in text:  # of jax.lax.scan, before it calls us
        return Outcome("kept out", text, "JAX: " + rule)
    if (
        case.broken == "another mesh" and "enter your `jit` into a mesh context" in text
    ):  # of jax.jit, after all is traced
        return Outcome("kept out", text, "JAX: " + rule)
    if not own(error):
        where = [f for f in traceback.extract_tb(error.__traceback__) if "/src/trellis/" in f.filename]
        if where:
            rule += f" [{where[-1].filename.split('/src/trellis/')[1]} {where[-1].name}]"
        return Outcome("foreign", f"{type(error).__name__}: {text[:1500]}", rule)
    if case.broken or LEGAL.search(text) or (case.manual and case.named):
        return Outcome("kept out", text, rule)
    return Outcome("refused", f"{type(error).__name__}: {text}", rule)


def _compare(got, expected, case: Case, tolerance: float = TOLERANCE) -> Outcome:
    mine, theirs = jax.tree.leaves(got), jax.tree.leaves(expected)
    if case.derivative == "forward":  # tangents of integers have no values
        keep = [i for i, leaf in enumerate(theirs) if leaf.dtype != jax.dtypes.float0]
        mine, theirs = [mine[i] for i in keep], [theirs[i] for i in keep]
    if len(mine) != len(theirs):
        return Outcome("wrong", f"{len(mine)} results, expected {len(theirs)}", "results")
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if str(b.dtype) == "bfloat16" and str(a.dtype) == "bfloat16":
            a, b = a.astype(np.float32), b.astype(np.float32)
        if a.shape != b.shape or a.dtype != b.dtype:
            return Outcome("wrong", f"result {i} is {a.dtype}{a.shape}, expected {b.dtype}{b.shape}", "shape")
        if b.dtype.kind == "f":
            if not np.isfinite(b).all():
                if (np.isfinite(a) != np.isfinite(b)).any():
                    return Outcome("wrong", f"result {i}: {a}\nexpected {b}", "value")
                continue
            if case.rounded:
                if np.linalg.norm(a - b) > tolerance / TOLERANCE * (0.15 * np.linalg.norm(b) + 0.05):
                    return Outcome("wrong", f"result {i}, in bfloat16:\n{a}\nexpected\n{b}", "value")
                continue
            scale = float(np.max(np.abs(b), initial=0.0))
            off = float(np.max(np.abs(a - b), initial=0.0)) if np.isfinite(a).all() else math.inf
            if not off <= tolerance * (scale + 0.03):
                return Outcome("wrong", f"result {i} is off by {off:.3g} of {scale:.3g}:\n{a}\nexpected\n{b}", "value")
        elif not np.array_equal(a, b):
            return Outcome("wrong", f"result {i}:\n{a}\nexpected\n{b}", "value")
    return Outcome("right")
