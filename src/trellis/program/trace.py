"""Traces a function to the program that is read. Nothing runs, and nothing is compiled."""

import contextlib
import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import closed_call_p, custom_jvp_call_p, while_p
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from trellis.notation.binding import TypeMismatch
from trellis.notation.typeof import is_named
from trellis.program.by_compiler import place_values
from trellis.program.flow import differentiated
from trellis.program.reading import LOOPS, Argument, Program, jaxprs_in
from trellis.program.sizes import typed

Words = tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Untraced:
    """The body of an equation that has not been traced: a function of flat arrays, and the types of its results."""

    fun: Callable
    out_avals: Sequence

    def program_of(self, avals: Sequence) -> ClosedJaxpr:
        return jax.make_jaxpr(self.fun)(*avals)


def trace(fn: Callable, *args, kind_of: Callable[[Words, Any], str] | None = None, **kwargs) -> Program:
    """The program of one call of a function, without what nothing reads.

    If no mesh is in force (`with layout:`, `jax.set_mesh`), the arguments' own is used.

    Args:
        fn: any function of JAX, jitted (with its donations) or not. One that has `arguments_placed` says by it where
            its arguments lie when it is called.
        *args, **kwargs: its arguments: arrays, named arrays, trees of them, or `jax.ShapeDtypeStruct`s with
            shardings. Leaves that are not arrays are passed as they are.
        kind_of: tells what an argument is, from the names on the way to it and the array. Without it types do: states
            of Optax are the optimizer's, also in a chain with others, and fields of a class with `argument_kinds` are
            what that says. Of the rest, floating-point arrays in the first argument that is no optimizer's state (of
            keyword arguments, that which the function names first) are parameters, but the optimizer's if derivatives
            are made of another of their shape and not of them. Everything else is the batch.

    Raises:
        TypeMismatch: it is no function.
    """
    if not callable(fn):
        raise TypeMismatch(
            f"only a function can be traced, got {type(fn).__name__}, in trace: pass the function and then its "
            "arguments, as in ledger(loss, model, batch)"
        )
    if (placed := getattr(fn, "arguments_placed", None)) is not None:
        args, kwargs = placed(args, kwargs)
    kwargs = _in_order(fn, kwargs)
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
    read = live(traced)
    donated, described = _donated(read), _arguments((args, kwargs), kind_of or _Kinds(args, kwargs))
    program = Program(read, [Argument(*each, v in donated) for each, v in zip(described, read.invars)], mesh)
    if kind_of is None:
        program.arguments = tuple(_by_use(program))
    if program.auto:
        place_values(program, [getattr(array, "sharding", None) for array in arrays])
    return program


def live(jaxpr: Jaxpr) -> Jaxpr:
    """A program as compilers see it: not differentiated any more, and without what nothing reads; its arguments stay.

    JAX's own removal of dead code leaves `while` loops as they are.
    """
    jaxpr = _differentiated(jaxpr)
    while True:
        jaxpr, _ = _needed(jaxpr, [True] * len(jaxpr.outvars))
        shorter = rewritten(jaxpr, _shorter)
        if shorter is jaxpr:
            return jaxpr
        jaxpr = shorter


def _differentiated(jaxpr: Jaxpr) -> Jaxpr:
    """A program that is not differentiated any more, so that nothing reads what only a custom derivative would.

    The compiler sees it so. A `custom_jvp` call with an argument that its function does not read becomes a plain call.
    """

    def final(equation, _):
        call = equation.params.get("call_jaxpr") if equation.primitive is custom_jvp_call_p else None
        if isinstance(untraced := equation.params.get("jaxpr"), Untraced):
            inner = untraced.program_of([v.aval for v in equation.invars])
            return equation.replace(primitive=closed_call_p, params={"call_jaxpr": inner})
        if call is not None and not _read(call.jaxpr).issuperset(call.jaxpr.invars):
            return equation.replace(primitive=closed_call_p, params={"call_jaxpr": call})
        return equation

    return rewritten(jaxpr, final)


