"""Steps that work element by element."""

from .program import Value, aligned, axes_text, ordered
from .scope import Scope, step

UNARY = {
    "tr.tanh({})": "jnp.tanh({})",
    "tr.sin({})": "jnp.sin({})",
    "tr.sigmoid({})": "jax.nn.sigmoid({})",
    "tr.relu({})": "jax.nn.relu({})",
    "tr.gelu({})": "jax.nn.gelu({})",
    "tr.silu({})": "jax.nn.silu({})",
    "tr.softplus({})": "jax.nn.softplus({})",
    "tr.exp(tr.tanh({}))": "jnp.exp(jnp.tanh({}))",
    "tr.sqrt(tr.square({}) + 1.0)": "jnp.sqrt(jnp.square({}) + 1.0)",
    "tr.log1p(tr.abs({}))": "jnp.log1p(jnp.abs({}))",
    "tr.rsqrt(tr.abs({}) + 0.5)": "jax.lax.rsqrt(jnp.abs({}) + 0.5)",
    "tr.clip({}, -1.0, 1.0)": "jnp.clip({}, -1.0, 1.0)",
    "{}.clip(-0.5, 2.0)": "jnp.clip({}, -0.5, 2.0)",
    "abs({})": "abs({})",
    "-{}": "-{}",
    "tr.erf({})": "jax.lax.erf({})",
    "tr.log_sigmoid({})": "jax.nn.log_sigmoid({})",
    "{} * 0.5": "{} * 0.5",
    "1.0 - {}": "1.0 - {}",
    "{} / 3.0": "{} / 3.0",
    "2.0 / (abs({}) + 1.0)": "2.0 / (abs({}) + 1.0)",
    "{} ** 2": "{} ** 2",
    "{} + jnp.float32(0.25)": "{} + jnp.float32(0.25)",
    "tr.stop_gradient({}) * 0.5": "jax.lax.stop_gradient({}) * 0.5",
    "tr.lift(lambda a: a / (1.0 + a * a))({})": "(lambda a: a / (1.0 + a * a))({})",
    "tr.cos({})": "jnp.cos({})",
    "tr.arctan({})": "jnp.arctan({})",
    "tr.arcsinh({})": "jnp.arcsinh({})",
    "tr.expm1(tr.tanh({}))": "jnp.expm1(jnp.tanh({}))",
    "tr.exp2(tr.tanh({}))": "jnp.exp2(jnp.tanh({}))",
    "tr.log(tr.square({}) + 1.0)": "jnp.log(jnp.square({}) + 1.0)",
    "tr.log2(tr.square({}) + 1.0)": "jnp.log2(jnp.square({}) + 1.0)",
    "tr.reciprocal(tr.abs({}) + 1.0)": "jnp.reciprocal(jnp.abs({}) + 1.0)",
    "tr.elu({})": "jax.nn.elu({})",
    "tr.leaky_relu({})": "jax.nn.leaky_relu({})",
    "tr.soft_sign({})": "jax.nn.soft_sign({})",
    "tr.squareplus({})": "jax.nn.squareplus({})",
    "tr.mish({})": "jax.nn.mish({})",
    "tr.hard_tanh({})": "jax.nn.hard_tanh({})",
    "tr.negative({})": "jnp.negative({})",
    "tr.nan_to_num({})": "jnp.nan_to_num({})",
    "tr.arccos(tr.tanh({}) * 0.9)": "jnp.arccos(jnp.tanh({}) * 0.9)",
    "tr.arccosh(tr.square({}) + 1.5)": "jnp.arccosh(jnp.square({}) + 1.5)",
    "tr.arcsin(tr.tanh({}) * 0.9)": "jnp.arcsin(jnp.tanh({}) * 0.9)",
    "tr.arctanh(tr.tanh({}) * 0.9)": "jnp.arctanh(jnp.tanh({}) * 0.9)",
    "tr.cbrt(tr.abs({}) + 0.5)": "jnp.cbrt(jnp.abs({}) + 0.5)",
    "tr.celu({})": "jax.nn.celu({})",
    "tr.selu({})": "jax.nn.selu({})",
    "tr.cosh(tr.tanh({}))": "jnp.cosh(jnp.tanh({}))",
    "tr.sinh(tr.tanh({}))": "jnp.sinh(jnp.tanh({}))",
    "tr.tan(tr.tanh({}))": "jnp.tan(jnp.tanh({}))",
    "tr.deg2rad({})": "jnp.deg2rad({})",
    "tr.rad2deg(tr.tanh({}))": "jnp.rad2deg(jnp.tanh({}))",
    "tr.fabs({})": "jnp.fabs({})",
    "tr.hard_sigmoid({})": "jax.nn.hard_sigmoid({})",
    "tr.hard_silu({})": "jax.nn.hard_silu({})",
    "tr.relu6({})": "jax.nn.relu6({})",
    "tr.swish({})": "jax.nn.swish({})",
    "tr.log10(tr.square({}) + 1.0)": "jnp.log10(jnp.square({}) + 1.0)",
    "tr.real({})": "jnp.real({})",
    "tr.imag({}) + 0.5": "jnp.imag({}) + 0.5",
    "tr.conj({})": "jnp.conj({})",
    "tr.ceil({} * 1.5)": "jnp.ceil({} * 1.5)",
    "tr.floor({} * 1.5)": "jnp.floor({} * 1.5)",
    "tr.trunc({} * 1.5)": "jnp.trunc({} * 1.5)",
    "tr.rint({} * 1.5)": "jnp.rint({} * 1.5)",
    "tr.sign({})": "jnp.sign({})",
    "+{}": "+{}",
}
BINARY = {
    "{} + {}": "{} + {}",
    "{} - {}": "{} - {}",
    "{} * {}": "{} * {}",
    "{} / (abs({}) + 1.0)": "{} / (abs({}) + 1.0)",
    "tr.maximum({}, {})": "jnp.maximum({}, {})",
    "tr.minimum({}, {})": "jnp.minimum({}, {})",
    "tr.logaddexp({}, {})": "jnp.logaddexp({}, {})",
    "tr.arctan2({}, tr.abs({}) + 1.0)": "jnp.arctan2({}, jnp.abs({}) + 1.0)",
    "tr.subtract({}, {})": "jnp.subtract({}, {})",
    "tr.fmax({}, {})": "jnp.fmax({}, {})",
    "tr.hypot({}, tr.abs({}) + 1.0)": "jnp.hypot({}, jnp.abs({}) + 1.0)",
    "tr.copysign({}, {})": "jnp.copysign({}, {})",
    "tr.power(tr.abs({}) + 1.0, tr.tanh({}))": "jnp.power(jnp.abs({}) + 1.0, jnp.tanh({}))",
    "tr.lift(lambda a, b: a + 0.5 * b)({}, {})": "(lambda a, b: a + 0.5 * b)({}, {})",
    "tr.float_power(tr.abs({}) + 1.0, tr.tanh({}))": "jnp.float_power(jnp.abs({}) + 1.0, jnp.tanh({}))",
    "tr.fmin({}, {})": "jnp.fmin({}, {})",
    "tr.logaddexp2({}, {})": "jnp.logaddexp2({}, {})",
    "tr.heaviside({}, {})": "jnp.heaviside({}, {})",
    "tr.add({}, {})": "jnp.add({}, {})",
    "tr.multiply({}, {})": "jnp.multiply({}, {})",
    "tr.divide({}, tr.abs({}) + 1.0)": "jnp.divide({}, jnp.abs({}) + 1.0)",
    "tr.mod({}, tr.abs({}) + 1.0)": "jnp.mod({}, jnp.abs({}) + 1.0)",
    "tr.fmod({}, tr.abs({}) + 1.0)": "jnp.fmod({}, jnp.abs({}) + 1.0)",
    "tr.remainder({}, tr.abs({}) + 1.0)": "jnp.remainder({}, jnp.abs({}) + 1.0)",
    "tr.floor_divide({}, tr.abs({}) + 1.0)": "jnp.floor_divide({}, jnp.abs({}) + 1.0)",
    "nn.swiglu({}, {})": "jax.nn.silu({}) * {}",
    "nn.geglu({}, {})": "jax.nn.gelu({}) * {}",
}
WIDE = ("float32", "float_power", "nn.swiglu", "nn.geglu")  # not for bfloat16: another type, or rounded elsewhere
COMPARISONS = ("{} < {}", "{} <= {}", "{} > {}", "{} >= {}")
COMPARISONS += tuple(f"tr.{name}({{}}, {{}})" for name in ("less", "less_equal", "greater", "greater_equal"))
TESTS = ("signbit", "isnan", "isinf", "isfinite")
INTEGERS = (
    "{} + {}", "{} * {}", "{} - {}", "{} ^ {}", "{} // (abs({}) + 1)", "{} % (abs({}) + 1)", "{} & {}", "{} | {}",
    "{} << (abs({}) % 4)", "{} >> (abs({}) % 4)", "tr.bitwise_and({}, {})", "tr.bitwise_or({}, {})",
    "tr.bitwise_xor({}, {})", "tr.left_shift({}, abs({}) % 4)", "tr.right_shift({}, abs({}) % 4)",
    "tr.floor_divide({}, abs({}) + 1)", "tr.mod({}, abs({}) + 1)", "tr.gcd(abs({}), abs({}) + 1)",
    "tr.lcm(abs({}) % 7 + 1, abs({}) % 5 + 1)",
)  # fmt: skip
EQUALITIES = ("{} == {}", "{} != {}", "tr.equal({}, {})", "tr.not_equal({}, {})")
LOGICAL = ("{} & {}", "{} | {}", "{} ^ {}", "tr.logical_and({}, {})", "tr.logical_or({}, {})", "tr.logical_xor({}, {})")
INVERSIONS = {"i32": ("~{}", "-{}", "tr.invert({})"), "bool": ("~{}", "tr.logical_not({})")}


