"""Steps that multiply: `dot`, `einsum`, and partial sums that are settled later."""

import math
import string

from .program import Dims, Statement, Value
from .scope import Scope, step


def _dims(values: list[Value]) -> Dims:
    """All dimensions in the order in which they are first met."""
    return tuple(dict.fromkeys(dim for v in values for dim in v.dims))


def letters(values: list[Value], out: list[str]) -> str:
    letter = dict(zip(dict.fromkeys(n for v in values for n in v.names), string.ascii_lowercase, strict=False))
    sides = ["".join(letter[n] for n in v.names) for v in values]
    return ",".join(sides) + "->" + "".join(letter[n] for n in out)


def _operands(s: Scope, count: int) -> list[Value]:
    """Values that share names, and whose names have one size each."""
    found = [s.ranked(dtype=s.float())]
    while len(found) < count:
        known = dict(_dims(found))
        fits = lambda v, known=known: set(v.names) & set(known) and all(known.get(n, z) == z for n, z in v.dims)
        found.append(s.pick(fits, found[0].dtype))
    return found


def _shared(values: list[Value]) -> list[str]:
    return [n for n, _ in _dims(values) if sum(n in v.names for v in values) > 1]


def dot(s: Scope):
    values = _operands(s, 3 if s.chance(0.15) else 2)
    over = s.some(_shared(values), 1, 2)
    dims = tuple(dim for dim in _dims(values) if dim[0] not in over)
    s.require(math.prod(size for _, size in _dims(values)) <= 20000)
    plain = f'jnp.einsum("{letters(values, [n for n, _ in dims])}", {", ".join(v.var for v in values)})'
    ours = f"tr.dot({', '.join(v.var for v in values)}, over={s.names_text(over, _dims(values))})"
    return step("product", s.value(dims, values[0].dtype), ours, plain)


def einsum(s: Scope):
    values = _operands(s, s.one([1, 2, 2, 2, 3]))
    known = _dims(values)
    s.require(math.prod(size for _, size in known) <= 20000)
    gone = s.some(_shared(values) or [n for n, _ in known], 0, 2)
    if s.chance(0.15):  # a name that one operand has alone is summed there
        gone = list({*gone, s.one([n for n, _ in known])})
    out = s.some([n for n, _ in known if n not in gone], len(known) - len(gone))
    rest = len(values) == 2 and s.chance(0.15)
    texts = [list(v.names) for v in values]
    text_out = list(out)
    if rest:  # `...` stands for the names of the operands that are not written, in front
        hidden = [n for n in values[0].names if n not in values[1].names and n in out]
        texts[0] = ["...", *(n for n in texts[0] if n not in hidden)]
        text_out = ["...", *(n for n in out if n not in hidden)]
        out = [*hidden, *(n for n in out if n not in hidden)]
    elif s.chance(0.3):
        texts = [s.some(t, len(t)) for t in texts]
    dims = tuple((n, dict(known)[n]) for n in out)
    text = ", ".join(" ".join(t) for t in texts) + " -> " + " ".join(text_out)
    names = ", ".join(v.var for v in values)
    plain = f'jnp.einsum("{letters(values, out)}", {names})'
    kind = "product" if len(values) > 1 else "sum by einsum"  # of one operand nothing moves
    return step(kind, s.value(dims, values[0].dtype), f'tr.einsum("{text}", {names})', plain)


def outer(s: Scope):
    """An outer product, asked for."""
    x, y = s.ranked(), s.ranked()
    s.require(not set(x.names) & set(y.names))
    out = s.some([*x.names, *y.names], len(x.dims) + len(y.dims))
    dims = tuple((n, {**x.sizes, **y.sizes}[n]) for n in out)
    text = f"{' '.join(x.names)}, {' '.join(y.names)} -> {' '.join(out)}"
    plain = f'jnp.einsum("{letters([x, y], out)}", {x.var}, {y.var})'
    return step("product", s.value(dims), f'tr.einsum("{text}", {x.var}, {y.var})', plain)


def each(s: Scope):
    """One value times several others, moved once."""
    x = s.ranked()
    over = s.some(x.names, 1, 2)
    fits = lambda v: set(over) <= set(v.names) and all(x.sizes.get(n, z) == z for n, z in v.dims)
    others = [s.pick(fits) for _ in range(s.between(1, 3))]
    results, plain = [], []
    for w in others:
        s.require(math.prod(size for _, size in _dims([x, w])) <= 20000)
        dims = tuple(dim for dim in _dims([x, w]) if dim[0] not in over)
        results.append(s.value(dims))
        plain.append(f'jnp.einsum("{letters([x, w], [n for n, _ in dims])}", {x.var}, {w.var})')
    given = ", ".join(w.var for w in others)
    ours = f"tr.dot_each({x.var}, [{given}], over={s.names_text(over, x.dims)})"
    return step("product", tuple(results), ours, f"({', '.join(plain)},)")


