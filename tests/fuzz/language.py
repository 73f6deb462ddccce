"""Steps that language models are made of: attention, a table for both of its ends with its loss, a loss per example."""

import math

from .products import letters
from .program import Dims, Statement, Value, aligned, without
from .scope import Scope, step

HEAD = 4  # the size of an attention head


def _dims(s: Scope, *names: str) -> Dims:
    """Names that programs start with, at their usual sizes, none of which is mapped over."""
    s.require(not s.mapped & set(names))
    return tuple((name, s.sizes[name]) for name in names)


def _spread(value: Value, dims: Dims) -> tuple[str, str]:
    """A value broadcast to dimensions that contain its own, in both languages."""
    axes = "{" + ", ".join(f'"{name}": {size}' for name, size in dims) + "}"
    shape = tuple(size for _, size in dims)
    plain = f"jnp.broadcast_to({aligned(value, [name for name, _ in dims])}, {shape})"
    return f"{value.var}.broadcast_to({axes})", plain


def attention(s: Scope):
    """Causal attention of grouped queries, with rotary positions or without, of random keys and values."""
    dims = (*_dims(s, "batch", "pos", "heads"), ("head_dim", HEAD))
    sizes = dict(dims)
    # Positions in slices are cut into two pieces a device.
    pieces = 2 * s.setting.parts("pos", "compute")
    s.require(s.setting.mode != "types" and (pieces == 2 or sizes["pos"] % pieces == 0))
    x = s.pick(lambda v: set(v.dims) <= set(dims))
    result = s.value(dims)
    groups = s.one([d for d in range(1, sizes["heads"] + 1) if sizes["heads"] % d == 0])
    shape = (sizes["batch"], sizes["pos"], sizes["heads"] // groups, HEAD)
    axes = dict(zip(("batch", "key_pos", "kv_heads", "head_dim"), shape, strict=True))
    q, k, v = (s.fresh("t") for _ in "qkv")
    ours, plain = _spread(x, dims)
    ours, plain = [f"{q} = {ours}"], [f"{q} = {plain}"]
    for name in (k, v):
        key = f"jax.random.key({s.between(0, 99)})"
        ours.append(f"{name} = tr.random.normal({key}, {axes})")
        plain.append(f"{name} = jax.random.normal({key}, {shape})")
    if s.chance(0.4):
        a = s.fresh("t")
        ours += [
            f'{a} = nn.rotary_tables(tr.arange(tr.Axis("pos", {sizes["pos"]})), tr.Axis("head_dim", {HEAD}), 100.0)',
            f"{q} = nn.rotate({q}, {a})",
        ]
        half = HEAD // 2
        plain += [
            f"{a} = jnp.outer(jnp.arange({sizes['pos']}.0), 100.0 ** (-jnp.arange({half}.0) / {half}))[None, :, None]",
            f"{q} = jnp.concatenate([{q}[..., :{half}] * jnp.cos({a}) - {q}[..., {half}:] * jnp.sin({a}), "
            f"{q}[..., {half}:] * jnp.cos({a}) + {q}[..., :{half}] * jnp.sin({a})], axis=-1)",
        ]
    causal = s.chance(0.7)
    seen = f"jnp.tril(jnp.ones(({sizes['pos']}, {sizes['pos']}), bool))" if causal else "True"
    scores = f'jnp.einsum("bqhd,bkhd->bhqk", {q}, jnp.repeat({k}, {groups}, 2)) * {HEAD**-0.5}'
    weights = f"jax.nn.softmax(jnp.where({seen}, {scores}, -1e30), axis=-1)"
    ours.append(f"{result.var} = nn.attend({q}, {k}, {v}{'' if causal else ', causal=False'})")
    plain.append(f'{result.var} = jnp.einsum("bhqk,bkhd->bqhd", {weights}, jnp.repeat({v}, {groups}, 2))')
    return Statement("attention", (result,), tuple(ours), tuple(plain))


def next_token(s: Scope):
    """A table whose rows are looked up, changed, and multiplied with it again, in the loss."""
    tokens, vocab, embed = _dims(s, "batch", "pos"), *_dims(s, "vocab", "embed")
    s.require(s.setting.mode != "types" and math.prod(z for _, z in tokens) * embed[1] * vocab[1] <= 20000)
    w = s.pick(lambda v: set(v.dims) <= {vocab, embed})
    x = s.pick(lambda v: set(v.dims) <= {*tokens, embed})
    ids, targets, table, hidden = (s.fresh("t") for _ in range(4))
    key, shape = f"jax.random.key({s.between(0, 99)})", (vocab[1], embed[1])
    wide = f"tr.random.normal({key}, {dict((vocab, embed))}) * tr.tanh({w.var})"
    plain_wide = f"jax.random.normal({key}, {shape}) * jnp.tanh({aligned(w, ['vocab', 'embed'])})"
    ours, plain = [], []
    for name in (ids, targets):
        key = f"jax.random.key({s.between(0, 99)})"
        ours.append(f"{name} = tr.random.randint({key}, {dict(tokens)}, minval=0, maxval={vocab[1]})")
        plain.append(f"{name} = jax.random.randint({key}, {tuple(z for _, z in tokens)}, 0, {vocab[1]})")
    result = s.value(())
    tied = f"nn.tied({wide}, {ids})" if s.chance(0.6) else wide
    ours += [
        f"{table} = {tied}",
        f"{hidden} = nn.Embedding({table})({ids}) + tr.tanh({x.var})",
        f'{result.var} = tr.named(nn.next_token_loss({hidden}, {table}, {targets}).total, "")',
    ]
    logits = f"jnp.einsum('bpe,ve->bpv', {hidden}, {table})"
    plain += [
        f"{table} = {plain_wide}",
        f"{hidden} = {table}[{ids}] + jnp.tanh({aligned(x, ['batch', 'pos', 'embed'])})",
        f"{result.var} = -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax({logits}), {targets}[..., None], axis=-1))",
    ]
    return Statement("language model", (result,), tuple(ours), tuple(plain))


def per_example(s: Scope):
    """A loss for each example, of a function that is written for one: its weight is passed, or closed over."""
    x = s.ranked(2)
    name = s.one([n for n in x.names if n not in s.mapped])
    row = without(x.dims, name)
    w = s.pick(lambda v: name not in v.names and set(v.names) & {n for n, _ in row} and v.var != x.var)
    s.require(all(x.sizes.get(n, z) == z for n, z in w.dims))
    over = [n for n, _ in row if n in w.names]
    result, one = s.value(((name, x.sizes[name]),)), Value("row", row)
    numbers = letters([one, w], [n for n, _ in (*without(row, *over), *without(w.dims, *over))])
    text, i = s.names_text(over, row), x.axis(name)
    closed = s.chance(0.4)
    params, args, axes = ("row", x.var, f"({i},)") if closed else (f"row, {w.var}", f"{x.var}, {w.var}", f"({i}, None)")
    ours = f'tr.vmap(lambda {params}: tr.square(tr.tanh(tr.dot(row, {w.var}, over={text}))).sum(), "{name}")({args})'
    product = f'jnp.einsum("{numbers}", row, {w.var})'
    plain = f"jax.vmap(lambda {params}: jnp.sum(jnp.square(jnp.tanh({product}))), in_axes={axes})({args})"
    return step("loss per example", result, ours, plain)


STEPS = (attention, next_token, next_token, per_example, per_example)