def unary(s: Scope):
    x = s.pick(dtype=s.float())
    ours, plain = s.one(list(UNARY.items()))
    s.require(x.dtype == "f32" or not any(word in ours for word in WIDE))
    return step("elementwise", s.value(x.dims, x.dtype), ours.format(x.var), plain.format(x.var))


def cast(s: Scope):
    """Into bfloat16, or back."""
    x = s.pick(dtype=s.float())
    dtype, text = ("bf16", "bfloat16") if x.dtype == "f32" else ("f32", "float32")
    line = f"{x.var}.astype(jnp.{text})"
    return step("bfloat16", s.value(x.dims, dtype), line, line)


def pair(s: Scope, dtype: str = "f32") -> tuple[Value, Value, Value, list[str]]:
    """Two values of which one's names contain the other's, in any order, and the one with more names."""
    x = s.pick(dtype=dtype)
    y = s.pick(lambda v: set(v.dims) <= set(x.dims) and v.var != x.var, dtype)
    first, second = (x, y) if s.chance(0.5) else (y, x)
    # The order of the result is that of the operand with most names, the first of several.
    most = max((first, second), key=lambda v: len(v.dims))
    return first, second, most, [aligned(v, most.names) for v in (first, second)]


def binary(s: Scope):
    x, y, most, plain = pair(s, s.float())
    ours, theirs = s.one(list(BINARY.items()))
    s.require(x.dtype == "f32" or not any(word in ours for word in WIDE))
    return step("elementwise", s.value(most.dims, x.dtype), ours.format(x.var, y.var), theirs.format(*plain))