EIGHT_BITS = {"fp8": ("448.0", "{}.astype(jnp.float8_e4m3fn).astype(jnp.float32)"), "int8": ("127.0", "jnp.round({})")}


def narrow(s: Scope):
    """A product in eight bits; of its gradient, which is rounded too, there is no twin."""
    x, w = _operands(s, 2)
    s.require(x.dtype == "f32")
    over = s.some(_shared([x, w]), 1, 2)
    dims = tuple(dim for dim in _dims([x, w]) if dim[0] not in over)
    s.require(math.prod(size for _, size in _dims([x, w])) <= 20000)
    kind = s.one(list(EIGHT_BITS))
    limit, cast = EIGHT_BITS[kind]
    result, fn, scale = s.value(dims), s.fresh("narrow"), s.fresh("scale")
    numbers = letters([x, w], [n for n, _ in dims])
    plain = (
        f"{scale} = lambda a: jnp.where(jnp.max(jnp.abs(a)) > 0, jnp.max(jnp.abs(a)) / {limit}, 1.0)",
        f"{fn} = lambda a: {cast.format(f'jnp.clip(a / {scale}(a), -{limit}, {limit})')}",
        f'{result.var} = jax.lax.stop_gradient(jnp.einsum("{numbers}", {fn}({x.var}), {fn}({w.var}))'
        f" * ({scale}({x.var}) * {scale}({w.var})))",
    )
    text = s.names_text(over, _dims([x, w]))
    fixed = [f"tr.stop_gradient({v.var})" for v in (x, w)]
    ours = f'{result.var} = tr.dot({fixed[0]}, tr.Narrow({fixed[1]}, "{kind}"), over={text})'
    return Statement("narrow product", (result,), (ours,), plain)


def pending(s: Scope):
    """Partial sums that are added to others, scaled, renamed and summed further before they are settled."""
    values = _operands(s, 2)
    s.require(values[0].dtype == "f32")
    over = s.some(_shared(values), 1, 2)
    dims = tuple(dim for dim in _dims(values) if dim[0] not in over)
    s.require(math.prod(size for _, size in _dims(values)) <= 20000)
    result = s.value(dims)
    numbers = letters(values, list(result.names))
    a, b = s.fresh("t"), s.fresh("t")
    names, text = ", ".join(v.var for v in values), s.names_text(over, _dims(values))
    ours = [f"{a} = tr.dot({names}, over={text}, settle=False)"]
    plain = [f'{a} = jnp.einsum("{numbers}", {names})']
    if s.chance(0.6):
        x, y = values
        ours.append(f"{b} = tr.dot({x.var} * 0.5, {y.var}, over={text}, settle=False)")
        plain.append(f'{b} = jnp.einsum("{numbers}", {x.var} * 0.5, {y.var})')
        sign = s.one(["+", "-"])
        ours.append(f"{a} = {a} {sign} {b}")
        plain.append(f"{a} = {a} {sign} {b}")
    if s.chance(0.4):
        change = s.one(["{} * 0.5", "-{}", "{} / 2.0", "3.0 * {}"])
        ours.append(f"{a} = {change.format(a)}")
        plain.append(f"{a} = {change.format(a)}")
    if dims and s.chance(0.4):
        (name,) = s.some([n for n, _ in dims], 1, 1)
        ours.append(f'{a} = {a}.sum("{name}")')
        plain.append(f"{a} = jnp.sum({a}, axis={[n for n, _ in dims].index(name)})")
        dims = tuple(dim for dim in dims if dim[0] != name)
    if len(dims) > 1 and s.chance(0.3):
        dims = tuple(s.some(dims, len(dims)))
        before = [n for n, _ in result.dims if n in dict(dims)]
        order = [before.index(n) for n, _ in dims]
        ours.append(f'{a} = {a}.transpose("{" ".join(n for n, _ in dims)}")')
        plain.append(f"{a} = jnp.transpose({a}, {tuple(order)})")
    result = s.value(dims)
    ours.append(f"{result.var} = tr.settle({a})")
    plain.append(f"{result.var} = {a}")
    return Statement("pending sum", (result,), tuple(ours), tuple(plain))


STEPS = (dot, dot, dot, dot, einsum, einsum, einsum, outer, pending, pending, each, narrow)
