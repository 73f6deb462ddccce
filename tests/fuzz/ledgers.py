"""The ledger of a case, held against the collectives of the compiled program."""

import jax

from trellis.inspect import collectives, compare, ledger

from .case import Case
from .running import Outcome, prepared


def check(case: Case) -> Outcome:
    """Whether the ledger, made under `jit`, has the bytes and kinds of the compiled program on every mesh axis."""
    with prepared(case) as space:
        fn = eval(case.wrapped("ours", "eager"), space)
        args = [space[x.value.var] for x in case.inputs]
        predicted = ledger(jax.jit(fn), *args)
        found = collectives(jax.jit(fn).lower(*args).compile(), space["mesh"])
    comparison = compare(predicted, found, scatter_as_reduce=True)
    if comparison.agrees():
        return Outcome("right")
    return Outcome("ledger", f"{predicted}\n{found}\n{comparison}", "ledger")
