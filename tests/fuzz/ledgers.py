"""The ledger of a case, held against the collectives of the compiled program."""

import dataclasses
from collections.abc import Mapping

import jax

from trellis.inspect import Ledger, collectives, compare, ledger
from trellis.inspect.compiled import Comparison
from trellis.inspect.rows import wire_bytes

from .case import Case
from .running import Outcome, prepared


def check(case: Case) -> Outcome:
    """Whether the ledger, made under `jit`, has the bytes and kinds of the compiled program on every mesh axis."""
    try:
        comparison, tables = _compared(case)
    except Exception as error:
        return Outcome("ledger", f"{type(error).__name__}: {error}", type(error).__name__)
    return Outcome("right") if comparison.agrees() else Outcome("ledger", f"{tables}\n{comparison}", "bytes")


def _compared(case: Case) -> tuple[Comparison, str]:
    """Bytes by the ledger and in the compiled program, and both tables."""
    with prepared(case) as space:
        fn = eval(case.wrapped("ours", "eager"), space)
        args = [space[x.value.var] for x in case.inputs]
        predicted = ledger(jax.jit(fn), *args)
        found = collectives(jax.jit(fn).lower(*args).compile(), space["mesh"])
    comparison = compare(_one_by_one(predicted, found.mesh), _one_by_one(found, found.mesh), scatter_as_reduce=True)
    return comparison, f"{predicted}\n{found}"


def _one_by_one(table: Ledger, mesh: Mapping[str, int]) -> Ledger:
    """With one all-reduce over each mesh axis in the place of a joint one: XLA writes either."""
    rows = []
    for row in table.rows:
        axes = [a for a in row.axes if mesh[a] > 1]
        if row.kind in ("all-reduce", "reduce-scatter") and len(axes) > 1:
            wire = lambda axis, row=row: wire_bytes("all-reduce", mesh[axis], row.payload)
            rows += [dataclasses.replace(row, kind="all-reduce", axes=(a,), wire=wire(a)) for a in axes]
        else:
            rows.append(row)
    return dataclasses.replace(table, rows=tuple(rows))
