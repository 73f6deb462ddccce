"""The few private names of JAX that Trellis needs, each with the versions it was tried on."""

import contextlib
from collections.abc import Iterator

import jax


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
