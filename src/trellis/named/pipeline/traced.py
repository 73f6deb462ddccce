"""Functions of whole arrays, traced once, to run on one device's parts of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from trellis.mesh.device.view import View
from trellis.notation import spec_of
from trellis.program.sizes import state_at


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of trees of arrays.

    Attributes:
        closed: its program.
        out: the tree of its results, of types (`jax.ShapeDtypeStruct`).
    """

    closed: ClosedJaxpr
    out: Any

    @staticmethod
    def of(function: Callable, *examples) -> "Traced":
        """Traces a function of arguments of these types."""
        leaves, tree = jax.tree.flatten(examples)

        def flat(*leaves):
            return function(*jax.tree.unflatten(tree, leaves))

        return Traced(*jax.make_jaxpr(flat, return_shape=True)(*leaves))

    def __call__(self, view: View, consts: Sequence, *args):
        """The results' parts on one device, from the parts of the arguments and of the constants."""
        leaves = jax.tree.leaves(args)
        results = view.jaxpr(self.closed.jaxpr, consts, leaves)
        return jax.tree.unflatten(jax.tree.structure(self.out), results)

    @property
    def depends(self) -> list[bool]:
        """Whether each result depends on an argument; a gradient of what is not used does not."""
        known = set(self.closed.jaxpr.invars)
        for equation in self.closed.jaxpr.eqns:
            if any(v in known for v in equation.invars if not isinstance(v, Literal)):
                known.update(equation.outvars)
        return [not isinstance(v, Literal) and v in known for v in self.closed.jaxpr.outvars]

    @property
    def specs(self) -> list[jax.sharding.PartitionSpec]:
        """How each result lies on the mesh."""
        return [spec_at(v.aval) for v in self.closed.jaxpr.outvars]


def spec_at(aval) -> jax.sharding.PartitionSpec:
    """How a value of a type lies on the mesh."""
    state = state_at(aval)
    return spec_of(state.axes, state.pending, state.copied)
