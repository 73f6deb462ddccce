"""Cases that break a rule: they must be refused by an error of ours, or, where a layout makes them legal, be right."""

import dataclasses

import numpy as np

from . import mutated, whole
from .case import Case, Input
from .layouts import draw_mesh
from .products import dot
from .program import Statement, Value, aligned, without, written
from .scope import Scope, Unfit, step

ABSENT = (
    '{x}.sum("absent")',
    '{x}.mean(("{n}", "absent"))',
    '{x}.argmax("absent")',
    'tr.softmax({x}, "absent")',
    'tr.sort({x}, "absent")',
    'tr.top_k({x}, "absent", 1)',
    '{x}["absent", 0]',
    '{x}["absent", 0:1]',
    '{x}.at["absent", 0].set(0.0)',
    'tr.take({x}, "absent", tr.arange(tr.Axis("ids", 2)))',
    '{x}.rename(absent="other")',
    '{x}.transpose("absent ...")',
    '{x}.transpose("{names} absent")',
    'tr.rearrange({x}, "... absent -> absent ...")',
    'tr.rearrange({x}, "{names} -> {names} absent")',
    'tr.split_axis({x}, "absent", {{"a": 1, "b": -1}})',
    'tr.merge_axes({x}, ("{n}", "absent"), "merged")',
    'tr.pad({x}, {{"absent": (1, 0)}})',
    'tr.roll({x}, 1, "absent")',
    '{x}.unbind("absent")',
    '{x}.split("absent", 1)',
    'tr.concatenate([{x}, {x}], "absent")',
    'tr.tril({x}, "{n}", "absent")',
    'tr.dot({x}, {x}, over="absent")',
    'tr.einsum("{names} absent -> {names}", {x})',
    'tr.einsum("{names} -> {names} absent", {x})',
    'tr.vmap(lambda r: r * 2.0, "absent")({x})',
    'tr.scan(lambda c, r: (c, r), "absent")({x}, {x})',
    'tr.map(lambda r: r * 2.0, "absent")({x})',
    '{x}.broadcast_to({{"absent": 2}})',
    'tr.random.categorical(jax.random.key(0), {x}, "absent")',
)
SIZES = (
    '{x} + tr.ones({{"{n}": {more}}})',
    'tr.where(tr.ones({{"{n}": {more}}}) > 0.0, {x}, 0.0)',
    'tr.dot({x}, tr.ones({{"{n}": {more}}}), over="{n}")',
    'tr.einsum("{names}, {n} -> {names}", {x}, tr.ones({{"{n}": {more}}}))',
    'tr.stack([{x}, tr.ones({{"{n}": {more}}})], "stacked")',
    '{x}.sum(tr.Axis("{n}", {more}))',
    'tr.softmax({x}, tr.Axis("{n}", {more}))',
    'tr.take({x}, tr.Axis("{n}", {more}), tr.arange(tr.Axis("ids", 1)))',
    '{x}.unbind(tr.Axis("{n}", {more}))',
    '{x}[tr.Axis("{n}", {more}), 0]',
    'tr.roll({x}, 1, tr.Axis("{n}", {more}))',
    'tr.dot({x}, {x}, over=tr.Axis("{n}", {more}))',
    'tr.vmap(lambda r: r * 2.0, tr.Axis("{n}", {more}))({x})',
    'tr.vmap(lambda r, t: r * t, "{n}")({x}, tr.ones({{"{n}": {more}}}))',
    'tr.scan(lambda c, r: (c + r.sum(), None), tr.Axis("{n}", {more}))(tr.zeros({{}}), {x})',
    '{x}.broadcast_to({{**{x}.shape, "{n}": {more}}})',
    '{x}.at["{n}", 0:{size}].set(tr.ones({{"{n}": {more}}}))',
    'tr.split_axis({x}, "{n}", {{"a": {more}, "b": 2}})',
    '{x}.split("{n}", [{more}, 1])',
    '{x}.top_k("{n}", {more})',
    '{x}["{n}", {more}]',
    '{x}["{n}", -{more}]',
    '{x}.at["{n}", {more}].set(0.0)',
    '{x}["{n}", np.ones({more}, bool)]',
    'tr.Stacked({x}, tr.Axis("{n}", {more})).fold(tr.zeros({{}}), call=lambda layer, c: c + layer.sum())',
    'tr.named({x}.array, [*{x}.axes[:-1], tr.Axis("absent", {last})])',
)
REPEATED = (
    '{x}.rename({m}="{n}")',
    '{x}.transpose("{m} {names}")',
    'tr.named({x}.array, "{n} " * {rank})',
    'tr.stack([{x}, {x}], "{n}")',
    'tr.zeros([tr.Axis("{n}", 2), tr.Axis("{n}", 2)])',
    'tr.random.normal(jax.random.key(0), [tr.Axis("{n}", 2), tr.Axis("{n}", 3)])',
    'tr.split_axis({x}, "{m}", {{"{n}": 1, "b": -1}})',
    'tr.split_axis({x}, "{m}", {{"a": 1, "{n}": -1}})',
    'tr.merge_axes({x}, ("{m}", "{m}"), "merged")',
    'tr.rearrange({x}, "... {m}=(a b) -> ... (a a) b", a=1)',
    'tr.take({x}, "{m}", tr.arange(tr.Axis("{n}", 1)))',
    '{x}["{m}", tr.arange(tr.Axis("{n}", {more}))]',
    'tr.one_hot({x}.argmax("{m}"), tr.Axis("{n}", {size}))',
    '{x}.top_k("{m}", 1, new_name="{n}")',
    'tr.einsum("{names} -> {n} {n}", {x})',
    'tr.einsum("{names}, {names} -> {n} {n}", {x}, {x})',
    '{x}.sum(("{n}", "{n}"))',
    'tr.dot({x}, {x}, over=("{n}", "{n}"))',
    'tr.vmap(lambda r: tr.ones({{"{n}": 2}}), "{n}")({x})',
    'tr.map(lambda r: tr.ones({{"{n}": 2}}), "{n}")({x})',
    'tr.vmap(lambda r: r.rename({m}="{n}"), "{n}")({x})',
    '{x}.broadcast_to([*{x}.axes, tr.Axis("{n}", {size})])',
    'tr.vmap(lambda r: {x} * 2.0, "{n}")({x})',
)
PLAIN = (
    "{x} * jnp.ones({shape})",
    "jnp.ones({shape}) + {x}",
    "tr.maximum({x}, np.ones({shape}, np.float32))",
    'tr.dot({x}, jnp.ones({shape}), over="{n}")',
    "{x}[0]",
    '{x} + tr.Narrow({x}, "fp8")',
    'tr.tanh(tr.Narrow({x}, "int8"))',
    'tr.where({x} > 0.0, tr.Narrow({x}, "fp8"), {x})',
    'tr.sum(tr.Narrow({x}, "fp8"), "{n}")',
    '{x}.at["{n}", 0].set(tr.Narrow({x}, "fp8"))',
    'tr.softmax(tr.Narrow({x}, "fp8"), "{n}")',
    'tr.einsum("{names} -> {names}", tr.Narrow({x}, "fp8"))',
    'tr.dot({x}, {x}, tr.Narrow({x}, "fp8"), over="{n}")',
    'tr.dot(tr.Narrow({x}, "int8"), tr.Narrow({x}, "fp8"), over="{n}")',
    'tr.dot({x}, tr.Narrow({x}, "fp4"), over="{n}")',
    'tr.dot({x}, tr.Narrow(({x} > 0).astype(jnp.int32), "fp8"), over="{n}")',
    'jax.grad(lambda a: jax.grad(lambda a: (tr.dot(a, tr.Narrow(a, "fp8"), over="{n}") ** 2).sum().array)(a)'
    ".sum().array)({x})",
    "{x}.sum(0)",
    '{x}["{n}", 0.5]',
    "list({x})",
    'tr.take({x}, "{n}", tr.ones({{"ids": 2}}))',
    'tr.zeros("{n} other")',
    'tr.named({x}.array, "{names} absent")',
    'jax.vmap(lambda r: r.sum("{m}"))({x})',
    "jax.lax.scan(lambda c, r: (c, r * 2.0), 0, {x})[1]",
    'tr.concatenate([{x}, {x}.array], "{n}")',
    'tr.stack([{x}.array, {x}.array], "stacked")',
    'tr.scan(lambda c, r: (c + r.sum().rename(a="b"), None), "{n}")(tr.zeros({{}}), {x})',
    'tr.scan(lambda c, r: (tr.zeros({{"new": 2}}), None), "{n}")(tr.zeros({{"old": 2}}), {x})',
    'tr.scan(lambda c, r: (tr.zeros({{"new": 2}}), None), "{n}", unroll={size})(tr.zeros({{"old": 2}}), {x})',
    'tr.fold(lambda c, r: (c + 1.0).astype(jnp.bfloat16), "{n}")(tr.zeros({{"old": 2}}), {x})',
    'tr.fold(lambda c, r: (c + 1.0).astype(jnp.bfloat16), "{n}", unroll={size})(tr.zeros({{"old": 2}}), {x})',
    'tr.Stacked({x}, tr.Axis("{n}", {size})).fold(tr.zeros({{"old": 2}}), call=lambda r, c: c.rename(old="new"))',
    'tr.Stacked({x}, tr.Axis("{n}", {size}), unrolled=True).fold('
    'tr.zeros({{"old": 2}}), call=lambda r, c: c.rename(old="new"))',
)
# On partial sums; right where a layout leaves none.
NONLINEAR = (
    ("tr.tanh({p})", "jnp.tanh({p})"),
    ("{p} * {p}", "{p} * {p}"),
    ("{p} ** 2", "{p} ** 2"),
    ("{p} + 1.0", "{p} + 1.0"),
    ("tr.relu({p})", "jax.nn.relu({p})"),
    ("abs({p})", "abs({p})"),
    ("tr.where({p} > 0.0, 1.0, 0.0)", "jnp.where({p} > 0.0, 1.0, 0.0)"),
    ("{p}.astype(jnp.int32).astype(jnp.float32)", "{p}.astype(jnp.int32).astype(jnp.float32)"),
    ("{p}.max()", "jnp.max({p})"),
    ("{p}.mean()", "jnp.mean({p})"),
    ("tr.logsumexp({p})", "jax.nn.logsumexp({p})"),
    ("1.0 / {p}", "1.0 / {p}"),
    ("{p}.sum() * {p}.sum()", "{p}.sum() * {p}.sum()"),
    ("tr.dot({p}, {p}, over={p}.names)", "({p} * {p}).sum()"),
    ("tr.maximum({p}, 0.5)", "jnp.maximum({p}, 0.5)"),
    ("{p} + tr.settle({p})", "{p} + {p}"),
    ("tr.stack([{p}, tr.settle({p})], \"stacked\")", "jnp.stack([{p}, {p}])"),
    ("tr.lift(jnp.sin)({p})", "jnp.sin({p})"),
    ("tr.clip({p}, -0.5, 0.5)", "jnp.clip({p}, -0.5, 0.5)"),
    ("jax.jit(tr.tanh)({p})", "jnp.tanh({p})"),
    ("jax.checkpoint(lambda p: p + 1.0)({p})", "{p} + 1.0"),
)  # fmt: skip
# The same by jax.numpy on the array inside, which JAX's types keep out.
PLAIN_NONLINEAR = (
    ("tr.named(jnp.tanh({p}.array), {p}.names)", "jnp.tanh({p})"),
    ("tr.named({p}.array * {p}.array, {p}.names)", "{p} * {p}"),
    ("tr.named({p}.array + 1.0, {p}.names)", "{p} + 1.0"),
    ("tr.named(jnp.where({p}.array > 0.0, 1.0, 0.0), {p}.names)", "jnp.where({p} > 0.0, 1.0, 0.0)"),
    ("tr.named({p}.array.sum(), ())", "{p}.sum()"),
    ("tr.named(jnp.max({p}.array), ())", "jnp.max({p})"),
)
NONLINEAR_ALONG = (
    ('tr.pad({p}, {{"{n}": (1, 1)}}, value=5.0)', "jnp.pad({p}, {widths}, constant_values=5.0)"),
    ('tr.pad({p}, {{"{n}": (1, 1)}})', "jnp.pad({p}, {widths})"),
    ("tr.softmax({p}, \"{n}\")", "jax.nn.softmax({p}, axis={i})"),
    ('tr.cumsum({p}, "{n}")', "jnp.cumsum({p}, axis={i})"),
    ('tr.sort({p}, "{n}")', "jnp.sort({p}, axis={i})"),
    ('tr.flip({p}, "{n}")', "jnp.flip({p}, axis={i})"),
    ('{p}["{n}", 0]', "jnp.take({p}, 0, axis={i})"),
    ('{p}["{n}", 0:1]', "jnp.take({p}, np.array([0]), axis={i})"),
    ('{p}.at["{n}", 0].set(2.0)', "jnp.moveaxis(jnp.moveaxis({p}, {i}, 0).at[0].set(2.0), 0, {i})"),
    ('{p}.at["{n}", 0].add(2.0)', "jnp.moveaxis(jnp.moveaxis({p}, {i}, 0).at[0].add(2.0), 0, {i})"),
    ('tr.roll({p}, 1, "{n}")', "jnp.roll({p}, 1, axis={i})"),
    ('tr.concatenate([{p}, {p}], "{n}")', "jnp.concatenate([{p}, {p}], axis={i})"),
    ('tr.take({p}, "{n}", tr.arange(tr.Axis("ids", 1)))', "jnp.take({p}, jnp.arange(1), axis={i})"),
    ('{p}.rename({n}="other")', "{p}"),
    ('tr.split_axis({p}, "{n}", {{"major": 1, "minor": -1}})', "jnp.expand_dims({p}, {i})"),
    ('tr.vmap(lambda r: r * 2.0, "{n}")({p})', "jnp.moveaxis({p} * 2.0, {i}, 0)"),
    ('tr.vmap(lambda r: tr.tanh(r), "{n}")({p})', "jnp.moveaxis(jnp.tanh({p}), {i}, 0)"),
    ('tr.map(lambda r: tr.tanh(r), "{n}")({p})', "jnp.moveaxis(jnp.tanh({p}), {i}, 0)"),
    ('{p}.unbind("{n}")[0]', "jnp.take({p}, 0, axis={i})"),
)  # fmt: skip


