"""`grad` and `value_and_grad` of functions that give a named scalar."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from trellis._compat import mapped_over
from trellis.named.arguments import function_of, shown
from trellis.named.array import NamedArray, is_named
from trellis.named.axis import NamesError
from trellis.named.operand import no_copies, to_differentiate
from trellis.named.placing import of_each_device
from trellis.named.refusals import raise_in_our_words, raise_of_derivatives
from trellis.notation import typeof


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
        TypeMismatch: JAX does not differentiate what a manual function makes of a copy, or a loop that ends by a
            condition; or a `jax.custom_vjp` or `jax.custom_jvp` gives a gradient or a tangent that lies elsewhere than
            it belongs.
        MeshError: an operation on plain arrays in slices, whose result lies nobody knows where.
    """
    function_of(fn, "value_and_grad", "write value_and_grad(lambda x: (x * x).sum())(x)")
    names: list[bool] = []

    def plain(*args, **kwargs):
        out = fn(*args, **kwargs)
        value, aux = out if has_aux else (out, None)
        if is_named(value) and value.names:
            raise NamesError(
                f"only a scalar can be differentiated, got {typeof(value)}, in the gradient of `{_name_of(fn)}`: sum "
                "or average over its names"
            )
        names.append(is_named(value))
        value = value.array if is_named(value) else value
        _check_value(value, fn)
        return no_copies(value) if isinstance(value, jax.Array) else value, aux

    differentiated = jax.value_and_grad(plain, argnums, has_aux=True)

    def call(*args, **kwargs):
        _check_arguments(args, argnums, fn)
        try:
            (value, aux), gradients = differentiated(*_of_each_device(args, argnums), **kwargs)
        except Exception as error:
            if mapped_over():  # the map has its own words for what JAX says of slices
                raise_of_derivatives(error, _name_of(fn))
            else:
                raise_in_our_words(error, _name_of(fn), "grad")
            raise
        value = NamedArray(value, ()) if names.pop() else value
        return ((value, aux) if has_aux else value), gradients

    return call


def _of_each_device(args: tuple, argnums: int | tuple[int, ...]) -> list:
    """The arguments, what is differentiated as it is inside of a `vmap` over slices, and on no device of its own."""
    own = lambda x: of_each_device(x) if is_named(x) else x
    move = lambda x: own(to_differentiate(x, "grad"))
    moved = list(args)
    for number in argnums if isinstance(argnums, tuple | list) else (argnums,):
        moved[number] = jax.tree.map(move, args[number], is_leaf=is_named)
    return moved


def _check_value(value: Any, fn: Callable) -> None:
    """A gradient is that of one real number."""
    dtype = _dtype_of(value)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise NamesError(
            f"only a real number can be differentiated, got {shown(value)}, in the gradient of `{_name_of(fn)}`: "
            "return a floating-point loss"
        )


def _check_arguments(args: tuple, argnums: int | tuple[int, ...], fn: Callable) -> None:
    """What is differentiated is there, and holds floats."""
    numbers = argnums if isinstance(argnums, tuple | list) else (argnums,)
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise NamesError(
                f"argnums must be the number of a positional argument, from 0, got {number} for {len(args)}, in the "
                f"gradient of `{_name_of(fn)}`: use that of an argument passed by position"
            )
        for leaf in jax.tree.leaves(args[number], is_leaf=is_named):
            array = leaf.array if is_named(leaf) else leaf
            if array is None or hasattr(array, "__jax_array__"):
                continue
            dtype = _dtype_of(array)
            if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
                raise NamesError(
                    f"only floats can be differentiated, got {shown(leaf)} in argument {number}, in the gradient of "
                    f"`{_name_of(fn)}`: take it out of the argument, or cast it with astype"
                )
    if len({number % len(args) for number in numbers}) < len(numbers):
        raise NamesError(
            f"argnums must have each argument once, got {argnums}, in the gradient of `{_name_of(fn)}`: remove one"
        )


def _dtype_of(value: Any) -> Any:
    """Of an array or a number of Python's; None of anything else."""
    return jnp.result_type(value) if isinstance(value, int | float | complex) else getattr(value, "dtype", None)


def _name_of(fn: Callable) -> str:
    return getattr(fn, "__name__", "the function")


def grad(fn: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """`jax.grad` for a function whose value may be a named array without names (see `value_and_grad`)."""
    function_of(fn, "grad", "write grad(lambda x: (x * x).sum())(x)")

    def call(*args, **kwargs):
        value, gradients = value_and_grad(fn, argnums, has_aux)(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return call
