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
}
COMPARISONS = ("<", "<=", ">", ">=")
INTEGERS = ("{} + {}", "{} * {}", "{} - {}", "{} ^ {}", "{} // (abs({}) + 1)", "{} % (abs({}) + 1)")


def unary(s: Scope):
    x = s.pick(dtype=s.float())
    ours, plain = s.one(list(UNARY.items()))
    s.require(x.dtype == "f32" or "float32" not in ours)
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
    return step("elementwise", s.value(most.dims, x.dtype), ours.format(x.var, y.var), theirs.format(*plain))


def compare(s: Scope):
    x = s.pick()
    op = s.one(COMPARISONS)
    if s.chance(0.4):
        return step("elementwise", s.value(x.dims, "bool"), f"{x.var} {op} 0.1", f"{x.var} {op} 0.1")
    x, y, most, plain = pair(s)
    return step("elementwise", s.value(most.dims, "bool"), f"{x.var} {op} {y.var}", f"{plain[0]} {op} {plain[1]}")


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
    x, y, most, plain = pair(s, "bool")
    op = s.one(["&", "|", "^"])
    return step("elementwise", s.value(most.dims, "bool"), f"{x.var} {op} {y.var}", f"{plain[0]} {op} {plain[1]}")


def integer(s: Scope):
    if s.chance(0.4):
        x, y, most, plain = pair(s, "i32")
        text = s.one(INTEGERS)
        return step("elementwise", s.value(most.dims, "i32"), text.format(x.var, y.var), text.format(*plain))
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
