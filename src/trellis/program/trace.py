"""Tracing a function to the program that is read. Nothing runs, and nothing is compiled."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from trellis.notation.typeof import is_named
from trellis.program.reading import Argument, Program
from trellis.program.sizes import typed

Words = tuple[str, ...]


def kind_of(path: Words, array: Any) -> str:
    """What an argument is, by the names on the way to it: `("0", "optimizer", "mu", "embedding")`.

    An optimizer's state has `opt...`, `mu`, `nu` or `average` on its way, parameters have `model` or `params`. Of the
    rest, floating-point arrays in the first argument are parameters, and everything else is the batch.
    """
    words = [word.lower() for word in path[1:]]
    if any(word.startswith("opt") or word in ("mu", "nu", "trace", "average") for word in words):
        return "optimizer"
    floats = jax.numpy.issubdtype(array.dtype, jax.numpy.floating)
    if any(word in ("model", "params", "parameters") for word in words) or (floats and path[0] == "0"):
        return "parameters"
    return "batch"


def trace(fn: Callable, *args, kind_of: Callable[[Words, Any], str] = kind_of, **kwargs) -> Program:
    """The program of a call of a function, without what nothing reads.

    Without a mesh in force (`with layout:`, `jax.set_mesh`) the arguments' own is used.

    Args:
        fn: any function of JAX, jitted (with its donations) or not.
        *args, **kwargs: its arguments: arrays, named arrays, trees of them, or `jax.ShapeDtypeStruct`s with
            shardings. Leaves that are not arrays are passed as they are.
        kind_of: tells what an argument is, from the names on the way to it and the array.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(arrays):
        arrays = iter(arrays)
        filled = [next(arrays) if array else leaf for leaf, array in zip(leaves, is_array)]
        args, kwargs = jax.tree.unflatten(tree, filled)
        return [leaf for leaf in jax.tree.leaves(fn(*args, **kwargs)) if hasattr(leaf, "dtype")]

    arrays = [leaf for leaf, array in zip(leaves, is_array) if array]
    mesh = mesh_of(arrays)
    with mesh_in_force(mesh):
        traced = jax.make_jaxpr(call)(arrays).jaxpr
    live, _ = dce_jaxpr(traced, [True] * len(traced.outvars), instantiate=True)
    donated, described = _donated(live), _arguments((args, kwargs), kind_of)
    return Program(live, [Argument(*each, v in donated) for each, v in zip(described, live.invars)], mesh)


def mesh_in_force(mesh: Mesh | AbstractMesh | None) -> contextlib.AbstractContextManager:
    """The given mesh, unless there is none or one is in force already."""
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)


def mesh_of(tree: Any) -> Mesh | AbstractMesh | None:
    """The mesh of the first array of a tree that has one."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding) and not s.mesh.empty), None)


def _donated(jaxpr) -> set:
    """The inputs that a jitted function in a program may take the memory of."""
    found = set()
    for equation in jaxpr.eqns:
        given = equation.params.get("donated_invars", ())
        found.update(v for v, taken in zip(equation.invars, given) if taken)
    return found


def _arguments(tree: Any, kind_of: Callable[[Words, Any], str]):
    """Name, kind and type of every array of the arguments."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_named):
        words, names = tuple(word_of(key) for key in path[1:]), getattr(leaf, "names", None)
        for array in jax.tree.leaves(leaf):
            if hasattr(array, "shape") and hasattr(array, "dtype"):
                name = ".".join(words[1:]) or f"argument {words[0]}"
                yield name, kind_of(words, array), typed(array, names)


def word_of(key: Any) -> str:
    """One step of a path to a leaf, as a word."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
