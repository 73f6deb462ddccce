"""Operations on each element by itself, and constants."""

import re
from collections.abc import Callable

import numpy as np
import scipy.special

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.layouts import ArrayType
from trellis.proof.interpreter.values import FLOATS, FOUR_BITS, NotInterpreted, Value


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A quotient as XLA has it: of integers towards zero, and -1 for a division by zero."""
    if a.dtype.kind in "fc":
        return a / b
    safe = np.where(b == 0, 1, b)
    quotient = a // safe
    quotient = quotient + ((quotient < 0) & (quotient * safe != a))
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A remainder with the sign of the dividend; integers divided by zero give the dividend."""
    if a.dtype.kind == "f":
        return np.fmod(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))


def _round_half_away(x: np.ndarray) -> np.ndarray:
    return np.trunc(x + np.copysign(0.5, x))


def _ones(x: np.ndarray) -> np.ndarray:
    """How many bits are 1."""
    octets = np.ascontiguousarray(x)[..., None].view(np.uint8)
    return np.unpackbits(octets, axis=-1).sum(-1).astype(x.dtype)


def _shift(turn: Callable) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A shift that gives zeros (for a negative number to the right, its sign) if all bits leave."""

    def shift(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        bits = 8 * x.dtype.itemsize
        over = by.astype(np.uint64) >= bits
        return turn(x, np.where(over, 0, by).astype(x.dtype), over)

    return shift


def _left(x, by, over):
    return np.where(over, 0, x << by)


def _right(x, by, over):
    return np.where(over, np.where(x < 0, -1, 0).astype(x.dtype), x >> by)


def _right_logical(x, by, over):
    bits = np.dtype(f"u{x.dtype.itemsize}")
    return np.where(over, 0, x.view(bits) >> by.astype(bits)).astype(bits).view(x.dtype)


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    """How many bits before the first 1, from the largest."""
    bits, wide = 8 * x.dtype.itemsize, x.view(f"u{x.dtype.itemsize}")
    return sum(((wide >> np.array(n, wide.dtype)) == 0).astype(x.dtype) for n in range(bits))


UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "cosh": np.cosh,
    "cosine": np.cos,
    "count-leading-zeros": _leading_zeros,
    "erf": scipy.special.erf,
    "exponential": np.exp,
    "exponential-minus-one": np.expm1,
    "floor": np.floor,
    "imag": np.imag,
    "is-finite": np.isfinite,
    "log": np.log,
    "log-plus-one": np.log1p,
    "logistic": scipy.special.expit,
    "negate": np.negative,
    "not": np.invert,
    "popcnt": _ones,
    "real": np.real,
    "round-nearest-afz": _round_half_away,
    "round-nearest-even": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sine": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
}
BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "atan2": np.arctan2,
    "complex": lambda real, imag: real + 1j * imag,
    "divide": _divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "or": np.bitwise_or,
    "power": np.power,
    "remainder": _remainder,
    "shift-left": _shift(_left),
    "shift-right-arithmetic": _shift(_right),
    "shift-right-logical": _shift(_right_logical),
    "subtract": np.subtract,
    "xor": np.bitwise_xor,
}
COMMUTATIVE = ("add", "and", "maximum", "minimum", "multiply", "or", "xor")  # numpy's own functions, which can reduce
_COMPARISONS = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater,
                "GE": np.greater_equal}  # fmt: skip


def _elementwise(instruction: Instruction, machine) -> Callable:
    if instruction.name in machine.unrounded:
        return _same(instruction, machine)
    function = (UNARY | BINARY)[instruction.op]
    dtype = machine.dtype(instruction)
    return lambda values, team: machine.typed(function(*values), dtype)


def _compare(instruction: Instruction, machine) -> Callable:
    function = _COMPARISONS[instruction.attribute("direction")]
    if instruction.attribute("type") == "TOTALORDER":
        return lambda values, team: function(*map(_in_total_order, values))
    return lambda values, team: function(*values)


def _in_total_order(x: np.ndarray) -> np.ndarray:
    """Numbers whose order is -NaN, -inf, ..., -0, 0, ..., inf, NaN."""
    if x.dtype.kind != "f":
        return x
    bits = x.view(f"i{x.dtype.itemsize}")
    return np.where(bits < 0, np.iinfo(bits.dtype).min - bits - 1, bits)


def _select(instruction: Instruction, machine) -> Callable:
    dtype = machine.dtype(instruction)

    def run(values, team):
        which, yes, no = values
        if isinstance(yes, tuple) or yes is None:
            raise NotInterpreted("select of a tuple")
        return machine.typed(np.where(_widened(which, yes.ndim), yes, no), dtype)

    return run


def _clamp(instruction: Instruction, machine) -> Callable:
    def run(values, team):
        least, x, most = values
        return np.minimum(np.maximum(x, _widened(least, x.ndim)), _widened(most, x.ndim))

    return run


def _widened(x: np.ndarray, rank: int) -> np.ndarray:
    """A scalar on each device, in a shape that goes with an array on each."""
    return x.reshape(len(x), *[1] * (rank - 1)) if x.ndim == 1 else x


def _convert(instruction: Instruction, machine) -> Callable:
    dtype = machine.dtype(instruction)
    if instruction.name in machine.unrounded:
        return _same(instruction, machine)
    before = machine.held(machine.operand_types(instruction)[0].dtype).kind
    if before == "i" == dtype.kind:
        return lambda values, team: machine.typed(values[0], dtype)
    if before == "f" and (bounds := FOUR_BITS.get(machine.type(instruction).dtype)):
        return lambda values, team: converted(np.clip(values[0], *bounds), dtype)
    return lambda values, team: converted(values[0], dtype)


def converted(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers as another type: to integers towards zero, within their range, and NaN as 0."""
    if x.dtype.kind == "f" and dtype.kind in "iu":
        info = np.iinfo(dtype)
        inside: np.ndarray = np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0), info.min, info.max)
        # the largest number of 64 bits is no float: the next float above it would overflow
        return np.where(inside >= info.max, info.max, inside.astype(dtype))
    return x.astype(dtype, copy=False)


