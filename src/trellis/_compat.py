"""The few private names of JAX that Trellis needs, each with the versions it was tried on."""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend.core import take_current_trace
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trellis.frames import in_a_library, users_line


def is_tracer(x) -> bool:
    """Whether `x` stands for a value inside a trace. Public since JAX 0.4."""
    return isinstance(x, Tracer)


def mapped_over() -> frozenset[str]:
    """The explicit mesh axes over which the `vmap`s around this code slice what they map, also in a backward rule, by
    private names of JAX 0.10.2 to 0.12.0."""
    mapped = (getattr(trace, "axis_data", None) for trace in _traces_around())
    return frozenset(axis for data in mapped for axis in getattr(data, "explicit_mesh_axis", None) or ())


def maps_around() -> bool:
    """Whether this code is within a `vmap`, by a private name of JAX 0.10.2 to 0.12.0."""
    return any(getattr(trace, "axis_data", None) is not None for trace in _traces_around())


def derivatives_around() -> int:
    """How many derivatives are taken around this code, one in another, by private names of JAX 0.10.2 to 0.12.0."""
    return sum(type(trace).__name__ in ("JVPTrace", "LinearizeTrace") for trace in _traces_around())


def _traces_around() -> Iterator[Any]:
    """The trace in force, and those that it stands in, the innermost first."""
    with take_current_trace() as trace:
        pass
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def in_a_rule(equation: Any) -> bool:
    """Whether an equation was made by a rule of a `jax.custom_vjp`, not by JAX's own transposition.

    JAX gives what a backward rule makes the frames of the call whose gradient it is, in JAX 0.10.2 to 0.12.0.
    """
    frames = getattr(equation.source_info.traceback, "frames", ())
    return any(f.file_name.endswith("custom_derivatives.py") and "VJP" in f.function_name for f in frames)


def refuses_copies(error: BaseException) -> bool:
    """Whether JAX refused to take copies (`~`) into a `shard_map`, as in a `vmap` over a name that is whole.

    By the words of its error, in JAX 0.10.2 to 0.12.0.
    """
    return maps_no_copies(error) or (isinstance(error, ValueError) and "dangerous when PartitionSpec" in str(error))


def refuses_slices(error: BaseException) -> bool:
    """Whether JAX's types do not know how an operation's result is sliced; the error's class has no public name."""
    return type(error).__name__ == "ShardingTypeError"


def maps_no_copies(error: BaseException) -> bool:
    """Whether JAX lacked a rule to map an operation that begins or ends a copy or a pending sum.

    The error then has no words, in JAX 0.10.2 to 0.12.0, and the user's own code did not raise it.
    """
    if not isinstance(error, NotImplementedError) or str(error).partition(" ")[0] not in ("", "Please"):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return in_a_library(last.filename) or not (last.line or "").startswith("raise ")


def of_groups(error: BaseException) -> bool:
    """Whether JAX refused a collective among groups of devices, which it does without words in JAX 0.10.2 to 0.12.0."""
    if not isinstance(error, NotImplementedError) or str(error):
        return False
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    return last.f_locals.get("axis_index_groups") is not None


def unknown_axis(error: BaseException, axes: Collection[str]) -> str | None:
    """The name that a collective of JAX was given and that is none of these mesh axes; None if the error has none.

    Some errors give it (`unbound axis name`). Others are assertions without words, in JAX 0.10.2 to 0.12.0: then it is
    read from the line of the call. JAX 0.12.0's `pmax` counts it among the axes along which a value is alike.
    """
    if isinstance(error, NameError):
        return said[1] if (said := re.search(r"unbound axis name: (\w+)", str(error))) else None
    if mixed := re.search(r"can only accept axis_name .*axes: \(([^)]*)\) and", str(error)):
        return next((name for name in re.findall(r"\w+", mixed[1]) if name not in axes), None)
    if not isinstance(error, AssertionError) or str(error):
        return None
    line = (frame.line or "") if (frame := users_line(error)) else ""
    called = re.search(r"\b(p(sum|mean|max|min|permute|shuffle|cast|vary)|psum_scatter|all_to_all)\(.*", line)
    names = re.findall(r"""["'](\w+)["']""", called[0]) if called else []
    return next((name for name in names if name not in axes), None)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many inputs of a `scan` are constants, and how many it carries from turn to turn.

    Its parameters have both numbers in JAX 0.10.2, and a tree of constants, carries and stacks in 0.11.0 to 0.12.0.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carries, _ = params["ft_in"].unpack()
    return len(constants), len(carries)


