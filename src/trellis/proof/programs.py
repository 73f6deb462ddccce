"""Any function of JAX with shardings, as a program to be proven."""

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from trellis._compat import cudnn_assumed, full_text
from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.hardware.platform import devices_of_jax
from trellis.inspect import Ledger
from trellis.inspect.ledger import ledger_of
from trellis.mesh.layout import current_layout
from trellis.mesh.meshes import arrange
from trellis.named.refusals import jaxs_in_our_words
from trellis.notation.typeof import is_named, typeof
from trellis.plan.compile import Compiled, compiler_devices, platform_of_target
from trellis.program.trace import first_mesh, mesh_of, trace
from trellis.proof.comparing import BOUND, largest
from trellis.proof.interpreter import Failed, Interpreter, NotInterpreted
from trellis.proof.interpreter.unrounded import rounds
from trellis.proof.interpreter.written import Written
from trellis.proof.placing import numbers_of, plain
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
    """What `trellis.prove` returns, for the same arguments."""
    watch = Watch()
    _check(fn, bound)
    with jaxs_in_our_words(getattr(fn, "__name__", "the function"), "prove"):
        subject = _subject(fn, args, on, dict(options), seed)
    watch.note("tracing")
    compiled = subject.compile()
    watch.note("compiling")

    def meant(subject: Subject, wide: type = np.float32, *, rounds: bool = True) -> Subject:
        if reference is None:
            return _own_meaning(subject, compiled, wide=wide, rounds=rounds)
        return _as_referred(subject, reference, args, wide)

    subject = meant(subject)
    watch.note("reference")
    proof = subject.execute(compiled, bound=bound)
    watch.note("executing")
    if not proof.proven and not proof.fault:
        proof = _in_float64(proof, subject, compiled, bound, meant)
        watch.note("in float64")
    if not proof.proven and not proof.fault:
        proof = _as_written_down(proof, subject, compiled, bound)
        watch.note("constants as written")
    if explain and not proof.proven and not proof.fault:
        proof = dataclasses.replace(proof, finding=subject.why(compiled, bound))
        watch.note("looking for the reason")
    return dataclasses.replace(proof, seconds=watch.seconds)


def _check(fn: Callable, bound: float) -> None:
    """Refuses what is no function, and a bound that everything or nothing would stay within."""
    if not callable(fn):
        raise UserError(
            "Only a function can be proven.",
            seen=type(fn).__name__,
            where="prove",
            fix="pass the function and then its arguments, as in prove(loss, model, batch, on='v5e:2x4')",
        )
    if isinstance(bound, bool) or not isinstance(bound, numbers.Real) or not 0 < bound < math.inf:
        raise UserError(
            "A bound must be a number above 0.",
            seen=f"bound={bound!r}",
            where="prove",
            fix=f"leave it out, which is {BOUND}, or use another share of a result's largest entry",
        )


def _own_meaning(subject: Subject, compiled: Compiled, **how: Any) -> Subject:
    """A subject that should have the results of the function on whole arrays, before a compiler has seen it.

    Args:
        subject: without these.
        compiled: the program, which has some of the function's arguments.
        **how: `wide` and `rounds`, as of an `Interpreter`.
    """
    whole = Interpreter(full_text(subject.lowered), subject.mesh.size, **how)
    return _wanting([result[0] for result in whole([subject.given[i][None] for i in compiled.kept])], subject)


def _as_referred(subject: Subject, reference: Callable, args: tuple, wide: type) -> Subject:
    """A subject that should have another function's results."""
    result = _computed(reference, args, subject, wide)
    _check_names(result, subject)
    arrays = [leaf if _is_array(leaf) else np.asarray(leaf) for leaf in jax.tree.leaves(result)]
    return _wanting([plain(array) for array in arrays], subject)


def _in_float64(
    proof: Proof, subject: Subject, compiled: Compiled, bound: float, meant: Callable[..., Subject]
) -> Proof:
    """The proof again with floats of 64 bits, in which rounding makes nothing of what a mistake makes, and then without
    the roundings to whole numbers of eight bits.

    It stays as it was if a result is wrong there, too, or if something in the program asks for the bits of a number, or
    if a reference cannot be computed so, since it names a type of 32 bits.
    """
    for rounded in (True, False) if rounds(compiled.text) else (True,):
        how = dict(wide=np.float64, rounds=rounded)
        try:
            again = meant(subject, **how).execute(compiled, bound=bound, **how)
        except (Failed, NotInterpreted, TypeError, ValueError):
            continue
        if again.proven:
            return dataclasses.replace(again, rounding=proof.error)
    return proof


