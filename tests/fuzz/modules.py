"""Steps by layers: those of `trellis.nn`, a user's own, functions with a gradient of their own, and `shard_map`."""

import math

from .products import letters
from .program import Statement, Value, aligned, squares, without, written
from .scope import Scope, step


def linear(s: Scope):
    """A product with a weight, with or without a bias."""
    x, w = s.ranked(), s.ranked(2)
    over = [n for n in w.names if n in x.names]
    s.require(bool(over) and len(over) < len(w.names) and all(x.sizes[n] == w.sizes[n] for n in over))
    dims = (*without(x.dims, *over), *without(w.dims, *over))
    result = s.value(dims)
    biases = [v for v in s.values if v.dtype == "f32" and v.dims and set(v.dims) <= set(without(w.dims, *over))]
    bias = s.one(biases) if biases and s.chance(0.6) else None
    plain = f'jnp.einsum("{letters([x, w], list(result.names))}", {x.var}, {w.var})'
    if bias:
        plain += f" + {aligned(bias, result.names)}"
    names = written(f'"{n}"' for n in over)
    return step("layer", result, f"nn.Linear({w.var}, {bias.var if bias else None}, {names})({x.var})", plain)


def norm(s: Scope):
    """Root-mean-square norm and layer norm."""
    scale = s.pick(lambda v: len(v.dims) == 1)
    x = s.pick(lambda v: scale.dims[0] in v.dims)
    i = x.axis(scale.names[0])
    wide = aligned(scale, x.names)
    if s.chance(0.5):
        plain = f"{x.var} * jax.lax.rsqrt(jnp.mean({x.var} * {x.var}, axis={i}, keepdims=True) + 1.0) * {wide}"
        return step("layer", s.value(x.dims), f"nn.RMSNorm({scale.var}, 1.0)({x.var})", plain)
    bias = s.pick(lambda v: v.dims == scale.dims)
    centred = f"({x.var} - jnp.mean({x.var}, axis={i}, keepdims=True))"
    plain = f"{centred} * jax.lax.rsqrt(jnp.var({x.var}, axis={i}, keepdims=True) + 1.0) * {wide}"
    ours = f"nn.LayerNorm({scale.var}, {bias.var}, 1.0)({x.var})"
    return step("layer", s.value(x.dims), ours, f"{plain} + {aligned(bias, x.names)}")


def embedding(s: Scope):
    """Rows of a table whose first name is looked up."""
    table = s.ranked(2)
    rows = table.dims[0]
    ids = s.pick(lambda v: 0 < v.below <= rows[1] and not set(v.names) & set(table.names[1:]), dtype="i32")
    result = s.value((*ids.dims, *table.dims[1:]))
    return step("layer", result, f"nn.Embedding({table.var})({ids.var})", f"jnp.take({table.var}, {ids.var}, axis=0)")


def cross_entropy(s: Scope):
    logits = s.ranked()
    (name,) = s.some(logits.names, 1, 1)
    rest = without(logits.dims, name)
    targets = s.pick(lambda v: 0 < v.below <= logits.sizes[name] and set(v.dims) == set(rest), dtype="i32")
    i, order = logits.axis(name), [n for n, _ in rest]
    chosen = f"jnp.expand_dims({aligned(targets, order)}, {i})"
    plain = f"jax.nn.logsumexp({logits.var}, axis={i}) - "
    plain += f"jnp.squeeze(jnp.take_along_axis({logits.var}, {chosen}, axis={i}), {i})"
    return step("layer", s.value(rest), f'nn.cross_entropy({logits.var}, {targets.var}, over="{name}")', plain)


OWN = (
    "{name}({w})({x})",
    "jax.jit(lambda m, x: m(x))({name}({w}), {x})",
    "jax.checkpoint(lambda m, x: m(x))({name}({w}), {x})",
    "eqx.filter_jit(lambda m, x: m(x))({name}({w}), {x})",
)


