"""Steps that select: indices, slices, lists, masks, lookups, and updates in place."""

from .program import Value, aligned, without, written
from .scope import Scope, step


def _ids(s: Scope, x: Value, name: str, most: int = 2) -> Value:
    """Positions in sight for a dimension, whose names the array does not have otherwise."""
    others = {n for n in x.names if n != name}
    return s.pick(
        lambda v: 0 < v.below <= x.sizes[name] and len(v.dims) <= most and not others & set(v.names), dtype="i32"
    )


def _slice(s: Scope, size: int) -> tuple[str, int]:
    """A slice's text and how many it takes."""
    start, stop = sorted((s.between(0, size), s.between(0, size)))
    step_size = s.one([1, 1, 1, 2])
    s.require(stop > start)
    if s.chance(0.1):
        return "::-1", size
    taken = len(range(start, stop, step_size))
    begin = "" if start == 0 and s.chance(0.5) else str(start - size if start and s.chance(0.2) else start)
    end = "" if stop == size and s.chance(0.5) else str(stop + (5 if stop == size and s.chance(0.1) else 0))
    return f"{begin}:{end}" + (f":{step_size}" if step_size > 1 else ""), taken


def _static(s: Scope, x: Value) -> tuple[dict[str, str], tuple, list[str]]:
    """Integers and slices for some names: their texts, what is left, and the plain subscripts."""
    chosen = dict.fromkeys(s.some(x.names, 1, 2), "")
    dims, plain = [], []
    for name, size in x.dims:
        text, taken = ":", size
        if name in chosen:
            if s.chance(0.5):
                text, taken = str(s.between(-size, size - 1)), None
            else:
                text, taken = _slice(s, size)
                s.require(s.fits(name, taken))
            chosen[name] = text
        plain.append(text)
        if taken is not None:
            dims.append((name, taken))
    return chosen, tuple(dims), plain


def _subscript(s: Scope, pairs: dict[str, str]) -> str:
    if all(":" not in text for text in pairs.values()) and s.chance(0.3):
        return "{" + ", ".join(f'"{n}": {text}' for n, text in pairs.items()) + "}"
    return ", ".join(f'"{n}", {text}' for n, text in pairs.items())


def static(s: Scope):
    x = s.pick(lambda v: len(v.dims) > 0, dtype=s.one([s.float(), s.float(), "f32", "i32", "bool"]))
    chosen, dims, plain = _static(s, x)
    result = s.value(dims, x.dtype, x.below)
    return step("indexing", result, f"{x.var}[{_subscript(s, chosen)}]", f"{x.var}[{', '.join(plain)}]")


def take(s: Scope):
    """A lookup: the names of the positions stand in the place of the one looked up."""
    x = s.ranked(dtype=s.one([s.float(), s.float(), "f32", "i32"]))
    (name,) = s.some(x.names, 1, 1)
    ids = _ids(s, x, name)
    i = x.axis(name)
    dims = (*x.dims[:i], *ids.dims, *x.dims[i + 1 :])
    s.require(all(s.fits(*dim) for dim in ids.dims))
    text = s.name_text(name, x.dims)
    ours = s.one(
        [f"tr.take({x.var}, {text}, {ids.var})", f"{x.var}.take({text}, {ids.var})", f"{x.var}[{text}, {ids.var}]"]
    )
    result = s.value(dims, x.dtype, x.below)
    return step("lookup", result, ours, f"jnp.take({x.var}, {ids.var}, axis={i})")


def take_several(s: Scope):
    """Two names at once, by positions that are broadcast together."""
    x = s.ranked(2)
    first, second = s.some(x.names, 2, 2)
    one = _ids(s, x, first, 1)
    two = _ids(s, x, second, 1)
    others = set(x.names) - {first, second}
    s.require(
        not others & {*one.names, *two.names} and (set(two.dims) <= set(one.dims) or set(one.dims) <= set(two.dims))
    )
    most = one if len(one.dims) >= len(two.dims) else two
    rest = tuple(dim for dim in x.dims if dim[0] not in (first, second))
    moved = [x.axis(n) for n in (first, second, *(n for n, _ in rest))]
    plain = f"jnp.transpose({x.var}, {tuple(moved)})[{one.var}, {two.var}]"
    # The new names stand in the place of the first indexed one.
    place = sum(1 for n, _ in rest if x.axis(n) < min(x.axis(first), x.axis(second)))
    dims = (*rest[:place], *most.dims, *rest[place:])
    if place and most.dims:
        plain = f"jnp.moveaxis({plain}, 0, {place})"
    result = s.value(dims)
    return step("lookup", result, f'{x.var}["{first}", {one.var}, "{second}", {two.var}]', plain)