def _as_written_down(proof: Proof, subject: Subject, compiled: Compiled, bound: float) -> Proof:
    """The proof again with the constants of the program before a compiler has seen it, in place of rounded ones.

    It stays as it was if a result is wrong there, too.
    """
    written = Written(full_text(subject.lowered))
    try:
        again = subject.execute(compiled, bound=bound, written=written)
    except (Failed, NotInterpreted):
        return proof
    return again if again.proven else proof


def _wanting(meant: Sequence[np.ndarray], subject: Subject) -> Subject:
    """A subject that should have these results.

    Raises:
        UserError: the function's cannot be compared with them.
    """
    if len(meant) != len(subject.wanted):
        raise UserError(
            "A reference must return the same arrays as the function.",
            seen=f"{len(meant)} arrays, where `{subject.name}` returns {len(subject.wanted)}",
            where="reference",
            fix="return the same tree",
        )
    for wanted, value, result in zip(subject.wanted, meant, jax.tree.leaves(subject.lowered.out_info), strict=True):
        words = jax.dtypes.issubdtype(result.dtype, jax.dtypes.prng_key)  # a random key's come after its dimensions
        if (value.shape[: len(result.shape)] if words else value.shape) != result.shape:
            raise UserError(
                "A reference must return the same arrays as the function.",
                seen=f"shape {value.shape} for {wanted.name}, where `{subject.name}` returns {result.shape}",
                where="reference",
                fix="return arrays of the same shapes",
            )
        if jax.numpy.issubdtype(value.dtype, jax.numpy.floating) and value.dtype.itemsize < 4:
            raise UserError(
                "A reference must compute in float32, as the compiled program is held: rounding is no mistake.",
                seen=f"{value.dtype} for {wanted.name}",
                where="reference",
                fix="begin it with x.astype('float32')",
            )
    wanted = [
        dataclasses.replace(wanted, value=value, least=largest(wanted.value))
        for wanted, value in zip(subject.wanted, meant)
    ]
    return dataclasses.replace(subject, wanted=wanted)


def _check_names(result: Any, subject: Subject) -> None:
    """Refuses named results whose dimensions are others, or in another order, than those of the function's."""
    named = lambda tree: jax.tree.leaves(tree, is_leaf=is_named)
    for wanted, theirs, ours in zip(subject.wanted, named(result), named(subject.lowered.out_info)):
        if is_named(theirs) and is_named(ours) and theirs.names != ours.names:
            raise UserError(
                "A reference must return the same arrays as the function.",
                seen=f"names {' '.join(theirs.names)} for {wanted.name}, where `{subject.name}` returns "
                f"{' '.join(ours.names)}",
                where="reference",
                fix="return the same names in the same order",
            )


def _subject(fn: Callable, args: tuple, on: str, options: dict[str, str], seed: int) -> Subject:
    """The function lowered for the target, with its arguments' numbers; its results' values are still to come."""
    where = target(on)
    leaves, tree = jax.tree.flatten(args)
    is_array = [_is_array(leaf) for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array) if array]

    def call(*given: Any) -> Any:
        rest = iter(given)
        return fn(*jax.tree.unflatten(tree, [next(rest) if array else leaf for leaf, array in zip(leaves, is_array)]))

    own = _own_mesh(call, args, arrays)
    mesh = _moved(own, compiler_devices(where), on)
    places = [_place(array, mesh) for array in arrays]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a, place in zip(arrays, places)]
    platform = platform_of_target(where)
    with cudnn_assumed():
        try:
            with _in_force(mesh):
                traced = jax.jit(call).trace(*shapes)
                lowered, ledger = traced.lower(lowering_platforms=(platform,)), _ledger(call, shapes)
        except ValueError as error:
            if not isinstance(own, Mesh) or ("mesh" not in str(error) and "incompatible devices" not in str(error)):
                raise
            exported, ledger = _as_written(call, arrays, own, platform)
            with _in_force(mesh):
                traced = jax.jit(exported).trace(*shapes)
                lowered = traced.lower(lowering_platforms=(platform,))
    results = jax.tree_util.tree_leaves_with_path(traced.out_info, is_leaf=is_named)
    if not results:
        raise UserError(
            "A function to prove must return arrays.",
            seen="none",
            where=f"`{getattr(fn, '__name__', type(fn).__name__)}`",
            fix="return what is to be compared",
        )
    empty = np.zeros(0)
    wanted = [
        Wanted(jax.tree_util.keystr(path, simple=True, separator=".") or "result", empty, typeof(leaf))
        for path, leaf in results
    ]
    random = numbers_of(seed)
    name, given = getattr(fn, "__name__", type(fn).__name__), [_numbers(a, random) for a in arrays]
    return Subject(name, where, mesh, lowered, options, given, places, wanted, ledger)


