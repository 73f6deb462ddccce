"""Steps that change names, order and sizes."""

import math

from .program import Value, aligned, axes_text, ordered, without
from .scope import Scope, step


def rename(s: Scope):
    x = s.ranked(dtype=s.one([s.float(), s.float(), "f32", "i32"]))
    old = s.one(x.names)
    new = s.new_name(*x.names)
    s.require(s.fits(new, x.sizes[old]))
    dims = tuple((new if n == old else n, size) for n, size in x.dims)
    ours = s.one([f'{x.var}.rename({old}="{new}")', f'tr.rename({x.var}, {{"{old}": "{new}"}})'])
    return step("reshaping", s.value(dims, x.dtype, x.below), ours, x.var)


def _factors(s: Scope, size: int) -> tuple[int, int]:
    a = s.one([d for d in range(1, size + 1) if size % d == 0])
    return a, size // a


def split_axis(s: Scope):
    x = s.ranked()
    name = s.one(x.names)
    major, minor = _factors(s, x.sizes[name])
    a = s.new_name(*(n for n in x.names if n != name)) if s.chance(0.7) else name
    b = s.new_name(*x.names, a)
    s.require(s.fits(a, major) and s.fits(b, minor))
    i = x.axis(name)
    dims = (*x.dims[:i], (a, major), (b, minor), *x.dims[i + 1 :])
    shape = tuple(size for _, size in dims)
    which = s.between(0, 3)
    left = " ".join(f"({a} {b})" if n == name else n for n in x.names)
    right = " ".join(n for n, _ in dims)
    ours = [
        f'tr.split_axis({x.var}, "{name}", {{"{a}": {major}, "{b}": {s.one([minor, -1])}}})',
        f'tr.rearrange({x.var}, "{left} -> {right}", {a}={major})',
        f'tr.rearrange({x.var}, "{left} -> {right}", {b}={minor})',
        f'{x.var}.rearrange("... {name}=({a} {b}) -> ... {b} {a}", {a}={major})',
    ][which]
    plain = f"jnp.reshape({x.var}, {shape})"
    if which == 3:
        rest = without(x.dims, name)
        dims = (*rest, (b, minor), (a, major))
        s.require(a not in x.names or a == name)
        order = [*(n for n, _ in rest), b, a]
        before = [*x.names[:i], a, b, *x.names[i + 1 :]]
        plain = f"jnp.transpose({plain}, {tuple(before.index(n) for n in order)})"
    return step("reshaping", s.value(dims), ours, plain)


def merge_axes(s: Scope):
    x = s.ranked(2)
    names = s.some(x.names, 2, 3)
    size = math.prod(x.sizes[n] for n in names)
    into = s.new_name(*(n for n in x.names if n not in names)) if s.chance(0.7) else "_".join(names)
    s.require(s.fits(into, size))
    rest = [n for n in x.names if n not in names]
    if s.chance(0.5):
        # The merged name stands where its first part did.
        at = sum(1 for n in rest if x.axis(n) < x.axis(names[0]))
        texts = [", ".join(f'"{n}"' for n in names)]
        ours = f'tr.merge_axes({x.var}, ({texts[0]}), "{into}")'
    else:
        at = s.between(0, len(rest))
        group = f"({' '.join(names)})" if into == "_".join(names) else f"{into}=({' '.join(names)})"
        right = " ".join((*rest[:at], group, *rest[at:]))
        left = " ".join(x.names)
        if s.chance(0.3) and at in (0, len(rest)) and rest:
            left, right = "...", f"{group} ..." if at == 0 else f"... {group}"
        ours = f'{x.var}.rearrange("{left} -> {right}")'
    dims = (*((n, x.sizes[n]) for n in rest[:at]), (into, size), *((n, x.sizes[n]) for n in rest[at:]))
    turned = ordered(x, [*rest[:at], *names, *rest[at:]])
    return step("reshaping", s.value(dims), ours, f"jnp.reshape({turned}, {tuple(z for _, z in dims)})")


def _alike(s: Scope, x: Value, count: int) -> list[Value]:
    """Values whose names the first one's contain."""
    return [x, *(s.pick(lambda v: set(v.dims) <= set(x.dims)) for _ in range(count - 1))]


def stack(s: Scope):
    x = s.pick()
    values = _alike(s, x, s.between(1, 3))
    if s.chance(0.3):
        values = s.some(values, len(values))
    most = max(values, key=lambda v: len(v.dims))
    new = s.new_name(*most.names)
    s.require(s.fits(new, len(values)))
    dims = ((new, len(values)), *most.dims)
    parts = ", ".join(f"jnp.broadcast_to({aligned(v, most.names)}, {most.shape})" for v in values)
    names = ", ".join(v.var for v in values)
    return step("joining", s.value(dims), f'tr.stack([{names}], "{new}")', f"jnp.stack([{parts}])")


def concatenate(s: Scope):
    x = s.ranked()
    name = s.one(x.names)
    rest = set(without(x.dims, name))
    y = s.pick(lambda v: name in v.names and set(without(v.dims, name)) <= rest)
    values = [x, y] if s.chance(0.5) else [y, x]
    most = max(values, key=lambda v: len(v.dims))
    total = sum(v.sizes[name] for v in values)
    s.require(s.fits(name, total))
    dims = tuple((n, total) if n == name else (n, size) for n, size in most.dims)
    shape = lambda v: tuple(v.sizes[name] if n == name else size for n, size in most.dims)
    parts = ", ".join(f"jnp.broadcast_to({aligned(v, most.names)}, {shape(v)})" for v in values)
    ours = f'tr.concatenate([{", ".join(v.var for v in values)}], "{name}")'
    return step("joining", s.value(dims), ours, f"jnp.concatenate([{parts}], axis={most.axis(name)})")