def own(s: Scope):
    """A user's module, called, compiled, or differentiated by."""
    w = s.ranked()
    x = s.pick(lambda v: set(w.dims) <= set(v.dims) and v.var != w.var)
    name, result = s.fresh("Own"), s.value(x.dims)
    head = (
        f"class {name}(eqx.Module):",
        "    w: tr.NamedArray",
        "    def __call__(self, x):",
        "        return tr.tanh(x * self.w) + self.w",
    )
    wide = aligned(w, x.names)
    if s.depth == 0 and s.derived and s.chance(0.3):
        result = s.value(w.dims)
        loss = squares((Value("made", x.dims),), True)
        ours = f"{result.var} = jax.grad(lambda m: (lambda made: {loss})(m({x.var})))({name}({w.var})).w"
        made = f"jnp.tanh({x.var} * {wide}) + {wide}".replace(w.var, "w")
        of = f"lambda w: (lambda made: (made * made).sum())({made})"
        return Statement("layer", (result,), (*head, ours), (f"{result.var} = jax.grad({of})({w.var})",))
    call = s.one(OWN).format(name=name, w=w.var, x=x.var)
    plain = f"{result.var} = jnp.tanh({x.var} * {wide}) + {wide}"
    return Statement("layer", (result,), (*head, f"{result.var} = {call}"), (plain,))


def custom(s: Scope):
    """A function with a derivative of its own: not its own one, so that it is seen to be taken.

    JAX wants a rule's gradient in the type of the argument, which is therefore where the layout has it in use.
    """
    x = s.pick()
    s.require(s.setting.mode != "types")
    name, result = s.fresh("c"), s.value(x.dims)
    lines = [f"{name} = jax.custom_jvp(lambda x: {{np}}.sin(x))"]
    lines += [f"{name}.defjvp(lambda xs, ts: ({{np}}.sin(xs[0]), ts[0] * {{np}}.tanh(xs[0])))"]
    # Of a rule for the reverse there is no forward mode.
    if s.reversed and s.chance(0.5):
        lines = [f"{name} = jax.custom_vjp(lambda x: {{np}}.sin(x))"]
        lines += [f"{name}.defvjp(lambda x: ({{np}}.sin(x), x), lambda x, g: (g * {{np}}.tanh(x),))"]
    call = f"{result.var} = {name}"
    ours, plain = ([line.format(np=np) for line in lines] for np in ("tr", "jnp"))
    ours, plain = (*ours, f"{call}(tr.settle({x.var}))"), (*plain, f"{call}({x.var})")
    return Statement("own gradient", (result,), ours, plain)


def constant(s: Scope):
    """Values that are not on the mesh: made by NumPy, or by JAX outside of any layout."""
    known = s.some([d for v in s.values for d in v.dims], 1, 2)
    dims = tuple(dict(known).items())
    s.require(not s.mapped & {n for n, _ in dims} and all(s.fits(*d) for d in dims))
    shape = tuple(size for _, size in dims)
    value = s.value(dims)
    text = f"np.linspace(-1.0, 1.5, {math.prod(shape)}, dtype=np.float32).reshape({shape})"
    text = s.one([text, f"jnp.asarray({text})"])
    return step("off the mesh", value, f'tr.named({text}, "{" ".join(value.names)}")', f"jnp.asarray({text})")


BODIES = (
    ("jnp.tanh({x}) * 0.5", "jnp.tanh({x}) * 0.5"),
    ("jax.jit(lambda a: a * a)({x})", "{x} * {x}"),
    ("jax.checkpoint(lambda a: jnp.sin(a))({x})", "jnp.sin({x})"),
)


def by_hand(s: Scope):
    """A manual function inside of a program: on slices, with a sum over devices, or a product."""
    x = s.ranked()
    s.require(s.setting.mode in ("explicit", "auto") and s.depth == 0)
    axis, size = s.one(s.setting.mesh)
    name = s.one([n for n, z in x.dims if z % size == 0])
    shape = " ".join(f"{n}/{axis}" if n == name else n for n in x.names)
    part = s.fresh("part")
    placed = f'tr.shard({x.var}, {{"{name}": "{axis}"}})'
    if s.chance(0.5):
        ours, plain = s.one(BODIES)
        result = s.value(x.dims)
        body, text, plain = ours.format(x="x.array"), shape, plain.format(x=x.var)
    else:
        rest = without(x.dims, name)
        result = s.value(rest)
        text = " ".join(n for n, _ in rest)
        pending = f"{text} +{axis}".strip()
        body = f'tr.all_reduce("{pending} -> {text}", tr.einsum("{shape} -> {pending}", x.array))'
        plain = f"jnp.sum({x.var}, axis={x.axis(name)})"
    names = " ".join(result.names)
    ours = (
        "@tr.shard_map",
        f'def {part}(x: f32["{shape}"]) -> f32["{text}"]:',
        f'    return tr.named({body}, "{names}")',
        f"{result.var} = {part}({placed})",
    )
    return Statement("shard_map inside", (result,), ours, (f"{result.var} = {plain}",))


STEPS = (linear, linear, norm, embedding, cross_entropy, own, custom, constant, constant, by_hand, by_hand)
