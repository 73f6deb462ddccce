"""Steps with functions inside: maps, loops, branches, recomputation, compilation and derivatives."""

import dataclasses
from collections.abc import Callable

from .program import Function, Statement, Value, aligned, without, written
from .scope import Scope, Unfit, step

LONGEST = 100  # turns of a loop: the plain twin writes them out, and XLA compiles hundreds of bodies for minutes

Grow = Callable[[Scope, int], list[Statement]]


def body(
    s: Scope, grow: Grow, params: list[Value], results: int = 1, *, mapped: frozenset[str] = frozenset(), floats=True
):
    """A function of the given parameters that returns values made inside."""
    s.require(s.depth < 2)
    inner = s.inner(params, mapped=mapped)
    statements = grow(inner, s.between(1, 3))
    made = [v for statement in statements for v in statement.results if v.dtype == "f32" or not floats]
    made = [v for v in made if not mapped & set(v.names)]
    if len(made) < results:
        raise Unfit
    return Function(s.fresh("fn"), tuple(params), tuple(statements), tuple(made[-results:]))


def _arguments(s: Scope, name: str, most: int = 3) -> list[Value]:
    """Values of which the first has the name."""
    first = s.pick(lambda v: name in v.names, dtype=s.one(["f32", "f32", "f32", "i32"]))
    rest = [s.pick(dtype=s.one(["f32", "f32", "f32", "i32", "bool"])) for _ in range(s.between(0, most - 1))]
    values = list({v.var: v for v in (first, *rest)}.values())
    sizes = {v.sizes[name] for v in values if name in v.names}
    s.require(len(sizes) == 1 and max(sizes) <= LONGEST)
    return values


def _name(s: Scope) -> str:
    return s.one([n for v in s.values if v.dtype == "f32" for n in v.names])


def vmap(s: Scope, grow: Grow):
    name = _name(s)
    values = _arguments(s, name)
    size = values[0].sizes[name]
    params = [s.param(without(v.dims, name), v) for v in values]
    fn = body(s, grow, params, s.one([1, 1, 2]), mapped=frozenset({name}))
    results = tuple(s.value(((name, size), *v.dims)) for v in fn.returns)
    args = ", ".join(v.var for v in values)
    in_axes = written(v.axis(name) if name in v.names else None for v in values)
    text = s.name_text(name, values[0].dims)
    one = results[0] if len(results) == 1 else results
    return step(
        "vmap", one, f"tr.vmap({fn.name}, {text})({args})", f"jax.vmap({fn.name}, in_axes={in_axes})({args})", fn
    )


def vmap_of_keys(s: Scope, grow: Grow):
    """Random numbers of its own for each position."""
    name = _name(s)
    x = s.pick(lambda v: name in v.names)
    size = x.sizes[name]
    row, key = s.param(without(x.dims, name), x), s.fresh("k")
    s.require(s.depth < 2 and len(row.dims) > 0)
    h, noise = s.fresh(), s.fresh()
    made = Value(h, row.dims)
    axes = "{" + ", ".join(f'"{n}": {z}' for n, z in row.dims) + "}"
    draw = Statement(
        "random",
        (Value(noise, row.dims),),
        (f"{noise} = tr.random.normal({key}, {axes})",),
        (f"{noise} = jax.random.normal({key}, {row.shape})",),
    )
    add = step("elementwise", made, f"{row.var} + {noise}", f"{row.var} + {noise}")
    fn = Function(s.fresh("fn"), (Value(key, ()), row), (draw, add), (made,))
    seed = s.between(0, 99)
    result = s.value(((name, size), *row.dims))
    ours = f'tr.vmap({fn.name}, "{name}")(tr.random.split(jax.random.key({seed}), "{name}", {size}), {x.var})'
    plain = (
        f"jax.vmap({fn.name}, in_axes=(0, {x.axis(name)}))(jax.random.split(jax.random.key({seed}), {size}), {x.var})"
    )
    return step("vmap", result, ours, plain, fn)


