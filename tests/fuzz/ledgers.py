"""The ledger of a case, held against the collectives of the compiled program."""

import dataclasses
import math
from collections.abc import Mapping

import jax

from trellis.inspect import Ledger, collectives, compare
from trellis.inspect.ledger import _Rows, ledger_of
from trellis.inspect.moved import Moved
from trellis.inspect.rows import wire_bytes
from trellis.program import trace

from .case import Case
from .layouts import MOST
from .running import Outcome, prepared

UNIT = math.lcm(*range(1, MOST + 1))


def check(case: Case) -> Outcome:
    """Holds the ledger, made under `jit`, against the compiled program: bytes by kind and mesh axis.

    The ledger says what the program asks for: equal values once, and of a condition the branch that moves most. The
    CPU's compiler merges only some equal values, and its program has all branches: it may have as much as a ledger of
    every operation and every branch. XLA's partitioner may also go another way to the same sharding: over other mesh
    axes of the same size, or, as it warns itself, by gathering a whole array, and it moves no constants. That is
    "other moves". It is a failure where the ledger says that nothing moves and something does, and every argument is
    on the mesh: where the compiler has one that is not, no type says.
    """
    try:
        least, most, found = _tables(case)
    except Exception as error:
        return Outcome("ledger", f"{type(error).__name__}: {error}", type(error).__name__)
    low, high, compiled = (_exact(table, found.mesh) for table in (least, most, found))
    bounds = compare(high, compiled, scatter_as_reduce=True).kinds
    between = compare(low, compiled, scatter_as_reduce=True).kinds
    if all(fewest <= moved <= bounds[key][0] for key, (fewest, moved) in between.items()):
        return Outcome("right")
    said = any(row.total for row in least.rows)
    comparison = compare(least, found, scatter_as_reduce=True)
    return Outcome("other moves" if said or _outside(case) else "ledger", f"{least}\n{found}\n{comparison}", "bytes")


def _outside(case: Case) -> bool:
    return any("tr.shard" not in x.placing and "tr.from_numpy" not in x.placing for x in case.inputs)


def _tables(case: Case) -> tuple[Ledger, Ledger, Ledger]:
    """The ledger of a case, that of every operation and every branch, and that of its compiled program."""
    with prepared(case) as space:
        fn = eval(case.wrapped("ours", "eager"), space)
        args = [space[x.value.var] for x in case.inputs]
        program = trace(jax.jit(fn), *args)
        least = ledger_of(program)
        most = Ledger(tuple(_Most(program).of(program)), program.mesh)
        # What is the same in each turn of a loop the compiler may do once: the ledger counts what the program says.
        options = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
        found = collectives(jax.jit(fn).lower(*args).compile(options), space["mesh"])
    return least, most, found


class _Most(_Rows):
    """Every operation's, also of equal ones, and those of all branches."""

    def __init__(self, program):
        super().__init__(program, None, Moved(program))
        self.implied.states.again = lambda operation: False

    def operation(self, operation):
        if operation.name == "cond":
            return (row for body in operation.bodies for row in self.of(body))
        return super().operation(operation)


def _exact(table: Ledger, mesh: Mapping[str, int]) -> Ledger:
    """In bytes that no number of devices leaves a fraction of, however many arrays XLA moves together, with one
    all-reduce over each mesh axis in the place of a joint one: XLA writes either."""
    rows = []
    for row in table.rows:
        axes = [a for a in row.axes if mesh.get(a, 2) > 1]
        joint = row.kind in ("all-reduce", "reduce-scatter") and len(axes) > 1
        # Which of several copies a permute sends is XLA's affair.
        for over in [(a,) for a in axes] if joint else [("any",) if row.kind == "permute" else row.axes]:
            kind, payload = "all-reduce" if joint else row.kind, UNIT * row.payload
            wire = wire_bytes(kind, math.prod(mesh[a] for a in over), payload) if set(over) <= set(mesh) else payload
            rows.append(dataclasses.replace(row, kind=kind, axes=over, payload=payload, wire=wire))
    return dataclasses.replace(table, rows=tuple(rows))
