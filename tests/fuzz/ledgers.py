"""The ledger of a case, held against the collectives of the compiled program."""

import dataclasses
from collections.abc import Mapping

import jax

from trellis.inspect import Ledger, collectives, compare, ledger
from trellis.inspect.rows import wire_bytes

from .case import Case
from .running import Outcome, prepared


def check(case: Case) -> Outcome:
    """Holds the ledger, made under `jit`, against the compiled program: bytes by kind and mesh axis.

    The ledger says what the program asks for. XLA's partitioner may go another way to the same sharding: over other
    mesh axes of the same size, once for each of two equal reshards, or, as it warns itself, by gathering a whole
    array. That is "other moves". It is a failure where only one of the two moves anything, and every
    argument is on the mesh: where the compiler has one that is not, no type says.
    """
    try:
        predicted, found = _tables(case)
    except Exception as error:
        return Outcome("ledger", f"{type(error).__name__}: {error}", type(error).__name__)
    comparison = compare(predicted, found, scatter_as_reduce=True)
    if comparison.agrees():
        return Outcome("right")
    moved = [sum(row.wire * row.times for row in table.rows) for table in (predicted, found)]
    return Outcome(
        "other moves" if all(moved) or _outside(case) else "ledger", f"{predicted}\n{found}\n{comparison}", "bytes"
    )


def _outside(case: Case) -> bool:
    return any("tr.shard" not in x.placing and "tr.from_numpy" not in x.placing for x in case.inputs)


def _tables(case: Case) -> tuple[Ledger, Ledger]:
    """The ledger of a case, and that of its compiled program."""
    with prepared(case) as space:
        fn = eval(case.wrapped("ours", "eager"), space)
        args = [space[x.value.var] for x in case.inputs]
        predicted = ledger(jax.jit(fn), *args)
        # What is the same in each turn of a loop the compiler may do once: the ledger counts what the program says.
        options = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
        found = collectives(jax.jit(fn).lower(*args).compile(options), space["mesh"])
    return _one_by_one(predicted, found.mesh), _one_by_one(found, found.mesh)


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