def _needed(jaxpr: Jaxpr, results: list[bool]) -> tuple[Jaxpr, list[bool]]:
    """A program for these of its results alone, and which of its arguments it reads; all of them stay."""
    jaxpr, _ = dce_jaxpr(jaxpr, results, instantiate=True)
    return jaxpr, list(map(_read(jaxpr).__contains__, jaxpr.invars))


def _shorter(loop: JaxprEqn, program: Jaxpr) -> JaxprEqn:
    """A `while` loop without what it carries, computes and is given for none of the results that its program reads, nor
    for its end; any other equation as it is."""
    if loop.primitive is not while_p:
        return loop
    cond, body, read = loop.params["cond_jaxpr"], loop.params["body_jaxpr"], _read(program)
    of_cond, of_body = loop.params["cond_nconsts"], loop.params["body_nconsts"]
    end, needs = _needed(cond.jaxpr, [True])
    alive = [v in read or need for v, need in zip(loop.outvars, needs[of_cond:], strict=True)]
    while True:
        kept, given = _needed(body.jaxpr, alive)
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


def rewritten(jaxpr: Jaxpr, change: Callable[[JaxprEqn, Jaxpr], JaxprEqn], done: dict | None = None) -> Jaxpr:
    """A program with each equation changed, those of the programs within it first; itself if none was.

    Args:
        jaxpr: the program.
        change: gives another equation for one of a program, or the same.
        done: what was rewritten so far.
    """
    done = {} if done is None else done
    if id(jaxpr) in done:
        return done[id(jaxpr)][1]

    def inner(value):
        if isinstance(value, Jaxpr):
            return rewritten(value, change, done)
        if isinstance(value, ClosedJaxpr):
            new = rewritten(value.jaxpr, change, done)
            return value if new is value.jaxpr else value.replace(jaxpr=new)
        return tuple(map(inner, value)) if type(value) is tuple else value

    equations = []
    for equation in jaxpr.eqns:
        params = {name: inner(value) for name, value in equation.params.items()}
        same = all(_same(value, equation.params[name]) for name, value in params.items())
        equations.append(change(equation if same else equation.replace(params=params), jaxpr))
    changed = any(new is not old for new, old in zip(equations, jaxpr.eqns, strict=True))
    result = jaxpr.replace(eqns=equations) if changed else jaxpr
    done[id(jaxpr)] = jaxpr, result  # keeps the program, since the key is an address that another may get afterwards
    return result


def _same(new, old) -> bool:
    return new is old or (type(new) is tuple and all(map(_same, new, old)))


def _read(jaxpr: Jaxpr) -> set:
    """The variables that a program's equations and results read."""
    atoms = [*jaxpr.outvars, *(v for equation in jaxpr.eqns for v in equation.invars)]
    return {v for v in atoms if isinstance(v, Var)}


def mesh_in_force(mesh: Mesh | AbstractMesh | None) -> contextlib.AbstractContextManager:
    """Puts the given mesh in force, unless there is none or one is in force already."""
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)