def bind(primitive, args, params):
    """Applies a primitive to values; if it stands for a function (`searchsorted` in JAX 0.12.0), applies the function.

    Such a primitive is typed by the mesh on which it was traced. How JAX marks one is private.
    """
    if primitive.name == "call_hi_primitive":
        return primitive.to_lojax(*args, **params)
    return primitive.bind(*args, **params)


def keep_mapped_axes_sharded() -> None:
    """Makes a `shard_map` under a `vmap` over explicit mesh axes keep its operands sliced over them.

    JAX 0.10.2 lowers it with the mapped dimensions whole, so XLA gathers them; 0.12 does what is done here. If the
    private function is not that of 0.10.2, nothing changes.
    """
    import inspect

    module: Any = importlib.import_module("jax._src.shard_map")
    original = getattr(module, "_shardy_shard_map_sharding", None)
    if original is None or list(inspect.signature(original).parameters)[-1] != "aval_in":
        return

    def sharding(ctx, mesh, manual_axes, spec, aval):
        typed = AxisType.Auto not in aval.sharding.mesh.axis_types
        return original(ctx, mesh, manual_axes, aval.sharding.spec if typed else spec, aval)

    module._shardy_shard_map_sharding = sharding


def zeros_in_their_states() -> None:
    """Makes JAX's zeros and unwritten stacks pending sums and copies where their types in a `shard_map` say so.

    JAX 0.10.2 to 0.12.0 leave these states out. Then gradients of what a loop or a branch takes of copies, and stacks
    of pending sums, are refused. If the private names are missing, nothing changes.
    """

    def in_states(make):
        @functools.wraps(make)
        def made(*args):
            out, mat = make(*args), getattr(args[-1], "mat", None)
            if mat is not None and (pending := tuple(mat.unreduced)):
                out = jax.lax.pcast(jax.lax.pcast(out, pending, to="varying"), pending, to="unreduced")
            return jax.lax.pcast(out, tuple(mat.reduced), to="reduced") if mat is not None and mat.reduced else out

        return made

    zeros: Any = getattr(importlib.import_module("jax._src.ad_util"), "aval_zeros_likers", {})
    stacks: Any = vars(importlib.import_module("jax._src.lax.control_flow.loops"))
    for makers, name in ((zeros, ShapedArray), (stacks, "_empty_array")):
        if name in makers and not hasattr(makers[name], "__wrapped__"):
            makers[name] = in_states(makers[name])


def of_states(name: str) -> Any:
    """The JAX primitive of this name that begins or ends pending sums or copies, in JAX 0.10.2 to 0.12.0, or None."""
    module: Any = importlib.import_module("jax._src.lax.parallel")
    return getattr(module, name, getattr(module.core, name, None))


def manual_beside_explicit_axes() -> None:
    """Mends what JAX lacks in a `shard_map` that makes only some mesh axes manual, also inside another."""
    _scatter_beside_explicit_axes()
    _keep_residuals_of_own_axes()


