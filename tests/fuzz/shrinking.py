"""Makes a failing case small: fewer statements, outputs, inputs and mesh axes, with the same failure."""

import dataclasses
import time
from collections.abc import Callable, Iterator

from .case import Case, Input
from .program import Function, Statement, Value
from .running import Outcome


def shrink(case: Case, outcome: Outcome, again: Callable[[Case], Outcome], seconds: float = 120.0) -> Case:
    """The smallest case found, in so many seconds, that fails alike when it is run again."""
    end = time.monotonic() + seconds
    found = True
    while found and time.monotonic() < end:
        found = False
        for smaller in candidates(case):
            if time.monotonic() > end:
                break
            try:
                alike = again(smaller).like(outcome)
            except Exception:  # a candidate that is no program
                continue
            if alike:
                case, found = smaller, True
                break
    return case


def candidates(case: Case) -> Iterator[Case]:
    """Cases with a little less in them, those with much less first."""
    for smaller in _candidates(case):
        try:
            smaller = smaller.pruned()
        except ValueError:
            continue
        if smaller != case:
            yield smaller if smaller.floats() else dataclasses.replace(smaller, derivative="none")


def _candidates(case: Case) -> Iterator[Case]:
    if len(case.outputs) > 1:
        for i in range(len(case.outputs)):
            yield _with_outputs(case, (i,))
    if case.derivative != "none":
        yield dataclasses.replace(case, derivative="none")
    if not case.broken and not case.manual:
        made = [v for s in case.statements for v in s.results]
        for value in made:
            if (value,) != case.outputs:
                yield dataclasses.replace(case, outputs=(value,))
    yield from _promoted(case)
    yield from _substituted(case)
    for setting in case.setting.simpler():
        yield dataclasses.replace(case, setting=setting)
    if case.run != "eager":
        yield dataclasses.replace(case, run="eager")
    if case.run == "tr.named_jit":
        yield dataclasses.replace(case, run="jax.jit")
    if not case.manual:
        for i, x in enumerate(case.inputs):
            simple = f'tr.shard(tr.named({x.value.var}, "{" ".join(x.value.names)}"), "compute")'
            if case.setting.mode in ("explicit", "auto") and x.placing != simple:
                yield dataclasses.replace(
                    case, inputs=(*case.inputs[:i], Input(x.value, simple), *case.inputs[i + 1 :])
                )


def _with_outputs(case: Case, kept: tuple[int, ...]) -> Case:
    annotations = case.annotations
    if annotations is not None:
        annotations = (annotations[0], tuple(annotations[1][i] for i in kept))
    return dataclasses.replace(case, outputs=tuple(case.outputs[i] for i in kept), annotations=annotations)


def _promoted(case: Case) -> Iterator[Case]:
    """With a result as an argument of its own, so that what made it goes."""
    if case.manual:
        return
    for i in reversed(range(len(case.statements))):
        for value in case.statements[i].results:
            if value in case.outputs or (value.dtype == "i32" and not value.below):
                continue
            names = f'tr.named({value.var}, "{" ".join(value.names)}")'
            placing = f'tr.shard({names}, "compute")' if case.setting.mode in ("explicit", "auto") else names
            rest = case.statements[i + 1 :]
            if len(case.statements[i].results) == 1:
                statements = (*case.statements[:i], *rest)
                yield dataclasses.replace(case, inputs=(*case.inputs, Input(value, placing)), statements=statements)


def _substituted(case: Case) -> Iterator[Case]:
    """With an earlier variable of the same type in the place of another, and functions without their results."""
    seen: list[Value] = [x.value for x in case.inputs]
    for i, statement in enumerate(case.statements):
        for old in statement.results:
            for new in seen:
                if new.like(old) and not case.manual:
                    rest = tuple(s.substitute(old.var, new.var) for s in case.statements[i + 1 :])
                    outputs = tuple(new if v == old else v for v in case.outputs)
                    yield dataclasses.replace(
                        case, statements=(*case.statements[:i], statement, *rest), outputs=outputs
                    )
        for smaller in _statements(statement, seen):
            yield dataclasses.replace(case, statements=(*case.statements[:i], smaller, *case.statements[i + 1 :]))
        seen += statement.results


def _statements(statement: Statement, seen: list[Value]) -> Iterator[Statement]:
    for i, function in enumerate(statement.functions):
        for smaller in _functions(function, seen):
            functions = (*statement.functions[:i], smaller, *statement.functions[i + 1 :])
            yield dataclasses.replace(statement, functions=functions)


def _functions(function: Function, seen: list[Value]) -> Iterator[Function]:
    seen = [*seen, *function.params]
    for i, statement in enumerate(function.statements):
        for old in statement.results:
            for new in seen:
                if new.like(old):
                    rest = tuple(s.substitute(old.var, new.var) for s in function.statements[i + 1 :])
                    returns = tuple(new if v == old else v for v in function.returns)
                    kept = function.statements[:i] if len(statement.results) == 1 else function.statements[: i + 1]
                    yield dataclasses.replace(function, statements=(*kept, *rest), returns=returns)
        for smaller in _statements(statement, seen):
            statements = (*function.statements[:i], smaller, *function.statements[i + 1 :])
            yield dataclasses.replace(function, statements=statements)
        seen = [*seen, *statement.results]