def _ledger(call: Callable, arrays: Sequence[Any]) -> Ledger:
    return ledger_of(trace(call, *arrays), refuse=False)  # what is wrong is to be found, not refused


def _as_written(call: Callable, arrays: list, own: Mesh, platform: str) -> tuple[Callable, Ledger]:
    """A function that names its own mesh, by `jax.shard_map(mesh=...)` or a sharding, as one for any such mesh.

    Args:
        call: it.
        arrays: its arguments.
        own: the mesh.
        platform: that it is lowered for.
    """
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_place(a, own)) for a in arrays]
    any_kernel = [export.DisabledSafetyCheck.custom_call("ALL")]  # it is compiled by the same versions, at once
    with _in_force(own):
        exported = export.export(jax.jit(call), platforms=[platform], disabled_checks=any_kernel)(*placed)
        return exported.call, _ledger(call, placed)


def _own_mesh(call: Callable, args: tuple, arrays: list) -> Mesh | AbstractMesh:
    """The mesh of the layout in force, of the arguments, or of the first `shard_map` or sharding in the function.

    Raises:
        UserError: there is none.
    """
    layout = current_layout()
    mesh = layout.mesh if layout is not None else mesh_of(args) or first_mesh(jax.make_jaxpr(call)(*arrays).jaxpr)
    if mesh is None:
        raise UserError(
            "A program that is compiled for several devices needs the sharding of its arrays.",
            seen="no array with a NamedSharding, no mesh in the function, and no layout in force",
            where="prove",
            fix="put an argument on a mesh with jax.device_put, or call inside `with layout:`",
        )
    return mesh


def _moved(mesh: Mesh | AbstractMesh, devices: list, on: str) -> Mesh:
    """A mesh on the target's devices.

    Raises:
        UserError: it is one of another number of devices.
    """
    if mesh.size != len(devices):
        sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise UserError(
            "The mesh must have as many devices as the target.",
            seen=f"{sizes} = {mesh.size} devices, {on} has {len(devices)}",
            where="on",
            fix=f"use a target of {mesh.size} devices, or a mesh of {len(devices)}",
        )
    placed = arrange(devices, list(mesh.axis_names), list(mesh.shape.values()))
    return Mesh(placed, mesh.axis_names, axis_types=mesh.axis_types)


def _place(array: Any, mesh: Mesh) -> NamedSharding:
    """Where an argument lies on the target; whole on every device if it does not say."""
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
            "Random numbers can stand only for floats: the meaning of integers is unknown.",
            seen=f"a ShapeDtypeStruct of {array.dtype}{list(array.shape)}",
            where="prove",
            fix="pass an array",
        )
    return random.normal(size=array.shape).astype(np.float32) / math.sqrt(max(array.shape[-1:], default=1))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _like(numbers: np.ndarray, leaf: Any) -> jax.Array:
    """An argument's numbers as JAX has them; a random key's are its words."""
    array = jax.numpy.asarray(numbers)
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))


def _computed(reference: Callable, args: tuple, subject: Subject, wide: type) -> Any:
    """What another function makes of the same arguments on one device of this machine, floats of 32 bits being wide."""
    leaves, tree = jax.tree.flatten(args)

    def compute() -> Any:
        given = (x.astype(wide) if x.dtype == np.float32 else x for x in subject.given)
        with jax.default_device(devices_of_jax("cpu")[0]), jax.enable_x64(wide is np.float64):
            filled = [_like(next(given), leaf) if _is_array(leaf) else leaf for leaf in leaves]
            return reference(*jax.tree.unflatten(tree, filled))

    with ThreadPoolExecutor(1) as outside:  # where no layout and no mesh is in force
        return outside.submit(compute).result()
