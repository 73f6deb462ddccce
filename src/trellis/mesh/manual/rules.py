"""Backward rules of one's own in a manual program, checked where somebody differentiates it from outside.

The gradient of a call of `shard_map` is JAX's to make, when the function's own program was checked long before. A rule
that sums over devices what JAX's types have summed, as tensor parallelism is written elsewhere, would count it as often
as there are devices. So each rule is checked when JAX traces it: of any `jax.custom_vjp`, wherever it stands and
whatever else the program computes, and in no program that nobody differentiates.
"""

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr
from jax.extend.linear_util import transformation2

from trellis.mesh.manual.check import check_second_sums
from trellis.notation.binding import Bindings
from trellis.program.reading import Program
from trellis.program.trace import rewritten


def with_checked_rules(program: Jaxpr, bindings: Bindings) -> Jaxpr:
    """The program of a `shard_map`'s body, whose differentiation refuses a rule that sums a second time.

    Args:
        program: the body.
        bindings: those of the call, for messages.

    Its gradient raises:
        SecondSum: a rule sums over devices what is the same on all of them.
    """

    def checked(equation, _):
        if equation.primitive.name != "custom_vjp_call":
            return equation

        def forward(make, *differentiated):
            jaxpr, consts = make(*differentiated)
            check_second_sums(Program(jaxpr), bindings)
            return jaxpr, consts

        def backward(rule, *given):
            kept = len(given) - len(equation.outvars)
            arrays = {i: x for i, x in enumerate(given) if not isinstance(x, SymbolicZero)}

            def run(arrays):
                made = rule(*(arrays.get(i, x) for i, x in enumerate(given)))
                return [x for x in jax.tree.leaves(made) if isinstance(x, jax.Array)]

            traced = jax.make_jaxpr(run)(arrays)
            check_second_sums(Program(traced.jaxpr), bindings, [n for n, i in enumerate(arrays) if i >= kept])
            return rule(*given)

        around = {"fwd_jaxpr_thunk": forward, "bwd": backward}
        rules = {name: transformation2(do)(equation.params[name]) for name, do in around.items()}
        return equation.replace(params=equation.params | rules)

    return rewritten(program, checked)