def _bitcast_convert(instruction: Instruction, machine) -> Callable:
    before, after = machine.operand_types(instruction)[0], machine.type(instruction)
    return lambda values, team: same_bits(values[0], before, after, machine.wide)


def same_bits(x: np.ndarray, before: ArrayType, after: ArrayType, wide: np.dtype) -> np.ndarray:
    """The bits of numbers read as another type; narrow floats, which are held in a wide type, become what they are."""
    narrow, target = FLOATS.get(before.dtype), FLOATS.get(after.dtype)
    if narrow and target and before.dtype == after.dtype:
        return x
    if narrow:
        exact = x.astype(narrow)
        if not np.array_equal(exact.astype(x.dtype), x, equal_nan=True):
            raise NotInterpreted(f"the bits of numbers that {before.dtype} does not hold")
        x = exact
    item = np.dtype(target or _BITS[after.dtype])
    if x.dtype.itemsize == item.itemsize:
        found = x.view(item)
    elif x.dtype.itemsize > item.itemsize:  # one number becomes several, along a new last dimension
        found = np.ascontiguousarray(x)[..., None].view(item)
    else:
        found = np.ascontiguousarray(x).view(item)[..., 0]
    return found.astype(wide) if target else found


_BITS = {"s8": "i1", "s16": "i2", "s32": "i4", "s64": "i8", "u8": "u1", "u16": "u2", "u32": "u4", "u64": "u8",
         "pred": "?"}  # fmt: skip


def _constant(instruction: Instruction, machine) -> Callable:
    kind = machine.type(instruction)
    found = constant(instruction.literal, kind, machine.dtype(instruction))
    value = (found if machine.written is None else machine.written.instead_of(found, kind.dtype))[None]
    return lambda values, team: value


_WORD = re.compile(r"-?(?:nan(?:\([^)]*\))?|inf|true|false|[\d.]+(?:e[-+]?\d+)?)")


def constant(literal: str, kind: ArrayType, dtype: np.dtype) -> np.ndarray:
    """A constant from its text, `{{1, 2}, {3, 4}}`.

    Raises:
        NotInterpreted: the text leaves numbers out, since the program was printed without large constants.
    """
    if "..." in literal:
        raise NotInterpreted("a constant whose numbers were left out; print the program with large constants")
    words = _WORD.findall(re.sub(r"/\*.*?\*/", "", literal))
    if dtype.kind in "fc":
        numbers = [float(re.sub(r"\(.*", "", word)) for word in words]
    else:
        numbers = [{"true": 1, "false": 0}.get(word) if word[0] in "tf" else int(word) for word in words]
    found = np.array(numbers, np.float64 if dtype.kind in "fc" else object)
    if dtype.kind in "fc":  # a text has the fewest digits that only one number of its type is nearest to
        own = {"c64": np.float32, "c128": np.float64, **FLOATS}[kind.dtype]
        found = found.astype(own).astype(np.float64)
    found = (found.view(np.complex128) if dtype.kind == "c" else found).astype(dtype)
    if found.size == 1:
        return np.broadcast_to(found.reshape(()), kind.shape)
    return found.reshape(kind.shape)


def _iota(instruction: Instruction, machine) -> Callable:
    kind, dtype = machine.type(instruction), machine.dtype(instruction)
    along = int(instruction.attribute("iota_dimension") or 0)
    shape = [size if d == along else 1 for d, size in enumerate(kind.shape)]
    value = np.broadcast_to(np.arange(kind.shape[along]).astype(dtype).reshape(shape), kind.shape)[None]
    return lambda values, team: value


def _partition(instruction: Instruction, machine) -> Callable:
    return lambda values, team: team.devices.astype(np.uint32)


def _replica(instruction: Instruction, machine) -> Callable:
    return lambda values, team: np.zeros(1, np.uint32)


def _same(instruction: Instruction, machine) -> Callable:
    """What changes only where or how a value is held. Numbers are not rounded: see the module `values`."""

    def run(values: list[Value], team):
        return values[0]

    return run


OPERATIONS: dict[str, Callable] = {
    **dict.fromkeys((*UNARY, *BINARY), _elementwise),
    **dict.fromkeys(("copy", "opt-barrier", "domain", "reduce-precision", "add-dependency"), _same),
    "bitcast-convert": _bitcast_convert,
    "clamp": _clamp,
    "compare": _compare,
    "constant": _constant,
    "convert": _convert,
    "iota": _iota,
    "partition-id": _partition,
    "replica-id": _replica,
    "select": _select,
}
