"""What operations by name require of arguments that are not arrays: texts, counts, several names, functions."""

import contextlib
import operator
import re
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trellis._compat import is_tracer, refuses_slices
from trellis.errors import TrellisError, shortened
from trellis.named.axis import Axis, NamesError
from trellis.notation import TypeMismatch, typeof


def text_of(value: Any, what: str, fix: str) -> str:
    """Takes only a text.

    Raises:
        NamesError: it is none, as where an array stands in its place.
    """
    if not isinstance(value, str):
        raise NamesError(f"{what} takes a string, got {shown(value)}, in {what}: {fix}")
    return value


def count_of(value: Any, what: str, fix: str) -> int:
    """Takes only a whole number.

    Raises:
        NamesError: it is none, or one that is not known while the program is traced.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError as error:
        raise NamesError(f"{what} takes a whole number, got {shown(value)}, in {what}: {fix}") from error


def number_of(value: Any, option: str, what: str, fix: str) -> float:
    """Takes only a number that is known while the program is traced. The gradient of another would be lost.

    Raises:
        NamesError: it is none, or a value of the program.
    """
    try:
        if is_tracer(getattr(value, "array", value)) or isinstance(value, bool | str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        raise NamesError(
            f"{option} must be a number that is known while the program is traced, got {shown(value)}, in {what}: {fix}"
        ) from error


def numbers_of(what: str, fix: str, **given) -> list:
    """Single numbers, of which some may be named arrays without names.

    Raises:
        NamesError: one has dimensions, or is no number.
    """
    for word, value in given.items():
        if value is None or isinstance(value, str) or np.ndim(value):
            raise NamesError(f"{what} takes single numbers, got {word}={shown(value)}, in {what}: {fix}")
    return [getattr(value, "array", value) for value in given.values()]


def cap_of(value: Any, what: str, fix: str) -> float | None:
    """Takes only a soft cap that can be one, as `number_of` does, or None for none.

    Raises:
        NamesError: it is not above 0: with a cap of 0 all scores would be 0.
    """
    if value is None:
        return None
    cap = number_of(value, "logit_softcap", what, fix)
    if not cap > 0:
        raise NamesError(f"logit_softcap must be more than 0, got {cap}, in {what}: pass None for no cap")
    return cap


_WORDS = r"(?:[^.]|\.\S)*"
_REFUSALS = (
    r"does not accept|must be integers|requires ndarray|not inexact|not compatible with finfo|complex value|"
    r"complex(?:-valued)? inputs|Invalid integer data type|no available implicit dtype promotion|"
    r"Cannot interpret 'key|is not a valid dtype for JAX|Unsupported dtype|do(?:es)? not accept dtypes|"
    r"cannot be raised to negative|must have a floating dtype|must be a float|only accepts integer dtypes|"
    r"not implemented for decimals"
)
_OF_A_DTYPE = re.compile(f"{_WORDS}(?:{_REFUSALS}){_WORDS}")


@contextlib.contextmanager
def dtypes_of_jax(args, what: str, fix: str = "cast with .astype") -> Generator[None]:
    """Puts the refusal of a dtype by JAX's own operation into our words.

    Raises:
        NamesError: it takes none of that dtype, or no number as large.
    """
    try:
        yield
    except OverflowError as error:
        raise NamesError(
            f"a number must be in the range of the dtype that it is given, got {' and '.join(map(shown, args))} in "
            f"{what}: pass one that is"
        ) from error
    except (TypeError, ValueError, NotImplementedError) as error:
        if not (said := _OF_A_DTYPE.search(str(error))):
            raise
        refuse_keys(args, what)
        raise NamesError(
            f"an operation must have operands of dtypes that JAX accepts, got {' and '.join(map(shown, args))} in "
            f"{what} ({said[0].strip()}): {fix}"
        ) from error


def keeps_dtype(value: Any, x: Any, rule: str, what: str) -> None:
    """Of a whole number in floats there is nothing to lose; of a float in whole numbers there is.

    Raises:
        TypeMismatch: the array's dtype cannot hold the value.
    """
    kinds = [jnp.complexfloating, jnp.inexact, jnp.integer, jnp.bool_]
    rank = lambda dtype: next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), -1)
    plain = not hasattr(value, "dtype")
    if rank(jnp.result_type(value) if plain else value.dtype) < rank(x.dtype):
        fix = "pass such a number, or cast the array" if plain else "cast the value"
        raise TypeMismatch(
            f"{rule} must keep the dtype of its array, got {shown(value)} for {typeof(x)}, in {what}: {fix} with "
            ".astype"
        )


_OF_KEYS = "draw numbers with them, with trellis.random, or take their bits, with jax.random.key_data"


def has_keys(x) -> bool:
    """Whether it is an array of random keys."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):  # as almost always: a key's is none of NumPy's
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def refuse_keys(args, what: str, fix: str = _OF_KEYS) -> None:
    """Takes only numbers.

    Raises:
        NamesError: an array holds random keys.
    """
    for x in args:
        if has_keys(x):
            raise NamesError(f"an operation on numbers takes no random keys, got {shown(x)} in {what}: {fix}")