NONLINEAR_RULE = "nonlinear on partial sums"


def _parts(s: Scope, x: Value) -> dict[str, object]:
    n, m = x.names[0], x.names[-1]
    return {
        "x": x.var, "n": n, "m": m, "names": " ".join(x.names), "size": x.sizes[n], "last": x.shape[-1] + 1,
        "more": max(x.shape) + s.between(1, 3), "rank": len(x.dims), "shape": x.shape,
    }  # fmt: skip


def _refused(table, least: int, rule: str):
    def make(s: Scope):
        x = s.ranked(least)
        ours = s.one(table).format(**_parts(s, x))
        return Statement(rule, (Value(s.fresh(), ()),), (f"@ = {ours}",), ("@ = 0",)), True

    return make


def outer(s: Scope):
    """Operands of which neither has the other's names."""
    x, y = s.ranked(), s.ranked()
    s.require(bool(set(x.names) - set(y.names)) and bool(set(y.names) - set(x.names)))
    shared = set(x.names) & set(y.names)
    s.require(all(x.sizes[n] == y.sizes[n] for n in shared))
    text = s.one(["{x} + {y}", "{x} * {y}", "tr.maximum({x}, {y})", "tr.where({x} > 0.0, {y}, 0.0)", "{x} > {y}"])
    line = f"@ = {text.format(x=x.var, y=y.var)}"
    return Statement("outer product by mistake", (Value(s.fresh(), ()),), (line,), ("@ = 0",)), True