def _scatter_beside_explicit_axes() -> None:
    """Lets JAX's `psum_scatter`, and the gradient of its `all_gather`, be compiled where other mesh axes are explicit.

    JAX 0.10.2 to 0.12.0 make the type of one number from the operand's, with its slices, and stop. If the private
    function is missing, nothing changes.
    """
    from jax.interpreters import mlir

    module: Any = importlib.import_module("jax._src.lax.parallel")
    original = getattr(module, "_reduce_scatter_lowering", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def lowering(add, ctx, x, **named):
        plain = lambda aval: ShapedArray(aval.shape, aval.dtype)
        inside = ctx.replace(avals_in=[*map(plain, ctx.avals_in)], avals_out=[*map(plain, ctx.avals_out)])
        return original(add, inside, x, **named)

    module._reduce_scatter_lowering = lowering
    mlir.register_lowering(module.reduce_scatter_p, functools.partial(lowering, jax.lax.add_p))


def _keep_residuals_of_own_axes() -> None:
    """Lets JAX differentiate one `shard_map` inside another: what is kept for the gradient is sliced over its own axes.

    JAX 0.10.2 slices it over the outer one's too, and stops. Without the private method nothing changes.
    """
    arrays: Any = ShapedArray
    original = getattr(arrays, "nospec", None)
    if original is None or original.__module__ == __name__:
        return

    def nospec(self, mesh, check_vma, all_names):
        kept, own = original(self, mesh, check_vma, all_names), frozenset(all_names)
        axes = tuple(a for a in all_names if not check_vma or a in self.mat.varying)
        return PartitionSpec(*([axes] if axes else []), unreduced=kept.unreduced & own, reduced=kept.reduced & own)

    arrays.nospec = nospec


def mapped_in_any_state() -> None:
    """Lets `jax.vmap` map partial sums and copies.

    JAX 0.10.2 and 0.12.0 ask how the mapped dimension is sliced in a way that they refuse of such arrays themselves. If
    the private function is missing, nothing changes.
    """
    module: Any = importlib.import_module("jax._src.api")
    original = getattr(module, "_mapped_axis_spec", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    def stateless(x: Any) -> Any:
        sharding = getattr(getattr(x, "aval", None), "sharding", None)
        if not isinstance(sharding, NamedSharding) or not (sharding.spec.unreduced or sharding.spec.reduced):
            return x
        sliced = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sliced)

    @functools.wraps(original)
    def mapped_axis(args, dims):
        return original([stateless(x) for x in args], dims)

    module._mapped_axis_spec = mapped_axis


def sums_of_own_slices() -> None:
    """Makes XLA slice what a partial sum is of as its type says.

    XLA slices each value as suits what reads it, except where JAX states how. JAX 0.10.2 states it of what most
    operations return, and not of `round`, `sign` and comparisons. If such a value is gathered for another reader, and a
    product of it is stated to be a partial sum, XLA gathers first, multiplies all, and sums what is whole
    (docs/published-bugs.md, 42). JAX 0.12.0 is right.

    What a function returns that is called twice lies alike in both calls for libtpu. If one of them is whole and
    the other is made a partial sum, the latter is taken for one, and what every device holds whole is summed (44; JAX
    0.12.0 is right).

    If the private names are missing, nothing changes.
    """
    lax: Any = importlib.import_module("jax._src.lax.lax")
    sharding: Any = importlib.import_module("jax._src.pjit")
    inner: Any = importlib.import_module("jax._src.interpreters.mlir")

    def as_typed(rule):
        def lowered(ctx, *operands, **params):
            if ctx.avals_out[0].sharding.spec.unreduced:
                operands = [inner.lower_with_sharding_in_types(ctx, *pair) for pair in zip(operands, ctx.avals_in)]
            return rule(ctx, *operands, **params)

        return lowered

    lower_by((lax.dot_general_p, lax.reduce_sum_p, getattr(sharding, "reshard_p", None)), as_typed)


def lower_by(primitives: Collection[Any], wrap: Callable) -> None:
    """Wraps the rules by which primitives are lowered, once. If the private names are missing, nothing changes."""
    inner: Any = importlib.import_module("jax._src.interpreters.mlir")
    for table in (getattr(inner, "_lowerings", {}), *getattr(inner, "_platform_specific_lowerings", {}).values()):
        for primitive in primitives:
            entry = table.get(primitive)
            if entry is not None and getattr(entry.rule, "__module__", "") != wrap.__module__:
                table[primitive] = dataclasses.replace(entry, rule=wrap(entry.rule))


def choose_among_slices() -> None:
    """Lets a `cond` whose predicate is mapped choose among values in slices, also in a backward rule.

    JAX 0.10.2 to 0.12.0 compute all branches and select. They broadcast the predicate as if the values were whole, and
    the types refuse that. If these private functions are missing, nothing changes.
    """
    module = importlib.import_module("jax._src.lax.control_flow.conditionals")

    def lying_alike(select):
        @functools.wraps(select)
        def selected(predicate, *cases):
            sharding = jax.typeof(cases[0]).sharding
            mesh = getattr(sharding, "mesh", None)
            if mesh is not None and not mesh.empty and all(kind == AxisType.Explicit for kind in mesh.axis_types):
                whole = jax.lax.broadcast_in_dim(predicate, cases[0].shape, tuple(range(predicate.ndim)))
                predicate = jax.reshard(whole, NamedSharding(mesh, jax.P(*sharding.spec.partitions)))
            return select(predicate, *cases)

        return selected

    for name in ("_bcast_select", "_bcast_select_n"):
        select = getattr(module, name, None)
        if select is not None and not hasattr(select, "__wrapped__"):
            setattr(module, name, lying_alike(select))


def keep_programs_that(load_right: Callable[[Any], bool]) -> bool:
    """Keeps compiled programs for which this is false out of JAX's compilation cache: neither stored nor loaded.

    The functions that store and load are private, in JAX 0.10.2 to 0.12.0. Returns whether they exist.

    Args:
        load_right: of a compiled program (JAX's `LoadedExecutable`) whether it computes the same when it was loaded.
    """
    module: Any = importlib.import_module("jax._src.compilation_cache")
    keep, take = (getattr(module, f"{verb}_executable_and_time", None) for verb in ("put", "get"))
    if keep is None or take is None:
        return False

    @functools.wraps(keep)
    def keep_right(key, name, executable, *rest, **named):
        if load_right(executable):
            keep(key, name, executable, *rest, **named)

    @functools.wraps(take)
    def take_right(*args, **named):
        executable, seconds = take(*args, **named)
        return (None, None) if executable is not None and not load_right(executable) else (executable, seconds)

    if not hasattr(keep, "__wrapped__"):
        module.put_executable_and_time, module.get_executable_and_time = keep_right, take_right
    return True


# In JAX 0.12 the collectives that XLA's partitioner inserts have the name and source line of what made their operand;
# in 0.10.2, those of the move that asked for them.
_COLLECTIVES_TAKE_THE_NAME_OF_THEIR_OPERAND = jax.__version_info__ >= (0, 11)


def move(array, sharding):
    """`jax.reshard` in explicit mode; its name scope and source line reach the compiled program in any JAX.

    A move to where the array already is moves nothing; it is the operand that gives its name.
    """
    if _COLLECTIVES_TAKE_THE_NAME_OF_THEIR_OPERAND:
        array = jax.reshard(array, jax.typeof(array).sharding)
    return jax.reshard(array, sharding)


@contextlib.contextmanager
def cudnn_assumed() -> Generator[None]:
    """Lets cuDNN attention be traced, and compiled for a GPU that is not here, as if cuDNN were installed.

    The check is a function of a private module, in JAX 0.10.2 to 0.12.0; if it is missing, nothing changes.
    """
    try:
        module = _cudnn()
        original = module.check_cudnn_version
    except (ImportError, AttributeError):
        yield
        return
    module.check_cudnn_version = lambda: 91000
    try:
        yield
    finally:
        module.check_cudnn_version = original


# Whether the program that is being lowered will be compiled with sums in one order (`sums_in_one_order`).
_IN_ONE_ORDER: contextvars.ContextVar[bool] = contextvars.ContextVar("in_one_order", default=False)


@contextlib.contextmanager
def sums_in_one_order(asked: bool) -> Generator[None]:
    """Within it, programs are lowered for a compiler that is asked for sums in one order on GPUs, if it is.

    XLA (of JAX 0.10.2 to 0.12.0) writes into the first of several equal calls of cuDNN's attention that its gradient is
    to be summed in one order, takes the others for calls that it has compiled, and does not find them where the program
    runs (docs/published-bugs.md, 41). If all of them say so already, it does.
    """
    before = _IN_ONE_ORDER.set(asked)
    try:
        yield
    finally:
        _IN_ONE_ORDER.reset(before)


@functools.cache
def _cudnn() -> Any:
    """JAX's module of cuDNN's attention, whose calls say what `sums_in_one_order` says."""
    module: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    config = getattr(module, "create_dot_product_attention_backend_config_base", None)
    if config is None:
        return module

    @functools.wraps(config)
    def with_order(*args, **kwargs):
        made = config(*args, **kwargs)
        if _IN_ONE_ORDER.get():
            made["cudnn_fmha_backend_config"]["force_deterministic"] = True
        return made

    module.create_dot_product_attention_backend_config_base = with_order
    return module


def _cudnn_settings(q, mask, causal: bool, window: int | None, scale: float) -> tuple[Any, dict[str, Any]]:
    """Hidden keys as scores to add, and the kernel's settings."""
    fused = _cudnn()
    none = jnp.zeros(0, q.dtype)
    # As JAX does: cuDNN subtracts large scores, so they are not as large as they can be.
    hidden = none if mask is None else jnp.where(mask, jnp.zeros((), q.dtype), fused.get_large_negative_number(q.dtype))
    kind = fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK
    settings = dict(
        scale=scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(mask is not None, False),
        mask_type=kind,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )
    if "score_mod" in inspect.signature(fused._dot_product_attention_fwd_impl).parameters:  # from JAX 0.12 on
        settings["score_mod"] = None
    return (hidden, *[none] * 6), settings


def cudnn_forward(q, k, v, *, mask, causal: bool, window: int | None, scale: float) -> tuple[jax.Array, jax.Array]:
    """The result, `batch pos heads head_dim`, and the log of the sums, `f32["batch heads pos"]`.

    `jax.nn.dot_product_attention` rounds the log to bfloat16, and its gradient takes none. The primitives are private,
    in JAX 0.10.2 to 0.12.0.
    """
    rest, settings = _cudnn_settings(q, mask, causal, window, scale)
    _cudnn().check_cudnn_version()
    out, log_sum = _cudnn()._dot_product_attention_fwd_p_wrapper.bind(q, k, v, *rest, is_training=True, **settings)
    return out, log_sum


def cudnn_backward(q, k, v, out, log_sum, d_out, *, mask, causal: bool, window: int | None, scale: float):
    """The gradients of a tile; `out` and `log_sum` are the result and the log of the sums over all keys."""
    rest, settings = _cudnn_settings(q, mask, causal, window, scale)
    return _cudnn()._dot_product_attention_bwd_p_wrapper.bind(q, k, v, *rest, log_sum, out, d_out, **settings)[:3]


@contextlib.contextmanager
def within_equation(equation) -> Generator[None]:
    """Gives what is traced inside it the source line and the name scopes of an equation.

    `jax.core.eval_jaxpr` does so by a private module, in JAX 0.10.2 to 0.12.0; if it is missing, scopes are lost.
    """
    try:
        info = importlib.import_module("jax._src.source_info_util")
        stack = info.current_name_stack() + equation.source_info.name_stack
        context = info.user_context(equation.source_info.traceback, name_stack=stack)
    except (ImportError, AttributeError):
        context = contextlib.nullcontext()
    with context:
        yield


def full_text(program: jax.stages.Compiled | jax.stages.Lowered | str) -> str:
    """A program's HLO with every number of its constants; `as_text` leaves them out if there are many.

    Args:
        program: a compiled one, or one that is not compiled and not partitioned yet; a text is returned as it is.

    The printer's options are in the private module `jaxlib._hlo`, in JAX 0.10.2 to 0.12.0.
    """
    if isinstance(program, str):
        return program
    options = importlib.import_module("jaxlib._hlo").HloPrintOptions()
    options.print_large_constants = True
    if isinstance(program, jax.stages.Lowered):
        return program.compiler_ir(dialect="hlo").get_hlo_module().to_string(options)
    (module,) = program.runtime_executable().hlo_modules()
    return module.to_string(options)


def kept_arguments(compiled: jax.stages.Compiled) -> tuple[int, ...]:
    """Which of a function's flat arguments its compiled program takes: those that nothing depends on are dropped.

    `_executable._kept_var_idx` is private; it exists in JAX 0.10.2 to 0.12.0.
    """
    executable: Any = compiled._executable
    return tuple(sorted(executable._kept_var_idx))
