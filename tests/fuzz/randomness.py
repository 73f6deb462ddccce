"""Steps that draw random numbers, which are the same on every mesh."""

from .program import axes_text
from .scope import Scope, step

DRAWS = (
    ("normal({key}, {axes})", "normal({key}, {shape})", "f32"),
    ("uniform({key}, {axes}, minval=-1.0, maxval=1.0)", "uniform({key}, {shape}, minval=-1.0, maxval=1.0)", "f32"),
    ("truncated_normal({key}, {axes}, -1.0, 1.0)", "truncated_normal({key}, -1.0, 1.0, {shape})", "f32"),
    ('normal({key}, {axes}, at="params")', "normal({key}, {shape})", "f32"),
    ("bernoulli({key}, {axes}, 0.4)", "bernoulli({key}, 0.4, {shape})", "bool"),
    ("gumbel({key}, {axes})", "gumbel({key}, {shape})", "f32"),
    ("logistic({key}, {axes})", "logistic({key}, {shape})", "f32"),
    ("laplace({key}, {axes})", "laplace({key}, {shape})", "f32"),
    ("exponential({key}, {axes})", "exponential({key}, {shape})", "f32"),
    ("cauchy({key}, {axes}).clip(-9.0, 9.0)", "cauchy({key}, {shape}).clip(-9.0, 9.0)", "f32"),
    ("rademacher({key}, {axes}, jnp.float32)", "rademacher({key}, {shape}, jnp.float32)", "f32"),
)


def draw(s: Scope):
    known = dict(s.some([d for v in s.values for d in v.dims] or list(s.sizes.items()), 1, 3))
    dims = tuple(known.items())
    s.require(not s.mapped & set(known) and all(s.fits(*d) for d in dims))
    ours, plain, dtype = s.one(DRAWS)
    key = f"jax.random.key({s.between(0, 99)})"
    value = s.value(dims, dtype)
    if s.chance(0.1):
        number = s.between(0, 9)
        ours = ours.replace("{key}", f"tr.random.fold_in({{key}}, {number})")
        plain = plain.replace("{key}", f"jax.random.fold_in({{key}}, {number})")
    ours, plain = (t.format(key=key, axes=axes_text(dims), shape=value.shape) for t in (ours, plain))
    return step("random", value, f"tr.random.{ours}", f"jax.random.{plain}")


def integers(s: Scope):
    name, size = s.one([d for v in s.values for d in v.dims])
    s.require(name not in s.mapped and s.fits(name, size))
    below = s.one([z for v in s.values for z in v.shape if z > 1])
    value = s.value(((name, size),), "i32", below)
    key = f"jax.random.key({s.between(0, 99)})"
    ours = f'tr.random.randint({key}, {{"{name}": {size}}}, minval=0, maxval={below})'
    return step("random", value, ours, f"jax.random.randint({key}, ({size},), 0, {below})")


def dropout(s: Scope):
    x = s.ranked()
    key = f"jax.random.key({s.between(0, 99)})"
    plain = f"jnp.where(jax.random.bernoulli({key}, 0.75, {x.shape}), {x.var} / 0.75, 0.0)"
    return step("random", s.value(x.dims), f"tr.random.dropout({key}, {x.var}, 0.25)", plain)


def shuffle(s: Scope):
    x = s.ranked()
    name = s.one(x.names)
    key = f"jax.random.key({s.between(0, 99)})"
    plain = f"jax.random.permutation({key}, {x.var}, {x.axis(name)})"
    ours = f"tr.random.shuffle({key}, {x.var}, {s.name_text(name, x.dims)})"
    return step("random", s.value(x.dims), ours, plain)


def permutation(s: Scope):
    """Positions in random order, to index with."""
    name, size = s.one([d for v in s.values for d in v.dims])
    s.require(name not in s.mapped and s.fits(name, size))
    key = f"jax.random.key({s.between(0, 99)})"
    ours = f'tr.random.permutation({key}, tr.Axis("{name}", {size}))'
    value = s.value(((name, size),), "i32", size)
    return step("random", value, ours, f"jax.random.permutation({key}, {size}).astype(jnp.int32)")


STEPS = (draw, draw, draw, integers, dropout, shuffle, permutation)