def compare(s: Scope):
    x = s.pick()
    if s.chance(0.15):
        test = s.one(TESTS)
        return step("elementwise", s.value(x.dims, "bool"), f"tr.{test}({x.var})", f"jnp.{test}({x.var})")
    if s.chance(0.15):
        return both(s, "i32", EQUALITIES, "bool")
    text = s.one(COMPARISONS)
    if s.chance(0.4):
        line = text.format(x.var, 0.1)
        return step("elementwise", s.value(x.dims, "bool"), line, line.replace("tr.", "jnp."))
    return both(s, "f32", [text], "bool")


def both(s: Scope, dtype: str, texts, result: str):
    """One of several functions of two values, which is JAX's with another prefix."""
    x, y, most, plain = pair(s, dtype)
    text = s.one(texts)
    ours, theirs = text.format(x.var, y.var), text.format(*plain).replace("tr.", "jnp.")
    return step("elementwise", s.value(most.dims, result), ours, theirs)


def choose(s: Scope):
    """`where`, with a scalar or a value beside the mask."""
    x = s.pick()
    mask = s.pick(lambda v: set(v.dims) <= set(x.dims) or set(x.dims) <= set(v.dims), "bool")
    most = max((mask, x), key=lambda v: len(v.dims))
    operands = [(mask.var, aligned(mask, most.names)), (x.var, aligned(x, most.names)), ("0.5", "0.5")]
    if s.chance(0.5):
        y = s.pick(lambda v: set(v.dims) <= set(most.dims))
        operands[2] = (y.var, aligned(y, most.names))
    ours, plain = (", ".join(side) for side in zip(*operands, strict=True))
    return step("elementwise", s.value(most.dims), f"tr.where({ours})", f"jnp.where({plain})")


