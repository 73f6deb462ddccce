"""Functions of whole arrays, traced once, to run on one device's parts of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from trellis.mesh.device.view import View


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

    def __call__(self, view: View, *args):
        """The results' parts on one device, from the parts of the arguments."""
        results = view.run(self.closed, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.out), results)