def mesh_of(tree: Any) -> Mesh | AbstractMesh | None:
    """The mesh of the first array of a tree that has one."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding) and not s.mesh.empty), None)


def first_mesh(jaxpr: Jaxpr) -> Mesh | None:
    """The first mesh of devices that the equations of a program name, in a `shard_map` or in a sharding."""
    for equation in jaxpr.eqns:
        named = [getattr(value, "mesh", value) for value in jax.tree.leaves(tuple(equation.params.values()))]
        found = next((mesh for mesh in named if isinstance(mesh, Mesh) and not mesh.empty), None)
        inside = (first_mesh(inner) for inner in jaxprs_in(equation))
        if found is not None or (found := next(filter(None, inside), None)) is not None:
            return found
    return None


def equations_of(jaxpr: Jaxpr, primitive: str) -> Iterator:
    """The equations of a primitive in a program, and in the programs within it."""
    return (equation for equation, _ in equations(jaxpr) if equation.primitive.name == primitive)


def equations(jaxpr: Jaxpr, in_loop: bool = False) -> Iterator[tuple[Any, bool]]:
    """All equations of a program, and of the programs within it, with whether they are in a loop."""
    for equation in jaxpr.eqns:
        yield equation, in_loop
        for inner in jaxprs_in(equation):
            yield from equations(inner, in_loop or equation.primitive.name in LOOPS)


def _donated(jaxpr) -> set:
    """The inputs whose memory a jitted function in a program may take."""
    found = set()
    for equation in jaxpr.eqns:
        given = equation.params.get("donated_invars", ())
        found.update(v for v, taken in zip(equation.invars, given) if taken)
    return found


def _arguments(tree: Any, kind_of: Callable[[Words, Any], str]):
    """Name, kind and type of every array of the arguments."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_named):
        words, names = _words(path), getattr(leaf, "names", None)
        for array in jax.tree.leaves(leaf):
            if hasattr(array, "shape") and hasattr(array, "dtype"):
                name = ".".join(words[1:]) or f"argument {words[0]}"
                yield name, kind_of(words, array), typed(array, names)


def _words(path: Sequence[Any]) -> Words:
    """The path to a leaf of `(args, kwargs)`, from the argument's place or keyword on."""
    return tuple(word_of(key) for key in path[1:])


class _Kinds:
    """What the arguments of a call are, by the types of the trees that they stand in; "" if their use tells."""

    def __init__(self, args: tuple, kwargs: Mapping[str, Any]):
        declares = lambda node: hasattr(type(node), "argument_kinds")
        says = lambda node: node is not args and (declares(node) or _is_optimizers(node))
        self.said: dict[Words, str] = {}
        for path, node in jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=says):
            words = _words(path)
            if declares(node):
                self.said |= {(*words, field): kind for field, kind in node.argument_kinds.items()}
            if says(node):
                self.said[words] = "optimizer" if _is_optimizers(node) else "batch"
        given = [*enumerate(args), *kwargs.items()]
        self.first = next((str(word) for word, tree in given if not _is_optimizers(tree)), "")

    def __call__(self, path: Words, array: Any) -> str:
        steps = (path[:count] for count in range(len(path), 0, -1))
        said = next((self.said[step] for step in steps if step in self.said), None)
        floats = jax.numpy.issubdtype(array.dtype, jax.numpy.floating)
        return said or ("" if floats and path[0] == self.first else "batch")


def _by_use(program: Program) -> Iterator[Argument]:
    """The arguments, each with a kind."""
    used, pairs = differentiated(program), list(zip(program.arguments, program.inputs))
    shapes = {value.shape for argument, value in pairs if value in used and not argument.kind}
    for argument, value in pairs:
        beside = value.readers and value not in used and value.shape in shapes
        kind = argument.kind or ("optimizer" if beside else "parameters")
        yield dataclasses.replace(argument, kind=kind)


def _in_order(fn: Callable, kwargs: dict[str, Any]) -> OrderedDict[str, Any]:
    """Keyword arguments in the function's order, or as they are given if it has none; JAX sorts those of a dict."""
    try:
        names = tuple(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = ()
    return OrderedDict((name, kwargs[name]) for name in (*names, *kwargs) if name in kwargs)


def _is_optimizers(node: Any) -> bool:
    """Whether this is a state of Optax, or a chain's: a tuple of states, of which others may have written some."""
    if type(node) is not tuple:
        return isinstance(node, tuple) and type(node).__module__.partition(".")[0] == "optax"
    return any(map(_is_optimizers, node)) and all(hasattr(part, "_fields") or _is_optimizers(part) for part in node)


def word_of(key: Any) -> str:
    """One step of a path to a leaf, as a word."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
