"""Random programs of JAX: a few arrays, a few operations on them, all from one seed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Pool = list[jax.Array]
MESH = {"x": 2, "y": 4}


def _pick(random: np.random.Generator, pool: Pool, least: int = 0) -> jax.Array:
    """One of the arrays with at least so many dimensions; the latest are the likeliest."""
    fitting = [a for a in pool if a.ndim >= least]
    return fitting[max(random.integers(len(fitting)), random.integers(len(fitting)))]


def _axis(random: np.random.Generator, x: jax.Array) -> int:
    return int(random.integers(x.ndim))


def _whole(x: jax.Array, scale: float) -> jax.Array:
    """Integers from floats; what is rounded is seldom near an integer, so that rounding before it changes nothing."""
    return (x * scale + 0.1237).astype(jnp.int32)


def _index(random: np.random.Generator, x: jax.Array, size: int, shape: tuple[int, ...]) -> jax.Array:
    """Integers that depend on an array, some of them out of range."""
    noise = jnp.asarray(random.integers(0, size + 2, shape), jnp.int32)
    return (noise + _whole(jnp.abs(x).sum(), 3.17)) % (size + 1) - 1


def _unary(random, pool):
    functions = (
        jnp.sin,
        jnp.tanh,
        jnp.exp,
        lambda x: jnp.log1p(jnp.abs(x)),
        lax.logistic,
        lax.erf,
        jnp.floor,
        jnp.sign,
        jnp.cbrt,
        lambda x: lax.rsqrt(1 + x * x),
        jnp.expm1,
        jnp.round,
    )
    return functions[random.integers(len(functions))](jnp.clip(_pick(random, pool), -3, 3))


def _binary(random, pool):
    functions = (
        jnp.add,
        jnp.subtract,
        jnp.multiply,
        jnp.maximum,
        jnp.minimum,
        lambda a, b: a / (1 + jnp.abs(b)),
        jnp.arctan2,
        lambda a, b: jnp.where(a < b, a, -b),
        lambda a, b: lax.rem(a, 1 + jnp.abs(b)),
        lambda a, b: jnp.power(jnp.abs(a) + 0.1, b),
    )
    x = jnp.clip(_pick(random, pool), -3, 3)
    y = jnp.resize(jnp.clip(_pick(random, pool), -3, 3), x.shape)
    return functions[random.integers(len(functions))](x, y)


def _integers(random, pool):
    x = _whole(_pick(random, pool), 97.31)
    y = jnp.resize(_whole(_pick(random, pool), 7.13), x.shape)
    bits = y.astype(jnp.uint32) & 31
    found = (
        x // jnp.where(y == 0, 3, y),
        lax.rem(x, y),
        lax.div(x, y),
        x ^ y,
        (x & y) | ~x,
        x << (y & 7),
        x >> (y & 7),
        lax.shift_right_logical(x, y & 31),
        lax.population_count(x),
        (x.astype(jnp.uint32) >> bits) % 1000,
        lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) % 1013,
    )
    return found[random.integers(len(found))].astype(jnp.float32) / 64


def _reduction(random, pool):
    x = _pick(random, pool, 1)
    axis = _axis(random, x)
    functions = (
        jnp.sum,
        jnp.max,
        jnp.min,
        jnp.mean,
        lambda x, axis: jnp.argmax(_whole(x, 8.0), axis).astype(jnp.float32),
        lambda x, axis: jnp.argmin(_whole(x, 8.0), axis).astype(jnp.float32),
        jax.nn.logsumexp,
        lambda x, axis: jnp.all(x > -1, axis).astype(jnp.float32),
        lambda x, axis: jnp.prod(jnp.clip(x, -1.5, 1.5), axis),
    )
    return functions[random.integers(len(functions))](x, axis=axis)


def _cumulative(random, pool):
    x = jnp.clip(_pick(random, pool, 1), -2, 2)
    functions = (lax.cumsum, lax.cummax, lax.cumlogsumexp, lambda x, axis: lax.cumprod(1 + x / 8, axis))
    return functions[random.integers(len(functions))](x, _axis(random, x))


def _move(random, pool):
    x = _pick(random, pool, 1)
    axis = _axis(random, x)
    padding = [(int(random.integers(-1, 3)), int(random.integers(0, 3)), int(random.integers(0, 2))) for _ in x.shape]
    padding = [(max(low, -(n - 1)), high, gap) for (low, high, gap), n in zip(padding, x.shape)]
    found = (
        lambda: x.transpose(*random.permutation(x.ndim)),
        lambda: jnp.flip(x, axis),
        lambda: jnp.repeat(x, 2, axis),
        lambda: x.reshape(-1, x.shape[axis]),
        lambda: lax.pad(x, jnp.float32(0.5), padding),
        lambda: jnp.concatenate([x, x * 2, x[::-1]], axis),
        lambda: jnp.roll(x, int(random.integers(3)), axis),
        lambda: lax.slice_in_dim(x, x.shape[axis] // 3, None, 2, axis),
        lambda: jnp.broadcast_to(x, (3, *x.shape)),
        lambda: jnp.stack([x, -x], axis),
    )
    return found[random.integers(len(found))]()


def _sorted(random, pool):
    x = _pick(random, pool, 1)
    found = (
        lambda: jnp.sort(x, axis=_axis(random, x)),
        lambda: jnp.argsort(_whole(x, 8.0), axis=-1).astype(jnp.float32),
        lambda: lax.top_k(x, max(1, x.shape[-1] // 2))[0],
        lambda: lax.top_k(_whole(x, 8.0), 1)[1].astype(jnp.float32),
        lambda: lax.sort((_whole(x, 4.0), x * 2), num_keys=1)[1],
    )
    return found[random.integers(len(found))]()


def _lookup(random, pool):
    x = _pick(random, pool, 1)
    axis = _axis(random, x)
    index = _index(random, x, x.shape[axis], (3, 2))
    mode = ("clip", "fill", "wrap")[random.integers(3)]
    new = jnp.resize(_pick(random, pool), (*index.shape, *x.shape[1:]))
    rows = _index(random, x, x.shape[0], index.shape)
    along = jnp.clip(_index(random, x, x.shape[axis], x.shape), 0, x.shape[axis] - 1)
    start = [_index(random, x, n, ()) for n in x.shape]
    part = jnp.resize(_pick(random, pool), tuple(max(1, n // 2) for n in x.shape))
    found = (
        lambda: jnp.take(x, index, axis, mode=mode),
        lambda: jnp.take_along_axis(x, along, axis),
        lambda: x.at[rows].add(new, mode="drop"),
        lambda: x.at[rows].max(new),
        lambda: x.at[rows[:1, :1]].set(new[:1, :1]),
        lambda: lax.dynamic_slice(x, start, part.shape),
        lambda: lax.dynamic_update_slice(x, part, start),
        lambda: x.at[rows].multiply(1 + new / 4, mode="drop"),
    )
    return found[random.integers(len(found))]()


def _product(random, pool):
    x, y = _pick(random, pool, 1), _pick(random, pool, 1)
    size = x.shape[-1]
    other = jnp.resize(y, (size, 3))
    third = jnp.resize(y, (*x.shape[:-1], 5, size))
    wide = jnp.resize(x, (2, 7, 4))
    kernel = jnp.resize(y, (3, 2 if (groups := int(random.integers(1, 3))) == 2 else 4, 6))
    stride, spread, gap = (int(random.integers(1, 3)) for _ in range(3))
    convolved = lambda: lax.conv_general_dilated(
        wide, kernel, (stride,), [(int(random.integers(3)), 2)], (gap,), (spread,), ("NTC", "TIO", "NTC"), groups
    )
    found = (
        lambda: x @ other,
        lambda: jnp.einsum("...k,...nk->...n", x, third),
        convolved,
        lambda: jnp.einsum("...k,...nk->n...", x, third),
        lambda: jnp.outer(x.ravel()[:5], y.ravel()[:6]),
    )
    return found[random.integers(len(found))]()


def _loop(random, pool):
    x = jnp.clip(_pick(random, pool, 1), -2, 2)
    weight = jnp.resize(_pick(random, pool), (x.shape[-1], x.shape[-1]))
    count = _whole(jnp.abs(x).sum(), 5.19) % 4
    scan = lambda: lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), jnp.zeros(x.shape[1:]), x)
    found = (
        lambda: lax.fori_loop(0, count, lambda i, a: jnp.tanh(a @ weight) + i, x),
        lambda: scan()[1],
        lambda: scan()[0],
        lambda: lax.while_loop(lambda a: jnp.abs(a).max() > 0.5, lambda a: a * 0.7, x),
        lambda: lax.cond(x.sum() > 0, jnp.sin, lambda a: a * 2, x),
        lambda: lax.switch(count, [jnp.cos, jnp.tanh, lambda a: -a, lambda a: a + 1], x),
        lambda: jax.grad(lambda a: jnp.sum(jax.checkpoint(lambda b: jnp.tanh(b @ weight))(a) ** 2))(x),
    )
    return found[random.integers(len(found))]()


def _drawn(random, pool):
    x = _pick(random, pool)
    key = jax.random.fold_in(jax.random.key(int(random.integers(99))), _whole(x.sum(), 9.71))
    found = (
        lambda: jax.random.normal(key, (3, 5)),
        lambda: jax.random.uniform(key, (7,)),
        lambda: jax.random.bernoulli(key, 0.3, (4, 4)).astype(jnp.float32),
        lambda: jax.random.permutation(key, 6).astype(jnp.float32),
        lambda: jax.random.randint(key, (5,), 0, 17).astype(jnp.float32),
    )
    return found[random.integers(len(found))]()


LOCAL = (_unary, _binary, _integers, _reduction, _cumulative, _move, _sorted, _lookup, _product, _loop, _drawn)


def _collective(random, pool):
    axis = ("x", "y", ("x", "y"))[random.integers(3)]
    count = int(np.prod([MESH[a] for a in ((axis,) if isinstance(axis, str) else axis)]))
    one = "y" if axis == ("x", "y") else axis
    x = _pick(random, pool, 1)
    wide = jnp.resize(x, (count, 3))
    shift = int(random.integers(1, MESH[one]))
    pairs = [(i, (i + shift) % MESH[one]) for i in range(MESH[one] - int(random.integers(2)))]
    found = (
        lambda: lax.psum(x, axis),
        lambda: lax.pmax(x, axis),
        lambda: lax.pmean(x, axis),
        lambda: lax.all_gather(x, axis),
        lambda: lax.all_gather(x, axis, axis=0, tiled=True),
        lambda: lax.psum_scatter(wide, axis, scatter_dimension=0, tiled=True),
        lambda: lax.all_to_all(wide, axis, 0, 0, tiled=True),
        lambda: lax.ppermute(x, one, pairs),
        lambda: x * (1 + lax.axis_index(axis)),
        lambda: lax.cond(lax.axis_index(axis) > 0, jnp.sin, lambda a: a * 2, x),
    )
    return found[random.integers(len(found))]()


def program(seed: int, *, devices: bool = False, by: float = 0.0) -> tuple[Callable, list[np.ndarray]]:
    """A function of arrays that returns a list of arrays, and arrays for it.

    Args:
        seed: of everything.
        devices: with collectives over the mesh axes of `MESH`, as the body of a `shard_map`.
        by: the result of each operation is changed by this share of itself, as rounding might.
    """
    random = np.random.default_rng(seed)
    shapes = [tuple(random.integers(2, 7, random.integers(1, 4))) for _ in range(3)]
    arrays = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    plan = [int(random.integers(2**31)) for _ in range(10)]

    def run(*inputs: jax.Array) -> list[jax.Array]:
        pool = list(inputs)
        for number in plan:
            step = np.random.default_rng(number)
            make = _collective if devices and step.random() < 0.4 else LOCAL[step.integers(len(LOCAL))]
            new = make(step, pool).astype(jnp.float32)
            if 0 < new.size < 2000:
                new = jnp.clip(jnp.where(jnp.isfinite(new), new, 0.0), -20, 20)
                pool.append(new * (1 + by) if by else new)
        return pool[len(inputs) :]

    return run, arrays