def _carry(s: Scope, grow: Grow, values: list[Value], name: str, also: bool):
    """A loop's body: it updates a value by what it makes of one position of the others."""
    start = s.pick(lambda v: name not in v.names)
    carry = s.param(start.dims, start)
    params = [carry, *(s.param(without(v.dims, name), v) for v in values)]
    inner = body(s, grow, params, mapped=frozenset({name}))
    (made,) = inner.returns
    extra = [n for n in made.names if n not in carry.names]
    s.require(all(carry.sizes.get(n, size) == size for n, size in made.dims if n not in extra))
    summed = Value(s.fresh(), without(made.dims, *extra))
    sums = step(
        "reduction",
        summed,
        f"{made.var}.sum({written(repr(n) for n in extra)})" if extra else made.var,
        f"jnp.sum({made.var}, axis={written(made.axis(n) for n in extra)})" if extra else made.var,
    )
    after = Value(s.fresh(), carry.dims)
    update = step(
        "elementwise",
        after,
        f"tr.tanh({carry.var} + {summed.var})",
        f"jnp.tanh({carry.var} + {aligned(summed, carry.names)})",
    )
    returns = (after, made) if also else (after,)
    return start, Function(inner.name, inner.params, (*inner.statements, sums, update), returns)


def _plain_loop(
    s: Scope, start: Value, values: list[Value], name: str, fn: Function, result: Value, ys: Value | None, back: bool
):
    """The loop written with Python's `for`."""
    i, size = s.fresh("i"), values[0].sizes[name]
    args = [f"jnp.take({v.var}, {i}, axis={v.axis(name)})" if name in v.names else v.var for v in values]
    order = f"reversed(range({size}))" if back else f"range({size})"
    call = f"{fn.name}({', '.join((result.var, *args))})"
    lines = [f"{result.var} = {start.var}"]
    if ys is None:
        return [*lines, f"for {i} in {order}:", f"    {result.var} = {call}"]
    stacked = f"jnp.stack({ys.var}[::-1])" if back else f"jnp.stack({ys.var})"
    return [
        *lines,
        f"{ys.var} = []",
        f"for {i} in {order}:",
        f"    {result.var}, y = {call}",
        f"    {ys.var}.append(y)",
        f"{ys.var} = {stacked}",
    ]


POLICIES = ("saving.Keep()", "saving.everything", "saving.products", "saving.Keep(names=None)")


def _options(s: Scope, size: int, *, back: bool) -> str:
    options = ["reverse=True"] if back else []
    if s.chance(0.3):
        options.append(f"unroll={s.one([size, 2])}")
    if s.chance(0.3):
        options.append(f"policy={s.one(POLICIES)}")
    return "".join(f", {o}" for o in options)


def loop(s: Scope, grow: Grow):
    """`scan` and `fold`."""
    name = _name(s)
    values = _arguments(s, name, 2)
    also, back = s.chance(0.5), s.chance(0.3)
    start, fn = _carry(s, grow, values, name, also)
    size = values[0].sizes[name]
    result = s.value(start.dims)
    ys = s.value(((name, size), *fn.returns[1].dims)) if also else None
    verb = "scan" if also else "fold"
    left = f"{result.var}, {ys.var}" if ys else result.var
    call = f"tr.{verb}({fn.name}, {s.name_text(name, values[0].dims)}{_options(s, size, back=back)})"
    ours = f"{left} = {call}({', '.join((start.var, *(v.var for v in values)))})"
    plain = _plain_loop(s, start, values, name, fn, result, ys, back)
    return Statement("loop", (result, ys) if ys else (result,), (ours,), tuple(plain), (fn,))


def layers(s: Scope, grow: Grow):
    """Stacked layers, as a loop or written out."""
    name = _name(s)
    values = [s.pick(lambda v: name in v.names)]
    start, fn = _carry(s, grow, values, name, False)
    carry, layer = fn.params
    fn = Function(fn.name, (layer, carry), fn.statements, fn.returns)
    # A pipeline cuts the batch of what layers are given; it cannot cut what they read from around them, or make.
    made = {kind for statement in fn.statements for kind in statement.kinds()} & {"creation", "off the mesh", "random"}
    s.require(not (fn.uses() or made) or all(entry != name for entry, _ in s.setting.compute))
    size = values[0].sizes[name]
    result = s.value(start.dims)
    more = s.one(["", "", ", unrolled=True", ", unroll=1"])
    policy = f", policy={s.one(POLICIES)}" if s.chance(0.3) else ""
    stacked = f'tr.Stacked({values[0].var}, tr.Axis("{name}", {size}){more})'
    ours = f"{result.var} = {stacked}.fold({start.var}, call={fn.name}{policy})"
    i = s.fresh("i")
    plain = (
        f"{result.var} = {start.var}",
        f"for {i} in range({size}):",
        f"    {result.var} = {fn.name}(jnp.take({values[0].var}, {i}, axis={values[0].axis(name)}), {result.var})",
    )
    return Statement("layers", (result,), (ours,), plain, (fn,))