def lacking(s: Scope):
    """A product over a name that one operand lacks."""
    x, y = s.ranked(), s.ranked()
    name = s.one([n for n in x.names if n not in y.names])
    line = f'@ = tr.dot({x.var}, {y.var}, over="{name}")'
    return Statement("sum over a name that one lacks", (Value(s.fresh(), ()),), (line,), ("@ = 0",)), True


def nonlinear(s: Scope):
    """Something else than a sum, done to partial sums."""
    product = dot(s)
    (p,) = product.results
    product = dataclasses.replace(product, ours=(product.ours[0].removesuffix(")") + ", settle=False)",))
    rule = NONLINEAR_RULE
    if s.chance(0.15):
        rule = "jax.numpy on partial sums"
        ours, plain = (t.format(p=p.var) for t in s.one(PLAIN_NONLINEAR))
    elif p.dims and s.chance(0.5):
        n, i = p.names[0], 0
        widths = [(1, 1), *((0, 0) for _ in p.dims[1:])]
        ours, plain = (t.format(p=p.var, n=n, i=i, widths=widths) for t in s.one(NONLINEAR_ALONG))
    else:
        ours, plain = (t.format(p=p.var) for t in s.one(NONLINEAR))
    result = Value(s.fresh(), (("any", 1),))
    lines = (*product.ours, f"@ = tr.settle({ours})")
    return Statement(rule, (result,), lines, (*product.plain, f"@ = {plain}")), False