def logical(s: Scope):
    if s.chance(0.2):
        return inversion(s, "bool")
    return both(s, "bool", LOGICAL, "bool")


def inversion(s: Scope, dtype: str):
    x = s.pick(dtype=dtype)
    line = s.one(INVERSIONS[dtype]).format(x.var)
    return step("elementwise", s.value(x.dims, dtype), line, line.replace("tr.", "jnp."))


def integer(s: Scope):
    if s.chance(0.4):
        return inversion(s, "i32") if s.chance(0.2) else both(s, "i32", INTEGERS, "i32")
    x = s.pick(dtype=s.one(["i32", "bool"]))
    return step("elementwise", s.value(x.dims), f"{x.var}.astype(jnp.float32)", f"{x.var}.astype(jnp.float32)")


def positions(s: Scope):
    """Numbers brought into the range of a dimension, to index with."""
    x = s.pick(dtype="i32")
    size = s.one([size for v in s.values for size in v.shape if size > 1])
    result = s.value(x.dims, "i32", size)
    return step("elementwise", result, f"{x.var} % {size}", f"{x.var} % {size}")


def broadcast(s: Scope):
    x = s.pick(dtype=s.one(["f32", "f32", "f32", "i32", "bool"]))
    added = s.some([d for v in s.values for d in v.dims if d[0] not in x.names] or [("out", 2)], 1, 2)
    s.require(len({name for name, _ in added}) == len(added) and all(s.fits(*d) for d in added))
    dims = tuple(s.some((*x.dims, *added), len(x.dims) + len(added)))
    sizes = tuple(size for _, size in dims)
    names = [name for name, _ in dims]
    value = s.value(dims, x.dtype)
    plain = f"jnp.broadcast_to({aligned(x, names)}, {sizes})"
    return step("reshaping", value, f"{x.var}.broadcast_to({axes_text(dims)})", plain)


def transpose(s: Scope):
    x = s.ranked(2)
    dims = tuple(s.some(x.dims, len(x.dims)))
    names = [name for name, _ in dims]
    kept = s.between(1, len(names))
    if s.chance(0.3) and kept < len(names):
        last = names[-kept:]
        names = [n for n in x.names if n not in last] + last
        text = " ".join(("...", *last))
    else:
        text = " ".join(names)
    dims = tuple((n, x.sizes[n]) for n in names)
    return step("reshaping", s.value(dims), f'{x.var}.transpose("{text}")', ordered(x, names))


STEPS = (
    cast,
    unary,
    unary,
    unary,
    binary,
    binary,
    binary,
    compare,
    choose,
    logical,
    integer,
    positions,
    broadcast,
    transpose,
)