def pad(s: Scope):
    x = s.ranked()
    names = s.some(x.names, 1, 2)
    widths = {n: (s.between(0, 2), s.between(0, 2)) for n in names}
    dims = tuple((n, size + sum(widths.get(n, (0, 0)))) for n, size in x.dims)
    s.require(all(s.fits(*dim) for dim in dims))
    value = s.one(["", ", value=2.0"])
    shown = "{" + ", ".join(f'"{n}": {w}' for n, w in widths.items()) + "}"
    pairs = [widths.get(n, (0, 0)) for n in x.names]
    constant = ", constant_values=2.0" if value else ""
    return step("reshaping", s.value(dims), f"tr.pad({x.var}, {shown}{value})", f"jnp.pad({x.var}, {pairs}{constant})")


def roll(s: Scope):
    x = s.ranked()
    name = s.one(x.names)
    by = s.between(-3, 3)
    ours = f"tr.roll({x.var}, {by}, {s.name_text(name, x.dims)})"
    return step("reshaping", s.value(x.dims), ours, f"jnp.roll({x.var}, {by}, axis={x.axis(name)})")


def unbind(s: Scope):
    x = s.pick(lambda v: any(1 <= size <= 3 for size in v.shape))
    name = s.one([n for n, size in x.dims if size <= 3])
    dims = without(x.dims, name)
    results = tuple(s.value(dims) for _ in range(x.sizes[name]))
    plain = f"jnp.moveaxis({x.var}, {x.axis(name)}, 0)"
    return step("reshaping", results, f"{x.var}.unbind({s.name_text(name, x.dims)})", plain)


def split(s: Scope):
    x = s.ranked()
    name = s.one([n for n, size in x.dims if size > 1])
    size, i = x.sizes[name], x.axis(name)
    if s.chance(0.5):
        count = s.one([d for d in range(2, size + 1) if size % d == 0])
        s.require(count <= 4)
        pieces, text = [size // count] * count, str(count)
    else:
        cut = s.between(1, size - 1)
        pieces = [cut, size - cut]
        text = str(pieces)
    s.require(all(s.fits(name, p) for p in pieces))
    results = tuple(s.value(tuple((n, p) if n == name else (n, z) for n, z in x.dims)) for p in pieces)
    cuts = [sum(pieces[: k + 1]) for k in range(len(pieces) - 1)]
    ours = s.one([f'{x.var}.split("{name}", {text})', f'tr.split({x.var}, "{name}", {text})'])
    return step("reshaping", results, ours, f"jnp.split({x.var}, {cuts}, axis={i})")


def triangle(s: Scope):
    x = s.ranked(2)
    row, column = s.some(x.names, 2, 2)
    fn, k = s.one(["tril", "triu"]), s.between(-1, 1)
    i, j = x.axis(row), x.axis(column)
    more = f", {k}" if k else ""
    back = "jnp.moveaxis({}, (-2, -1), ({}, {}))"
    plain = back.format(f"jnp.{fn}(jnp.moveaxis({x.var}, ({i}, {j}), (-2, -1)){more})", i, j)
    return step("reshaping", s.value(x.dims), f'tr.{fn}({x.var}, "{row}", "{column}"{more})', plain)


def create(s: Scope):
    """Arrays that are made inside the program."""
    known = s.some([d for v in s.values for d in v.dims] or list(s.sizes.items()), 1, 2)
    dims = tuple(dict(known).items())
    s.require(not s.mapped & {n for n, _ in dims} and all(s.fits(*d) for d in dims))
    shape = tuple(size for _, size in dims)
    (name, size), *_ = dims
    match s.between(0, 4):
        case 0:
            return step("creation", s.value(dims), f"tr.ones({axes_text(dims)})", f"jnp.ones({shape})")
        case 1:
            ours = f"tr.full({axes_text(dims)}, 0.5)"
            return step("creation", s.value(dims), ours, f"jnp.full({shape}, 0.5)")
        case 2:
            value = s.value(((name, size),), "i32", size)
            return step("creation", value, f'tr.arange(tr.Axis("{name}", {size}))', f"jnp.arange({size})")
        case 3:
            value = s.value(((name, size),))
            ours = f'tr.linspace(tr.Axis("{name}", {size}), start=-1.0, stop=1.5)'
            return step("creation", value, ours, f"jnp.linspace(-1.0, 1.5, {size})")
    ids = s.pick(lambda v: v.below > 1, "i32")
    name = s.new_name(*ids.names)
    s.require(s.fits(name, ids.below))
    value = s.value((*ids.dims, (name, ids.below)))
    ours = f'tr.one_hot({ids.var}, tr.Axis("{name}", {ids.below}))'
    return step("creation", value, ours, f"jax.nn.one_hot({ids.var}, {ids.below})")


def place(s: Scope):
    """Moved, kept under a name, or settled where it is: no value changes."""
    x = s.ranked(dtype=s.one([s.float(), "f32", "i32", "bool"]))
    choices = ['tr.save({}, "kept")', "tr.settle({})", 'tr.checkpoint(lambda h: tr.save(h, "kept"), saving.Keep())({})']
    if s.setting.mode in ("explicit", "auto"):
        axis, size = s.one(s.setting.mesh)
        name = s.one(x.names)
        s.require(x.sizes[name] % size == 0)
        choices += ["tr.shard({})", 'tr.shard({}, "compute")', f'tr.shard({{}}, {{{{"{name}": "{axis}"}}}})']
    return step("placing", s.value(x.dims, x.dtype, x.below), s.one(choices).format(x.var), x.var)


STEPS = (rename, place, split_axis, merge_axes, stack, concatenate, pad, roll, unbind, split, triangle, create)
