"""What the interpreter computes with: one array for all devices, and which devices take part.

An array of HLO is a numpy array with one more dimension in front, the devices: `device dim ...`. If it is the same on
all of them, that dimension has size 1, so that what all devices compute alike is computed once. A tuple is a tuple.
Floats, and both parts of complex numbers, are held in one wide type, whatever the program says, so that a difference is
an error and not rounding.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Value = Any  # a numpy array `device dim ...`, None for what holds no data, or a tuple of values

_INTEGERS = {"pred": "bool", "s4": "int8", "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64",
             "u4": "uint8", "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64"}  # fmt: skip
FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
          "f8e4m3fn": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2, "f8e4m3": ml_dtypes.float8_e4m3,
          "f8e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz, "f8e8m0fnu": ml_dtypes.float8_e8m0fnu}  # fmt: skip
COMPLEX = ("c64", "c128")
NO_DATA = ("token", "opaque")
FOUR_BITS = {"s4": (-8, 7), "u4": (0, 15)}
"""The least and the largest of whole numbers that are held in twice as many bits."""


class NotInterpreted(Exception):
    """Something that the interpreter does not know; the message names it. A fault of ours, never of the program."""


class Failed(Exception):
    """An operation that the interpreter knows and could not run; the message names it. A fault of ours as well."""


class Faulty(Exception):
    """A program that is wrong in itself: devices that wait for each other for ever, or a group that names one twice."""


@dataclasses.dataclass(frozen=True)
class Team:
    """The devices that run a computation in step.

    Attributes:
        devices: their numbers in the program, `i64["device"]`.
    """

    devices: np.ndarray

    def __len__(self) -> int:
        return len(self.devices)

    def part(self, places: np.ndarray) -> "Team":
        """The devices at the given places."""
        return Team(self.devices[places])


def held_as(dtype: str, wide: np.dtype) -> np.dtype:
    """The numpy type that an element type of HLO is held in.

    >>> held_as("bf16", np.dtype("float32")), held_as("pred", np.dtype("float32"))
    (dtype('float32'), dtype('bool'))
    """
    if dtype in _INTEGERS:
        return np.dtype(_INTEGERS[dtype])
    if dtype in FLOATS:
        return np.dtype(wide)
    if dtype in COMPLEX:
        return np.result_type(wide, np.complex64)
    if dtype == "f4e2m1fn":
        raise NotInterpreted("numbers of four bits, to which gradients are rounded at random")
    raise NotInterpreted(f"the element type {dtype}")


def in_four_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Whole numbers as their lower four bits say.

    >>> in_four_bits(np.int8([7, 8, -9]), "s4").tolist(), in_four_bits(np.uint8([15, 16]), "u4").tolist()
    ([7, -8, 7], [15, 0])
    """
    least = FOUR_BITS[dtype][0]
    return (((x.astype(np.int16) - least) & 15) + least).astype(x.dtype)


def spread(value: np.ndarray, team: Team) -> np.ndarray:
    """The array with a row for each device, even if all are the same."""
    return np.broadcast_to(value, (len(team), *value.shape[1:])) if len(value) != len(team) else value


def part_of(value: Value, places: np.ndarray, team: Team) -> Value:
    """What some of the devices hold."""
    if isinstance(value, tuple):
        return tuple(part_of(v, places, team) for v in value)
    return value if value is None or len(value) == 1 else value[places]


def merged(parts: Sequence[tuple[np.ndarray, Value]], team: Team) -> Value:
    """One value from parts of the team, each with the places of its devices."""
    first = parts[0][1]
    if isinstance(first, tuple):
        return tuple(merged([(places, v[i]) for places, v in parts], team) for i in range(len(first)))
    if first is None:
        return None
    out = np.empty((len(team), *first.shape[1:]), first.dtype)
    for places, value in parts:
        out[places] = value
    return out


def each(function: Callable, arrays: Sequence[np.ndarray], team: Team) -> Any:
    """Runs a function of one device's arrays on every device; only once if all devices hold the same.

    Args:
        function: from arrays without the dimension of devices to one, or to a tuple of them.
        arrays: its arguments, `device dim ...`.
        team: the devices.
    """
    if all(len(a) == 1 for a in arrays):
        found = [function(*(a[0] for a in arrays))]
    else:
        found = [function(*(a[d if len(a) > 1 else 0] for a in arrays)) for d in range(len(team))]
    return tuple(map(np.stack, zip(*found))) if isinstance(found[0], tuple) else np.stack(found)
