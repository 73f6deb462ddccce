"""An optimizer's moving averages in eight bits: expanded for a step's update, rounded after it.

In one step a moving average changes by less than the distance between neighbouring numbers of eight bits, so rounding
to the nearest would never change it. Averages are rounded at random instead, from keys that depend on the step, the
parameter and an element's place in the whole array, so a run is the same to the bit wherever it is resumed.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trellis.errors import UserError
from trellis.named import is_named
from trellis.named.blocks import Blocks, block_of, cut_by, in_blocks, zeros_in_blocks
from trellis.nn.parameters import Parameter, parameters
from trellis.notation import typeof

# The fields in which a rule's state keeps something of each parameter; True for averages of squares.
_KEPT: dict[type, dict[str, bool]] = {
    optax.ScaleByAdamState: {"mu": False, "nu": True},
    optax.ScaleByLionState: {"mu": False},
    optax.TraceState: {"trace": False},
    optax.EmaState: {"ema": False},
}
# An axis that layouts slice over all devices, and one that is padded to suit the mesh.
_FINELY, _PADDED = "embed", "vocab"


class NarrowState(NamedTuple):
    """Steps taken, and the rule's state with the chosen parts in blocks."""

    count: jax.Array
    rule: Any


def in_eight_bits(
    rule: optax.GradientTransformation, choose: Callable[[Parameter], bool]
) -> optax.GradientTransformation:
    """A rule that keeps its moving averages of chosen parameters in eight bits (`trellis.named.blocks`).

    Averages of squares are kept as their roots. A step's update is made from the averages before they are rounded.

    Args:
        rule: AdamW's, Lion's or Muon's direction, or Adafactor's with a moving average of updates.
        choose: which parameters.
    """

    def init(params: Any) -> NarrowState:
        return NarrowState(jnp.int32(0), _closed(rule.init(params), params, None, choose))

    def update(updates: Any, state: NarrowState, params: Any = None) -> tuple[Any, NarrowState]:
        changes, new = rule.update(updates, _opened(state.rule), params)
        count = optax.safe_increment(state.count)
        return changes, NarrowState(count, _closed(new, updates, count, choose))

    return optax.GradientTransformation(init, update)


def narrow_parts(state: Any, parts: dict[str, str]) -> set[str]:
    """Those of the given parts of names for which an optimizer keeps something in eight bits.

    Args:
        state: the optimizer's state, or its types.
        parts: parts of parameters' names, or names of their axes.
    """
    found = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_whole)
    paths = [(_dotted(jax.tree_util.keystr(path, simple=True, separator=".")), x) for path, x in found]
    blocks = [Parameter(path, x.values) for path, x in paths if isinstance(x, Blocks)]
    return {part for part in parts if any(p.matches((part,)) for p in blocks)}


def _closed(state: Any, model: Any, count: jax.Array | None, choose: Callable[[Parameter], bool]) -> Any:
    """A rule's state with the chosen parts in blocks. Without a count it is the first state, which is zeros.

    What a parameter is, a tree like the model says: a rule for some of them keeps these by path alone.
    """
    known = {_dotted(p.path): p for p in parameters(model)}
    key = None if count is None else jax.random.fold_in(jax.random.key(0), count)

    def tree(kept: Any, squares: bool) -> Any:
        def leaf(p: Parameter) -> Any:
            path = _dotted(p.path)
            p = known.get(path, p)._replace(path=path, leaf=p.leaf)
            if not choose(p):
                return p.leaf
            dim = block_dim(p)
            _check_slices(path, p, dim)
            if key is None:
                return zeros_in_blocks(p.leaf, dim)
            mine = jax.random.fold_in(key, zlib.crc32(path.encode()))
            return in_blocks(p.leaf, dim, key=mine, squares=squares)

        structure = jax.tree.structure(kept, is_leaf=is_named)
        return jax.tree.unflatten(structure, [leaf(p) for p in parameters(kept)])

    def one(part: Any) -> Any:
        fields = _KEPT.get(type(part), {})
        return part._replace(**{f: tree(getattr(part, f), squares) for f, squares in fields.items()})

    return jax.tree.map(lambda part: one(part) if type(part) in _KEPT else part, state, is_leaf=_is_kept)


def _opened(state: Any) -> Any:
    """A rule's state with its blocks expanded, as the rule expects it."""

    def one(part: Any) -> Any:
        def leaf(x: Any, squares: bool) -> Any:
            if not isinstance(x, Blocks):
                return x
            found = x.opened()
            return jax.tree.map(jnp.square, found) if squares else found

        fields = _KEPT.get(type(part), {})
        opened = {
            f: jax.tree.map(lambda x, s=squares: leaf(x, s), getattr(part, f), is_leaf=_is_whole)
            for f, squares in fields.items()
        }
        return part._replace(**opened)

    return jax.tree.map(lambda part: one(part) if type(part) in _KEPT else part, state, is_leaf=_is_kept)


def block_dim(p: Parameter) -> int:
    """The dimension of a parameter along which blocks lie: its longest axis other than those that layouts slice finely.

    It depends on the parameter alone, so a run's state is the same on every mesh.
    """
    dims = range(p.counting, p.ndim) if p.counting < p.ndim else range(p.ndim)
    if not p.names:
        return p.ndim - 1
    rank = lambda d: (p.names[d] != _PADDED, p.names[d] != _FINELY, p.leaf.shape[p.names[d]], d)
    return max(dims, key=rank)


def _check_slices(path: str, p: Parameter, dim: int) -> None:
    """Refuses slices that cut blocks."""
    array = p.leaf.array if is_named(p.leaf) else p.leaf
    if ways := cut_by(array, dim):
        block = block_of(array.shape[dim])
        name = p.names[dim] if p.names else f"dimension {dim}"
        most = math.gcd(array.shape[dim] // block, ways)
        raise UserError(
            "Numbers of a block, which share a scale, must be on the same device.",
            seen=f"{ways} slices of `{name}`, in blocks of {block}, of {typeof(p.leaf)}, what is kept of `{path}`",
            where="precision.moments",
            fix=f"slice `{name}` over {most} device{'s' * (most > 1)} at most, or leave `{path}` out",
        )


def _is_kept(part: Any) -> bool:
    return type(part) in _KEPT


def _is_whole(x: Any) -> bool:
    return isinstance(x, Blocks) or is_named(x)


def _dotted(path: str) -> str:
    return path.replace("/", ".")  # groups of parameters have slashes, as in checkpoints
