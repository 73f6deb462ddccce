"""The jaxprs inside an equation."""

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

# Their jaxprs say how to combine two elements, or are a kernel's own.
_LOCAL = ("reduce", "reduce_window", "select_and_scatter_add", "pallas_call")


def called(equation: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs that an equation runs: of jit, remat, custom derivatives, shard_map, loops and branches."""
    if equation.primitive.name in _LOCAL or equation.primitive.name.startswith("scatter"):
        return []
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found