def one_by_one(s: Scope, grow: Grow):
    """`tr.map`."""
    name = _name(s)
    values = _arguments(s, name, 2)
    s.require(all(name in v.names for v in values))
    params = [s.param(without(v.dims, name), v) for v in values]
    fn = body(s, grow, params, mapped=frozenset({name}))
    result = s.value(((name, values[0].sizes[name]), *fn.returns[0].dims))
    args = ", ".join(v.var for v in values)
    plain = f"jax.vmap({fn.name}, in_axes={written(v.axis(name) for v in values)})({args})"
    return step("loop", result, f'tr.map({fn.name}, "{name}")({args})', plain, fn)


WRAPPERS = {
    "checkpoint": [f"tr.checkpoint({{}}, {policy})" for policy in POLICIES] + ["jax.checkpoint({})"],
    "inner jit": ["jax.jit({})", "tr.named_jit({})", 'tr.named_jit({}, inputs="compute")'],
}


def wrapped(s: Scope, grow: Grow):
    """A function called through `checkpoint` or `jit`."""
    values = list({v.var: v for v in (s.pick(), s.pick())}.values())
    params = [s.param(v.dims, v) for v in values]
    kind = s.one(list(WRAPPERS))
    how = s.one(WRAPPERS[kind])
    s.require("inputs" not in how or s.setting.mode in ("explicit", "auto"))
    fn = body(s, grow, params, s.one([1, 1, 2]))
    results = tuple(s.value(v.dims) for v in fn.returns)
    args = ", ".join(v.var for v in values)
    one = results[0] if len(results) == 1 else results
    return step(kind, one, f"{how.format(fn.name)}({args})", f"{fn.name}({args})", fn)


def branches(s: Scope, grow: Grow):
    """`jax.lax.cond` over two functions that give the same type."""
    x, chosen = s.pick(), s.pick()
    functions = []
    for _ in range(2):
        param = s.param(x.dims, x)
        fn = body(s, grow, [param])
        # Without a layout a result lies where what it is made of does, and branches are to give one type.
        s.require(s.setting.mode != "types" or not fn.uses())
        (made,) = fn.returns
        extra = [n for n in made.names if n not in param.names]
        s.require(all(param.sizes.get(n, size) == size for n, size in made.dims if n not in extra))
        summed, result = Value(s.fresh(), without(made.dims, *extra)), Value(s.fresh(), param.dims)
        reduced = step(
            "reduction",
            summed,
            f"{made.var}.sum({written(repr(n) for n in extra)})" if extra else made.var,
            f"jnp.sum({made.var}, axis={written(made.axis(n) for n in extra)})" if extra else made.var,
        )
        # Both branches end where the layout puts these names.
        sums = step(
            "elementwise",
            result,
            f"tr.settle({param.var} * 0.5 + {summed.var})",
            f"{param.var} * 0.5 + {aligned(summed, param.names)}",
        )
        functions.append(Function(fn.name, fn.params, (*fn.statements, reduced, sums), (result,)))
    a, b = functions
    test = f"({chosen.var}.sum()"
    ours = f"jax.lax.cond({test}.array > 0), {a.name}, {b.name}, {x.var})"
    return step("cond", s.value(x.dims), ours, f"jax.lax.cond({test} > 0), {a.name}, {b.name}, {x.var})", a, b)


def derivative(s: Scope, grow: Grow):
    """A derivative inside of a program."""
    x = s.ranked()
    s.require(s.derived)
    s = dataclasses.replace(s, reversed=False)
    param = s.param(x.dims, x)
    fn = body(s, grow, [param])
    along = f"jax.tree.map(jnp.tanh, {x.var})", f"jnp.tanh({x.var})"
    if s.chance(0.6):
        loss = Function(fn.name, fn.params, fn.statements, fn.returns, loss=True)
        if s.chance(0.7):
            call = f"jax.grad({fn.name})({x.var})"
            return step("inner gradient", s.value(x.dims), call, call, loss)
        ours, plain = (f"jax.jvp(jax.grad({fn.name}), ({x.var},), ({t},))[1]" for t in along)
        return step("inner second derivative", s.value(x.dims), ours, plain, loss)
    result = fn.returns[0].dims
    if s.chance(0.5):
        ours, plain = (f"jax.linearize({fn.name}, {x.var})[1]({t})" for t in along)
        return step("inner jvp", s.value(result), ours, plain, fn)
    ours, plain = (f"jax.jvp({fn.name}, ({x.var},), ({t},))" for t in along)
    return step("inner jvp", (s.value(result), s.value(result)), ours, plain, fn)


STEPS = (vmap, vmap, vmap_of_keys, loop, loop, layers, one_by_one, wrapped, wrapped, branches, derivative)
