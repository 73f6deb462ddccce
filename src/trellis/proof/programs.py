"""Any function of JAX with shardings, as a program to be proven."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trellis._compat import cudnn_assumed, full_text
from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.inspect.ledger import ledger_of
from trellis.mesh.layout import current_layout
from trellis.mesh.meshes import arrange
from trellis.notation.typeof import typeof
from trellis.plan.compile import compiler_devices, platform_of_target
from trellis.program.trace import mesh_of, trace
from trellis.proof.interpreter import Interpreter
from trellis.proof.placing import plain
from trellis.proof.proof import Proof, Subject, Wanted, Watch


def proof_of(
    fn: Callable,
    *args: Any,
    on: str,
    reference: Callable | None,
    options: Mapping[str, str],
    bound: float,
    explain: bool,
    seed: int,
) -> Proof:
    """What `trellis.prove` returns, of the same arguments."""
    watch = Watch()
    subject = _subject(fn, args, on, dict(options), seed)
    watch.note("tracing")
    compiled = subject.compile()
    watch.note("compiling")
    if reference is None:
        whole = Interpreter(full_text(subject.lowered), subject.mesh.size)
        meant = [result[0] for result in whole([subject.given[i][None] for i in compiled.kept])]
    else:
        meant = _computed(reference, args, subject)
    watch.note("reference")
    if len(meant) != len(subject.wanted):
        raise UserError(
            "A reference returns what the function returns.",
            seen=f"{len(meant)} arrays, where `{subject.name}` returns {len(subject.wanted)}",
            where="reference",
            fix="return the same tree",
        )
    wanted = [dataclasses.replace(wanted, value=value) for wanted, value in zip(subject.wanted, meant)]
    subject = dataclasses.replace(subject, wanted=wanted)
    proof = subject.execute(compiled, bound=bound)
    watch.note("executing")
    if explain and not proof.proven:
        proof = dataclasses.replace(proof, finding=subject.why(compiled, bound))
        watch.note("looking for the reason")
    return dataclasses.replace(proof, seconds=watch.seconds)


def _subject(fn: Callable, args: tuple, on: str, options: dict[str, str], seed: int) -> Subject:
    """The function lowered for the target, with its arguments' numbers; its results' values are still to come."""
    where = target(on)
    mesh = _mesh(args, compiler_devices(where), on)
    leaves, tree = jax.tree.flatten(args)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array) if array]
    places = [_place(array, mesh) for array in arrays]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a, place in zip(arrays, places)]

    def call(*given: Any) -> Any:
        rest = iter(given)
        return fn(*jax.tree.unflatten(tree, [next(rest) if array else leaf for leaf, array in zip(leaves, is_array)]))

    name = getattr(fn, "__name__", type(fn).__name__)
    with _in_force(mesh), cudnn_assumed():
        try:
            traced = jax.jit(call).trace(*shapes)
        except ValueError as error:
            if "mesh" not in str(error) and "incompatible devices" not in str(error):
                raise
            raise UserError(
                "A function that is compiled for other devices takes its mesh from its arguments.",
                seen=f"{error!s:.400}",
                where=f"`{name}`, traced for {on}",
                fix="leave out `mesh=` of jax.shard_map, and give PartitionSpecs instead of NamedShardings inside",
            ) from error
        lowered = traced.lower(lowering_platforms=(platform_of_target(where),))
        ledger = ledger_of(trace(call, *shapes), refuse=False)  # what is wrong is to be found
    results = jax.tree_util.tree_leaves_with_path(traced.out_info, is_leaf=lambda x: hasattr(x, "names"))
    empty = np.zeros(0)
    wanted = [
        Wanted(jax.tree_util.keystr(path, simple=True, separator=".") or "result", empty, typeof(leaf))
        for path, leaf in results
    ]
    random = np.random.default_rng(seed)
    return Subject(name, where, mesh, lowered, options, [_numbers(a, random) for a in arrays], places, wanted, ledger)


def _mesh(args: tuple, devices: list, on: str) -> Mesh:
    """The arguments' mesh on the target's devices.

    Raises:
        UserError: they have none, or one of another number of devices.
    """
    layout = current_layout()
    mesh = layout.mesh if layout is not None else mesh_of(args)
    if mesh is None:
        raise UserError(
            "Arguments that a program is compiled for several devices with have shardings.",
            seen="no array with a NamedSharding, and no layout in force",
            where="prove",
            fix="put one on a mesh with jax.device_put, or call inside `with layout:`",
        )
    if mesh.size != len(devices):
        sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise UserError(
            "A mesh has as many devices as the target.",
            seen=f"{sizes} = {mesh.size} devices, {on} has {len(devices)}",
            where="on",
            fix=f"use a target of {mesh.size} devices, or a mesh of {len(devices)}",
        )
    placed = arrange(devices, list(mesh.axis_names), list(mesh.shape.values()))
    return Mesh(placed, mesh.axis_names, axis_types=mesh.axis_types)


def _place(array: Any, mesh: Mesh) -> NamedSharding:
    """Where an argument lies on the target; whole on every device where it does not say."""
    sharding = getattr(array, "sharding", None)
    return NamedSharding(mesh, sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec())


def _in_force(mesh: Mesh) -> contextlib.AbstractContextManager:
    """The layout in force on the target's mesh, or that mesh."""
    layout = current_layout()
    return layout.on(mesh) if layout is not None else jax.set_mesh(mesh)


def _numbers(array: Any, random: np.random.Generator) -> np.ndarray:
    """An argument's numbers.

    Raises:
        UserError: it has none, and they cannot be drawn.
    """
    if not isinstance(array, jax.ShapeDtypeStruct):
        return plain(array)
    if not jax.numpy.issubdtype(array.dtype, jax.numpy.floating):
        raise UserError(
            "Numbers at random stand for floats only: what integers mean is not known.",
            seen=f"a ShapeDtypeStruct of {array.dtype}{list(array.shape)}",
            where="prove",
            fix="pass an array",
        )
    return random.normal(size=array.shape).astype(np.float32) / math.sqrt(max(array.shape[-1:], default=1))


def _computed(reference: Callable, args: tuple, subject: Subject) -> list[np.ndarray]:
    """What another function makes of the same arguments on one device of this machine."""
    leaves, tree = jax.tree.flatten(args)

    def compute() -> Any:
        numbers = iter(subject.given)
        with jax.default_device(jax.devices("cpu")[0]):
            filled = [jax.numpy.asarray(next(numbers)) if hasattr(leaf, "dtype") else leaf for leaf in leaves]
            return reference(*jax.tree.unflatten(tree, filled))

    with ThreadPoolExecutor(1) as outside:  # where no layout and no mesh is in force
        found = outside.submit(compute).result()
    return [plain(leaf) for leaf in jax.tree.leaves(found)]
