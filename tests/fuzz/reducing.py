"""Steps that reduce names, or go along one."""

from .program import Value, aligned, ordered, without, written
from .scope import Scope, step

REDUCTIONS = {
    "sum": "jnp.sum",
    "mean": "jnp.mean",
    "max": "jnp.max",
    "min": "jnp.min",
    "prod": "jnp.prod",
    "var": "jnp.var",
    "std": "jnp.std",
    "logsumexp": "jax.nn.logsumexp",
    "nansum": "jnp.nansum",
    "nanmean": "jnp.nanmean",
    "nanmax": "jnp.nanmax",
    "nanmin": "jnp.nanmin",
}
MASKED = ("sum", "mean", "var")
ALONG = {
    "cumsum": "jnp.cumsum",
    "sort": "jnp.sort",
    "flip": "jnp.flip",
    "cummax": "jax.lax.cummax",
    "softmax": "jax.nn.softmax",
    "log_softmax": "jax.nn.log_softmax",
    "cumprod": "jnp.cumprod",
}


def _over(s: Scope, x: Value) -> tuple[list[str], str]:
    """The names to reduce, and how they are written (nothing for all)."""
    if s.chance(0.2):
        return list(x.names), s.one(["", "None"])
    names = s.some(x.names, 1, 2)
    return names, s.names_text(names, x.dims)


def reduction(s: Scope):
    x = s.ranked(dtype=s.float())
    name = s.one(["sum", "sum", "mean", *REDUCTIONS] if x.dtype == "f32" else ["sum", "mean", "logsumexp"])
    names, over = _over(s, x)
    gone = [x.axis(n) for n in names]
    count = 1
    for n in names:
        count *= x.sizes[n]
    s.require(not (name in ("std", "prod") and not 1 < count <= 6))
    where, mask = "", ""
    if name in MASKED and s.chance(0.25):
        m = s.pick(lambda v: set(v.dims) <= set(x.dims), "bool")
        # An empty selection has no mean; one position is always taken.
        where, mask = f", where={m.var}", f", where=jnp.broadcast_to({aligned(m, x.names)}, {x.shape})"
        name = "sum"
        over = over or "None"
    result = s.value(without(x.dims, *names), x.dtype)
    call = f"{x.var}.{name}({over}{where})" if s.chance(0.5) else f"tr.{name}({x.var}{over and ', '}{over}{where})"
    return step("reduction", result, call, f"{REDUCTIONS[name]}({x.var}, axis={written(gone)}{mask})")


LIFTED = (
    ("tr.lift_reduction({fn})({x}, {names})", "{fn}({x}, axis={axes})", "lambda a, axis: jnp.sum(a * a, axis=axis)"),
    ("tr.lift_reduction({fn})({x}, {names})", "{fn}({x}, axis={axes})", "jnp.ptp"),
)
ALONG_LIFTED = ("lambda a, axis: jnp.flip(jnp.cumsum(a, axis), axis)", "lambda a, axis: jax.nn.standardize(a, axis)")


def lifted(s: Scope):
    """Functions of JAX's made functions by name, and sums that leave out what is no number."""
    x = s.ranked()
    if s.chance(0.4):
        name, fn = s.one(x.names), s.one(ALONG_LIFTED)
        ours = f"tr.lift_along({fn})({x.var}, {s.name_text(name, x.dims)})"
        return step("along a name", s.value(x.dims), ours, f"({fn})({x.var}, {x.axis(name)})")
    names = s.some(x.names, 1, 2)
    result, axes = s.value(without(x.dims, *names)), written(x.axis(n) for n in names)
    if s.chance(0.4):
        ours = f"tr.nansum(tr.where({x.var} > 0.0, {x.var}, jnp.nan), {s.names_text(names, x.dims)})"
        return step("reduction", result, ours, f"jnp.nansum(jnp.where({x.var} > 0.0, {x.var}, jnp.nan), axis={axes})")
    ours, plain, fn = s.one(LIFTED)
    ours = ours.format(fn=fn, x=x.var, names=s.names_text(names, x.dims))
    return step("reduction", result, ours, plain.format(fn=f"({fn})", x=x.var, axes=axes))


def reduce_others(s: Scope):
    """Reductions of truth values and of integers."""
    if s.chance(0.5):
        x = s.ranked(dtype="bool")
        name, dtype = s.one([("any", "bool"), ("all", "bool"), ("count_nonzero", "i32")])
    else:
        x = s.ranked(dtype="i32")
        name, dtype = s.one([("sum", "i32"), ("max", "i32"), ("min", "i32")])
    names, over = _over(s, x)
    gone = written(x.axis(n) for n in names)
    result = s.value(without(x.dims, *names), dtype)
    return step("reduction", result, f"{x.var}.{name}({over})", f"jnp.{name}({x.var}, axis={gone})")


def along(s: Scope):
    x = s.ranked(dtype=s.float())
    (name,) = s.some(x.names, 1, 1)
    fn = s.one(["softmax", *ALONG] if x.dtype == "f32" else ["softmax", "log_softmax"])
    s.require(fn != "cumprod" or x.sizes[name] <= 6)
    text = s.name_text(name, x.dims)
    call = f"{x.var}.{fn}({text})" if s.chance(0.5) else f"tr.{fn}({x.var}, {text})"
    return step("along a name", s.value(x.dims, x.dtype), call, f"{ALONG[fn]}({x.var}, axis={x.axis(name)})")


def best(s: Scope):
    """Positions of extremes, which can index what is as long."""
    x = s.ranked()
    (name,) = s.some(x.names, 1, 1)
    fn = s.one(["argmax", "argmin", "argsort"])
    dims = x.dims if fn == "argsort" else without(x.dims, name)
    result = s.value(dims, "i32", x.sizes[name])
    text = s.name_text(name, x.dims)
    # Where two are equal but for rounding, a mesh may find the other one: they are made to differ.
    distinct = f"jnp.round({x.var} * 8.0)"
    ours = f"tr.round({x.var} * 8.0).{fn}({text})"
    return step("along a name", result, ours, f"jnp.{fn}({distinct}, axis={x.axis(name)})")


def top_k(s: Scope):
    x = s.ranked()
    (name,) = s.some(x.names, 1, 1)
    k = s.between(1, x.sizes[name])
    new = s.new_name(*x.names) if s.chance(0.6) else name
    s.require(s.fits(new, k))
    dims = tuple((new, k) if n == name else (n, size) for n, size in x.dims)
    values, places = s.value(dims), s.value(dims, "i32", x.sizes[name])
    moved = ordered(x, [*(n for n in x.names if n != name), name])
    i = x.axis(name)
    plain = f"(jnp.moveaxis(a, -1, {i}) for a in jax.lax.top_k({moved}, {k}))"
    more = f', new_name="{new}"' if new != name else ""
    ours = f"tr.top_k({x.var}, {s.name_text(name, x.dims)}, {k}{more})"
    return step("along a name", (values, places), ours, plain)


def statistics(s: Scope):
    """A mean that is taken off, as norms do."""
    x = s.ranked()
    (name,) = s.some(x.names, 1, 1)
    i = x.axis(name)
    ours = f'{x.var} - {x.var}.mean("{name}")'
    return step("reduction", s.value(x.dims), ours, f"{x.var} - jnp.mean({x.var}, axis={i}, keepdims=True)")


STEPS = (reduction, reduction, reduction, reduce_others, lifted, along, along, best, top_k, statistics)
