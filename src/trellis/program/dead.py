"""What nothing reads, as compilers leave it out: also in while loops, which JAX's own removal of dead code leaves."""

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import while_p
from jax.interpreters.partial_eval import dce_jaxpr


def without_dead(jaxpr: Jaxpr) -> Jaxpr:
    """A program without what none of its results reads; its arguments stay."""
    while True:
        jaxpr = _live(jaxpr, [True] * len(jaxpr.outvars))[0]
        shorter = _without_dead_carries(jaxpr)
        if shorter is jaxpr:
            return jaxpr
        jaxpr = shorter


def _live(jaxpr: Jaxpr, results: list[bool]) -> tuple[Jaxpr, list[bool]]:
    """A program without what none of these results reads, and which of its arguments are read; all of them stay."""
    jaxpr, _ = dce_jaxpr(jaxpr, results, instantiate=True)
    return jaxpr, list(map(_read(jaxpr).__contains__, jaxpr.invars))


def _read(jaxpr: Jaxpr) -> set[Var]:
    """What equations and results of a program read."""
    operands = [*jaxpr.outvars, *(v for equation in jaxpr.eqns for v in equation.invars)]
    return {v for v in operands if not isinstance(v, Literal)}


def _without_dead_carries(jaxpr: Jaxpr) -> Jaxpr:
    """A program whose while loops, however deep, carry and are given only what is read; itself if all of them do."""
    read, equations = _read(jaxpr), []
    for equation in jaxpr.eqns:
        if equation.primitive is while_p:
            equation = _shorter(equation, [v in read for v in equation.outvars])
        params = {name: _inside(value) for name, value in equation.params.items()}
        if any(new is not equation.params[name] for name, new in params.items()):
            equation = equation.replace(params=params)
        equations.append(equation)
    if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=equations)


def _inside(value: Any) -> Any:
    """A parameter of an equation, with programs in it that carry only what is read."""
    if isinstance(value, Jaxpr):
        return _without_dead_carries(value)
    if isinstance(value, ClosedJaxpr):
        inner = _without_dead_carries(value.jaxpr)
        return value if inner is value.jaxpr else value.replace(jaxpr=inner)
    if type(value) is tuple:
        found = tuple(map(_inside, value))
        return value if all(new is old for new, old in zip(found, value, strict=True)) else found
    return value


def _shorter(loop: JaxprEqn, read: list[bool]) -> JaxprEqn:
    """A while loop without what it carries, computes and is given for none of the results that are read, nor for its
    end."""
    cond, body = loop.params["cond_jaxpr"], loop.params["body_jaxpr"]
    of_cond, of_body = loop.params["cond_nconsts"], loop.params["body_nconsts"]
    end, needs = _live(cond.jaxpr, [True])
    alive = [a or b for a, b in zip(read, needs[of_cond:], strict=True)]
    while True:
        kept, given = _live(body.jaxpr, alive)
        more = [a or b for a, b in zip(alive, given[of_body:], strict=True)]
        if more == alive:
            break
        alive = more
    consts = given[:of_body]
    if all(alive) and all(consts) and len(kept.eqns) == len(body.jaxpr.eqns) or not any(alive):
        return loop
    picked = lambda values, keep: [v for v, stays in zip(values, keep, strict=True) if stays]
    of_end = [*[True] * of_cond, *alive]
    invars = [*loop.invars[:of_cond], *picked(loop.invars[of_cond:], [*consts, *alive])]
    body_jaxpr = kept.replace(invars=picked(kept.invars, [*consts, *alive]))
    cond_jaxpr = end.replace(invars=picked(end.invars, of_end))
    params = loop.params | {
        "body_nconsts": sum(consts), "body_jaxpr": body.replace(jaxpr=body_jaxpr),
        "cond_jaxpr": cond.replace(jaxpr=cond_jaxpr),
    }  # fmt: skip
    return loop.replace(invars=invars, outvars=picked(loop.outvars, alive), params=params)