def positions(s: Scope):
    """Arrays of positions outside of their dimension: rows of zeros, on every layout."""
    x = s.ranked()
    name = s.one(x.names)
    size, i = x.sizes[name], x.axis(name)
    new = s.new_name(*without(x.dims, name))
    count = 4
    s.require(new not in dict(without(x.dims, name)) and s.fits(new, count))
    low = s.one([0, -size])
    ids = [s.between(low, size + 2) for _ in range(count)]
    dims = (*x.dims[:i], (new, count), *x.dims[i + 1 :])
    ours = f'@ = tr.take({x.var}, "{name}", tr.named(jnp.array({ids}), "{new}"))'
    plain = f'@ = jnp.take({x.var}, jnp.array({ids}), axis={i}, mode="fill", fill_value=0)'
    return Statement("positions outside", (Value(s.fresh(), dims),), (ours,), (plain,)), False


def other_mesh(s: Scope):
    """An array of another mesh."""
    x = s.ranked()
    y = s.pick(lambda v: set(v.dims) <= set(x.dims) and v.var != x.var)
    text = s.one(["{x} + {y}", "{y} * {x}", "tr.maximum({x}, {y})"])
    first = y if text.startswith("{y}") and len(y.dims) == len(x.dims) else x  # whose order the result has
    ours = text.format(x=x.var, y=y.var)
    plain = text.replace("tr.", "jnp.").format(x=aligned(x, first.names), y=aligned(y, first.names))
    return step("another mesh", Value(s.fresh(), first.dims), ours, plain), False


