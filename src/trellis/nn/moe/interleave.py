"""Parts of a device's batch go through a layer side by side: while rows of one part travel, others are computed.

Sequences do not depend on each other, so a layer with experts may take them in several parts. This module says only
what has to wait: the exchange of a part begins when that of the part before has ended, forward and backward. Meanwhile
a compiler's scheduler finds attention, experts and shared blocks of other parts to run, which it would not if all
exchanges asked for the links at once (DeepSeek-AI, 2024, arXiv:2412.19437, section 3.2.1).
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.layout import current_layout
from trellis.named import NamedArray, is_named, merge_axes, split_axis, stack, unbind
from trellis.named.narrow import Narrow
from trellis.named.placing import assign, bring
from trellis.program.said import interleaved

# What a stage takes and returns: arrays with gradients, and integers beside them.
Stage = Callable[[Any, Any], tuple[Any, Any]]


def parts_of(x: NamedArray, asked: int) -> int:
    """In how many parts of the same size the sequences of a device can go, no more than asked for; one if a device has
    a single sequence, as when a text is generated.

    Args:
        x: `"batch ..."`.
        asked: `Routing.interleave`.
    """
    where = assign([x], x.names)
    sizes = jax.typeof(x.array).sharding.mesh.shape
    devices = math.prod(sizes[a] for a in where["batch"]) if where else 1
    return math.gcd(x.shape["batch"] // devices, asked) if x.shape["batch"] % devices == 0 else 1


def whole_batch() -> contextlib.AbstractContextManager:
    """Where rows of a microbatch may be put into another order and back: what is computed of each stays the same."""
    layout = current_layout()
    return contextlib.nullcontext() if layout is None else dataclasses.replace(layout, cut=())


def cut(tree, count: int) -> list:
    """Cuts a tree of named arrays into `count` parts of its `batch`; every device's sequences are dealt out in turn,
    and nothing moves. Arrays without a batch are in all parts.

    >>> [part.array.tolist() for part in cut(tr.arange(tr.Axis("batch", 4)), 2)]
    [[0, 2], [1, 3]]
    """

    def parts(x):
        if count == 1 or not is_named(x) or "batch" not in x.names:
            return [x] * count
        with whole_batch():
            return unbind(split_axis(x, "batch", {"batch": x.shape["batch"] // count, "part": count}), "part")

    leaves, structure = jax.tree.flatten(tree, is_leaf=is_named)
    return [structure.unflatten(part) for part in zip(*map(parts, leaves), strict=True)] if leaves else [tree] * count


def joined(parts: Sequence[NamedArray]) -> NamedArray:
    """Joins what was cut."""
    with whole_batch():
        return parts[0] if len(parts) == 1 else merge_axes(stack(parts, "part"), ("batch", "part"), "batch")


def held_once(layer, x: NamedArray, but: Sequence[NamedArray | None] = ()):
    """A layer with its parameters where operations with `x` want them, so that they move once for all parts, and their
    gradients are summed over devices once. Narrow weights stay where they are.

    `mix_each` moves experts' weights. Other gradients are summed after those of experts, which are known first: these,
    the largest, move beside attention.

    Args:
        layer: any module.
        x: `"batch pos ..."`, a part.
        but: parameters that stay as they are, since they have no gradient.
    """
    leaf = lambda w: isinstance(w, (NamedArray, Narrow))
    stays, moved = eqx.partition(layer, lambda w: any(w is one for one in but), is_leaf=leaf)
    of_experts = lambda w: isinstance(w, NamedArray) and "experts" in w.names
    experts, others = eqx.partition(moved, of_experts, is_leaf=leaf)

    def brought(w):
        if not isinstance(w, NamedArray):
            return w
        return bring(w, assign([x, w], tuple(dict.fromkeys(("batch", "pos", *w.names)))))

    others = jax.tree.map(brought, others, is_leaf=leaf)
    return eqx.combine(stays, *_gradients_in_order(experts, others), is_leaf=leaf)


def for_each_part(layer, count: int) -> list:
    """A layer once for each of `count` parts that use its parameters. Of narrow weights with delayed scales the
    largest elements that the products of all parts met are kept, which JAX would add up as it does gradients.

    Args:
        layer: any module.
        count: how many parts.
    """
    leaf = lambda w: isinstance(w, (NamedArray, Narrow))
    leaves, structure = jax.tree.flatten(layer, is_leaf=leaf)
    delayed = [isinstance(w, Narrow) and w.largest is not None for w in leaves]
    if count == 1 or not any(delayed):
        return [layer] * count

    def parts(w, delayed: bool) -> list:
        return [dataclasses.replace(w, largest=own) for own in _copies(w.largest, count)] if delayed else [w] * count

    return [structure.unflatten(part) for part in zip(*map(parts, leaves, delayed), strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copies(largest, count: int) -> tuple:
    return (largest,) * count


def _largest_of_all(count: int, _, met: tuple) -> tuple:
    return (jax.tree.map(lambda *each: functools.reduce(jnp.maximum, each), *met),)


_copies.defvjp(lambda largest, count: (_copies(largest, count), None), _largest_of_all)


@jax.custom_vjp
def _gradients_in_order(first, then):
    """Both; the gradients of `then` wait for those of `first`."""
    return first, then


_gradients_in_order.defvjp(lambda *given: (given, None), lambda _, d: (d[0], after(*d)))


def after(first, then):
    """`then`, which does not exist before `first` does."""
    return lax.optimization_barrier((first, then))[1]


@jax.custom_vjp
def begun_after(first, x):
    """`x`, which does not exist before `first` does; its gradient waits for nothing.

    Compilers put operations of two parts into one kernel if neither waits for the other, and then both wait.
    """
    return after(first, x)


begun_after.defvjp(lambda first, x: (after(first, x), None), lambda _, d: (None, d))


def in_turn(stage: Stage, given: Sequence[tuple[Any, Any]], *, all_wait: bool = False) -> list[tuple[Any, Any]]:
    """`[stage(*each) for each in given]`, each begun when the one before has ended; so are their backward passes, in
    the same order.

    Args:
        stage: from a tree of arrays and one of integers to such trees. It closes over nothing that is traced.
        given: the inputs of each.
        all_wait: integers wait too, since collectives are made of them. What a backward pass needs is then not known
            before the stages have run.
    """
    if len(given) == 1:
        return [stage(*given[0])]
    return list(_in_turn(stage, all_wait, *map(tuple, zip(*given, strict=True))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_turn(stage: Stage, all_wait: bool, arrays: tuple, integers: tuple):
    return _forward(stage, all_wait, arrays, integers)[0]


def _forward(stage: Stage, all_wait: bool, arrays: tuple, integers: tuple):
    made, pulls = [], []
    for mine, beside in zip(arrays, integers, strict=True):
        if made and all_wait:
            mine, beside = after(made[-1][0], (mine, beside))
        elif made:
            mine = after(made[-1][0], mine)
        with interleaved(len(arrays)):
            out, pull, known = jax.vjp(lambda mine, beside=beside: stage(mine, beside), mine, has_aux=True)
        made.append((out, known))
        pulls.append(pull)
    return tuple(made), tuple(pulls)


def _backward(stage: Stage, all_wait: bool, pulls: tuple, gradients: tuple):
    found = []
    for pull, (mine, _) in zip(pulls, gradients, strict=True):
        with interleaved(len(pulls)):
            found += pull(after(found[-1], mine) if found else mine)
    return tuple(found), None


_in_turn.defvjp(_forward, _backward)