def of_shape(shape: tuple[int, ...], made, what: str):
    """What a function that keeps its operands' dimensions has made of plain arrays.

    Raises:
        NamesError: an array with other dimensions, or none.
    """
    if getattr(made, "shape", None) != shape:
        raise NamesError(
            f"a lifted function must keep the dimensions of its operands, got {shown(made)} of {shape}, in {what}: "
            "take off what it changes, or name the result of the plain arrays with named(...)"
        )
    return made


def unplaced(error: Exception) -> str | None:
    """What JAX says where its types do not know how a result of sliced arrays is sliced; None for any other error."""
    said, *rest = str(error).split("\n")
    if isinstance(error, TrellisError):
        return None
    if re.match("(cond|switch) branches must have equal output types", said):  # and differ in how they are sliced
        differ = [line.strip() for line in rest if "@" in line]
        return f"{said.rstrip('.:')}: {differ[0]}" if differ else None
    loops = ("scan body function", "Mapped away dimension", "0th dimension of all xs")
    known = said.startswith(("Resource axis", *loops))
    known |= said.startswith("Incompatible types for broadcasting") and "@" in said
    return said.rstrip(".:") if known or refuses_slices(error) else None


@contextlib.contextmanager
def slices_of_jax(args, what: str) -> Generator[None]:
    """Puts into our words that JAX cannot place the results of a user's function of sliced arrays.

    Raises:
        NamesError: JAX's types refuse the function.
    """
    try:
        yield
    except Exception as error:
        if not (said := unplaced(error)):
            raise
        raise NamesError(
            "JAX can compute a function of slices only if it knows how the result is sliced, got "
            f"{' and '.join(map(shown, args))} in {what} ({shortened(said, 160)}): gather them first, with "
            "shard(x, {}), build it from named operations, or let each device compute its own slices, with "
            "trellis.shard_map"
        ) from error


def ordered(x: Any, what: str) -> None:
    """Refuses an argument whose values have no order. JAX orders complex numbers by their real parts first, if one
    device has them all; XLA has no such reduction over devices.

    Raises:
        NamesError: it is of complex numbers or random keys.
    """
    refuse_keys((x,), what)
    if jnp.issubdtype(getattr(x, "dtype", jnp.float32), jnp.complexfloating):
        raise NamesError(f"complex numbers have no order, got {shown(x)}, in {what}: use real(x) or abs(x)")


def mapping_of(value: Any, what: str, fix: str) -> Mapping:
    """Takes only a dict.

    Raises:
        NamesError: it is none.
    """
    if not isinstance(value, Mapping):
        raise NamesError(f"{what} takes a dict with names as keys, got {shown(value)}, in {what}: {fix}")
    return value


def names_of(value: Any, what: str, fix: str) -> list:
    """Takes a name, names in a text, or several names, as a list; their form is not checked.

    Raises:
        NamesError: it is none of these.
    """
    if isinstance(value, str):
        return value.split()
    if isinstance(value, Axis):
        return [value]
    if not isinstance(value, Iterable) or hasattr(value, "dtype"):
        raise NamesError(f"{what} takes names, got {shown(value)}, in {what}: {fix}")
    return list(value)


def function_of(value: Any, what: str, fix: str):
    """Takes only a function.

    Raises:
        NamesError: it is none.
    """
    if not callable(value):
        raise NamesError(f"{what} takes a function, got {shown(value)}, in {what}: {fix}")
    return value


def dtype_of(value: Any, what: str):
    """Takes only a dtype that JAX's arrays have.

    Raises:
        NamesError: it is none.
    """
    try:
        dtype = jnp.dtype(value)
        if value is None or not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
            raise TypeError
    except (TypeError, ValueError) as error:
        raise NamesError(
            f"{what} takes a dtype, got {shown(value)}, in {what}: write jnp.bfloat16, or 'bfloat16'"
        ) from error
    return dtype


def shown(value: Any) -> str:
    """How an error shows an argument: arrays by their type, others as they are written."""
    return typeof(value) if hasattr(value, "dtype") and hasattr(value, "ndim") else shortened(repr(value), 80)