def masked(s: Scope):
    """A selection by a mask of values in a compiled program, whose size nobody knows."""
    x = s.ranked()
    name = s.one(x.names)
    s.require(s.traced)
    mask = f"({x.var}.sum({written(repr(n) for n in x.names if n != name)}) > 0.0)"
    line = f'@ = jax.jit(lambda x, m: x["{name}", m])({x.var}, {mask})'
    return Statement("mask of values in jit", (Value(s.fresh(), ()),), (line,), ("@ = 0",)), True


BREAKERS = (
    (_refused(ABSENT, 1, "absent name"), 5), (_refused(SIZES, 1, "another size"), 5),
    (_refused(REPEATED, 2, "repeated name"), 5), (_refused(PLAIN, 2, "not by name"), 4),
    (outer, 3), (lacking, 1), (nonlinear, 6), (positions, 2), (other_mesh, 2), (masked, 1),
)  # fmt: skip


def draw(seed: int, many: bool = False) -> Case:
    """A case with one broken statement at its end, with a mistake in a text, or run too late."""
    rng = np.random.default_rng([seed, 1])
    if rng.random() < 0.2:
        return mutated.draw(seed, many)
    if rng.random() < 0.05:
        case = dataclasses.replace(whole.draw(seed, "explicit", many=many), earlier=None)
        return dataclasses.replace(case, late=True, broken="after its layout")
    for _ in range(100):
        case, scope = whole.draw_with_scope(int(rng.integers(2**31)), many=many, short=True)
        breakers = [b for b, weight in BREAKERS for _ in range(weight)]
        try:
            made, must = breakers[rng.integers(len(breakers))](scope)
        except Unfit:
            continue
        (result,) = made.results
        fill = lambda lines, var=result.var: tuple(line.replace("@", var) for line in lines)
        made = dataclasses.replace(made, ours=fill(made.ours), plain=fill(made.plain))
        # Tangents along arrays of another mesh would be JAX's own operations on them.
        derivative = "reverse" if made.kind == "another mesh" and case.derivative == "reverse" else "none"
        case = dataclasses.replace(
            case, seed=seed, statements=(*case.statements, made), outputs=(result,), broken=made.kind, must=must,
            derivative=derivative,
        ).pruned()  # fmt: skip
        if made.kind == "another mesh" and case.inputs:
            case = _moved(rng, case, many)
        return case if case.floats() else dataclasses.replace(case, derivative="none")
    raise Unfit


def _moved(rng, case: Case, many: bool) -> Case:
    """Some inputs on a mesh of their own."""
    mesh = draw_mesh(rng, many)
    names = ", ".join(f"{axis}={size}" for axis, size in mesh)
    count = int(np.prod([size for _, size in mesh]))
    inputs = list(case.inputs)
    index = int(rng.integers(len(inputs)))
    v = inputs[index].value
    put = f"jax.device_put({v.var}, jax.NamedSharding(tr.make_mesh(jax.devices()[:{count}], {names}), jax.P()))"
    inputs[index] = Input(v, f'tr.named({put}, "{" ".join(v.names)}")', outside=True)
    return dataclasses.replace(case, inputs=tuple(inputs))