def listed(s: Scope):
    """A list of positions, or a plain integer array, which keeps the name."""
    x = s.ranked()
    (name,) = s.some(x.names, 1, 1)
    size, i = x.sizes[name], x.axis(name)
    places = [s.between(-size, size - 1) for _ in range(s.between(1, min(size, 4)))]
    s.require(s.fits(name, len(places)))
    dims = tuple((n, len(places)) if n == name else (n, z) for n, z in x.dims)
    before = ":, " * i
    plain = f"{x.var}[{before}jnp.array({places})]"
    kind = s.one(["{}", "{}", "np.array({})", "jnp.array({})"])
    return step("indexing", s.value(dims), f'{x.var}["{name}", {kind.format(places)}]', plain)


def masked(s: Scope):
    """A mask of constants, whose count is known while tracing."""
    x = s.ranked()
    (name,) = s.some(x.names, 1, 1)
    size, i = x.sizes[name], x.axis(name)
    mask = [bool(s.chance(0.5)) for _ in range(size)]
    s.require(any(mask) and s.fits(name, sum(mask)))
    dims = tuple((n, sum(mask)) if n == name else (n, z) for n, z in x.dims)
    before = ":, " * i
    text = s.one([f"np.array({mask})", str(mask), f'tr.named(np.array({mask}), "{name}")'])
    return step("indexing", s.value(dims), f'{x.var}["{name}", {text}]', f"{x.var}[{before}np.array({mask})]")


def take_along(s: Scope):
    """A lookup of a row's own positions: names that both have are aligned."""
    x = s.ranked()
    name = s.one(x.names)
    size, i, rest = x.sizes[name], x.axis(name), without(x.dims, name)
    ids = s.pick(lambda v: 0 < v.below <= size and set(v.dims) & set(rest) and set(v.names) <= {*x.names}, dtype="i32")
    count = ids.sizes.get(name, 1)
    s.require(all(x.sizes[n] == z for n, z in ids.dims if n != name) and s.fits(name, count))
    shape = tuple(count if n == name else z for n, z in x.dims)
    wide = f"jnp.broadcast_to({aligned(ids, x.names)}, {shape})"
    plain = f"jnp.take_along_axis({x.var}, {wide}, axis={i})"
    if name not in ids.names:
        plain = f"jnp.squeeze({plain}, {i})"
    dims = tuple((n, count) if n == name else (n, z) for n, z in x.dims)
    # Where the result's names stand: those of the positions that the table has not come in the place of the name.
    dims = dims if name in ids.names else without(dims, name)
    text = s.name_text(name, x.dims)
    return step("lookup", s.value(dims), f"tr.take_along({x.var}, {text}, {ids.var})", plain)


def chosen(s: Scope):
    """A mask of values, outside of a compiled program."""
    x = s.ranked()
    name = s.one(x.names)
    s.require(not s.traced and s.depth == 0)
    others, i = without(x.dims, name), x.axis(name)
    gone = [n for n, _ in others]
    mask = f"{x.var}.sum({written(repr(n) for n in gone)}) > 0.1" if gone else f"{x.var} > 0.1"
    text = f'{x.var}["{name}", {mask}].sum("{name}")'
    kept = f"jnp.sum({x.var}, axis={written(x.axis(n) for n in gone)}, keepdims=True) > 0.1"
    plain = f"jnp.sum(jnp.where({kept}, {x.var}, 0.0), axis={i})"
    return step("mask of values", s.value(others), text, plain)


UPDATES = ("set", "add", "multiply", "min", "max")


def update(s: Scope):
    """An update at integers and slices, by a scalar or by a value with names of its place."""
    x = s.ranked()
    chosen, place, plain = _static(s, x)
    method = s.one(UPDATES)
    ours, theirs = "0.5", "0.5"
    if s.chance(0.6):
        y = s.pick(lambda v: set(v.dims) <= set(place))
        ours, theirs = y.var, aligned(y, [n for n, _ in place]) if place else y.var
    at = f"{x.var}.at[{_subscript(s, chosen)}].{method}({ours})"
    return step("update", s.value(x.dims), at, f"{x.var}.at[{', '.join(plain)}].{method}({theirs})")


def update_at(s: Scope):
    """An update at positions, where sums of several at one place are sums."""
    x = s.ranked()
    (name,) = s.some(x.names, 1, 1)
    ids = _ids(s, x, name)
    i = x.axis(name)
    dims = (*x.dims[:i], *ids.dims, *x.dims[i + 1 :])
    s.require(len(dict(dims)) == len(dims))
    method = s.one(["add", "add", "max", "min"])
    ours, theirs = "0.5", "0.5"
    if s.chance(0.6):
        y = s.pick(lambda v: set(v.dims) <= set(dims))
        ours, theirs = y.var, aligned(y, [n for n, _ in dims]) if dims else y.var
    before = ":, " * i
    at = f'{x.var}.at["{name}", {ids.var}].{method}({ours})'
    return step("update", s.value(x.dims), at, f"{x.var}.at[{before}{ids.var}].{method}({theirs})")


STEPS = (static, static, take, take, take_several, take_along, listed, masked, chosen, chosen, update, update_at)
