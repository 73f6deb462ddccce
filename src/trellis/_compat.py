"""The few private names of JAX that Trellis needs, each with the versions it was tried on."""

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AxisType


def is_tracer(x) -> bool:
    """Whether `x` stands for a value inside a trace. Public since JAX 0.4."""
    return isinstance(x, jax.core.Tracer)


def same_trace(a, b) -> bool:
    """Whether two tracers belong to one trace, so that one may be kept beside the other.

    `Tracer._trace` is private; it exists in JAX 0.10.2 to 0.12.0.
    """
    return is_tracer(a) and is_tracer(b) and getattr(a, "_trace", a) is getattr(b, "_trace", b)


@contextlib.contextmanager
def cudnn_assumed(version: int = 91000) -> Iterator[None]:
    """Lets cuDNN attention be traced, and compiled for a GPU that is not here, as if cuDNN were installed.

    The check is a function of a private module, in JAX 0.10.2 to 0.12.0; where it is not, nothing changes.
    """
    import importlib

    try:
        module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        original = module.check_cudnn_version
    except (ImportError, AttributeError):
        yield
        return
    module.check_cudnn_version = lambda: version
    try:
        yield
    finally:
        module.check_cudnn_version = original


def keep_mapped_axes_sharded() -> None:
    """Makes a `shard_map` under a `vmap` over explicit mesh axes keep its operands sliced over these.

    JAX 0.10.2 lowers it with the mapped dimensions whole, so that XLA gathers them; 0.12 does what is done here. Where
    the private function is another one than 0.10.2's, nothing changes.
    """
    import importlib
    import inspect

    module = importlib.import_module("jax._src.shard_map")
    original = getattr(module, "_shardy_shard_map_sharding", None)
    if original is None or list(inspect.signature(original).parameters)[-1] != "aval_in":
        return

    def sharding(ctx, mesh, manual_axes, spec, aval):
        typed = AxisType.Auto not in aval.sharding.mesh.axis_types
        return original(ctx, mesh, manual_axes, aval.sharding.spec if typed else spec, aval)

    module._shardy_shard_map_sharding = sharding


def full_text(program: jax.stages.Compiled | jax.stages.Lowered) -> str:
    """A program's HLO with every number of its constants, which `as_text` leaves out where they are many.

    Args:
        program: a compiled one, or one that is not compiled and not partitioned yet.

    The printer's options are in the private module `jaxlib._hlo`, in JAX 0.10.2 to 0.12.0.
    """
    import importlib

    options = importlib.import_module("jaxlib._hlo").HloPrintOptions()
    options.print_large_constants = True
    if isinstance(program, jax.stages.Lowered):
        return program.compiler_ir(dialect="hlo").get_hlo_module().to_string(options)
    (module,) = program.runtime_executable().hlo_modules()
    return module.to_string(options)


def kept_arguments(compiled: jax.stages.Compiled) -> tuple[int, ...]:
    """Which of a function's flat arguments its compiled program has: those that nothing depends on are dropped.

    `_executable._kept_var_idx` is private; it exists in JAX 0.10.2 to 0.12.0.
    """
    return tuple(sorted(compiled._executable._kept_var_idx))
