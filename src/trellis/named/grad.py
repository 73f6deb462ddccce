"""`grad` and `value_and_grad` of functions that give a named scalar."""

import re
from collections.abc import Callable

import jax

from trellis.mesh.manual.refusals import raise_of_gradient
from trellis.named.array import NamedArray, is_named
from trellis.named.axis import NamesError
from trellis.named.operand import no_copies
from trellis.notation import TypeMismatch, typeof

# The mesh axes of a dimension, as JAX writes a type.
_SLICES = re.compile(r"@(\([^)]*\)|\w+)")


def value_and_grad(fn: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """`jax.value_and_grad` for a function whose value may be a named array without names, such as `loss.sum()`.

    Gradients of named arrays are named arrays.

    >>> import jax.numpy as jnp
    >>> from trellis.named import named
    >>> value, gradient = value_and_grad(lambda x: (x * x).sum())(named(jnp.arange(3.0), "embed"))
    >>> print(f"{value:.1f} {gradient.tolist()}")
    5.0 [0.0, 2.0, 4.0]

    Args:
        fn: gives one number, or with `has_aux` a number and anything else.
        argnums: the arguments that are differentiated.
        has_aux: whether it gives something beside the number.

    Raises:
        NamesError: the value has names left.
        TypeMismatch: JAX does not differentiate what a manual function makes of a copy; or a `jax.custom_vjp` gives a
            gradient that lies elsewhere than its argument.
    """
    names: list[bool] = []

    def plain(*args, **kwargs):
        out = fn(*args, **kwargs)
        value, aux = out if has_aux else (out, None)
        if is_named(value) and value.names:
            raise NamesError(
                f"a gradient is that of one number, got {typeof(value)}, in the gradient of "
                f"`{getattr(fn, '__name__', 'the function')}`: sum over its names, or take their mean"
            )
        names.append(is_named(value))
        value = value.array if is_named(value) else value
        return no_copies(value) if isinstance(value, jax.Array) else value, aux

    differentiated = jax.value_and_grad(plain, argnums, has_aux=True)

    def call(*args, **kwargs):
        try:
            (value, aux), gradients = differentiated(*args, **kwargs)
        except (ValueError, NotImplementedError) as error:
            raise_of_gradient(error, getattr(fn, "__name__", "the function"))
            _raise_of_a_rule(error, getattr(fn, "__name__", "the function"))
            raise
        value = NamedArray(value, ()) if names.pop() else value
        return ((value, aux) if has_aux else value), gradients

    return call


def _raise_of_a_rule(error: Exception, name: str) -> None:
    """Puts JAX's error about a backward rule whose gradient is not where its argument is into our words."""
    found = re.search(r"rule produced an output of type (\S+) corresponding to an input of type (\S+)", str(error))
    given, wanted = found.groups() if found else ("", "")
    if given != wanted and _SLICES.sub("", given) == _SLICES.sub("", wanted):
        raise TypeMismatch(
            f"a backward rule of one's own gives each gradient where its argument lies, got {given} for an argument of "
            f"{wanted}, in the gradient of `{name}`: end the rule with shard(gradient) for a parameter's, and "
            "shard(gradient, 'compute') for an activation's"
        ) from error


def grad(fn: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """`jax.grad` for a function whose value may be a named array without names (see `value_and_grad`)."""

    def call(*args, **kwargs):
        value, gradients = value_and_grad(fn, argnums, has_aux)(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return call
