"""What each operation's docstring says of names, gradients and movement, held against the ledger of calls of it."""

import collections
import inspect
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import nn

KINDS = re.compile(r"all-gather|all-reduce|reduce-scatter|all-to-all|permute")
SECTIONS = re.compile(r"^Names: (.+)\nGradient: (.+)\nMoves: (.+?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
# What takes a function or a text in place of arrays, and moves what that moves.
TRANSFORMATIONS = """
    abstract checkpoint cond fold grad in_order lift lift_along lift_reduction map named named_jit scan shard
    value_and_grad vmap while_loop
""".split()
# Of `trellis.nn`, what takes plain arrays, or gives none.
PLAIN = "decode_attention dot_product_attention frequencies linear_cross_entropy parameters".split()

MESH = tr.make_mesh(x=8)
# `rest` lies in slices of `b` and is gathered; under `FREE` a mesh axis that a sum frees slices `b`.
LAYOUT = tr.Layout(MESH, params={"b": "x"}, compute={"a": "x"})
FREE = tr.Layout(MESH, params={"b": "x"}, compute={"a": "x", "b": "x"})
# Made by NumPy: JAX would compile what makes each of them, in every process that collects tests.
ones = lambda sizes: tr.named(np.ones([*sizes.values()], np.float32), [*sizes])
zeros = lambda sizes: tr.named(np.zeros([*sizes.values()], np.int32), [*sizes])
with LAYOUT:
    X = tr.shard(tr.named(np.random.default_rng(0).standard_normal((8, 8), np.float32), "a b"), "compute")  # a/x b
    Y = tr.shard(ones({"a": 8, "c": 8}), "compute")  # a/x c
    REST, WEIGHT = tr.shard((ones({"b": 8}), ones({"b": 8, "c": 8})))  # b/x and b/x c
    WHOLE = tr.shard(ones({"b": 8}), "compute")
    PENDING = tr.dot(X, Y, over="a", settle=False)  # b c +x
    IDS = tr.shard(zeros({"a": 8}), "compute")
KEY = jax.random.key(0)

DATA = tr.Layout(MESH, params={"embed": "x"}, compute={"batch": "x"})
TENSOR = tr.Layout(MESH, params={"vocab": "x"}, compute={"heads": "x", "kv_heads": "x", "vocab": "x"})
CONTEXT = tr.Layout(MESH, compute={"pos": "x"})
CHANNELS = tr.Layout(MESH, params={"embed": "x"}, compute={"embed": "x"})
with DATA:
    H = tr.shard(ones({"batch": 8, "pos": 16, "embed": 8}), "compute")
    Q, LAST = (tr.shard(ones({"batch": 8, "pos": n, "heads": 8, "head_dim": 8}), "compute") for n in (16, 1))
    K = Q.rename(pos="key_pos", heads="kv_heads")
    TABLE, TARGETS = (
        tr.shard(ones({"vocab": 16, "embed": 8})),
        tr.shard(zeros({"batch": 8, "pos": 16})),
    )
    LOGITS = tr.shard(ones({"batch": 8, "pos": 16, "vocab": 16}), "compute")
    ROPE = nn.rotary_tables(tr.arange(Q.axis("pos")), Q.axis("head_dim"), 1e4)
with TENSOR:
    H_T, Q_T, LAST_T, K_T, TABLE_T, LOGITS_T = tr.shard(jax.device_get((H, Q, LAST, K, TABLE, LOGITS)), "compute")
with CHANNELS:
    H_E = tr.shard(jax.device_get(H), "compute")
with CONTEXT:
    Q_C, K_C = tr.shard(jax.device_get((Q, K)), "compute")
    SLICED_K = Q_C.rename(pos="key_pos", heads="kv_heads")


def operations() -> dict[str, Callable]:
    """Every public function of named arrays, also those of `trellis.random` and `trellis.nn`."""
    rooms = ("trellis.named", "trellis.mesh.reshard")
    mine = {name: f for name, f in vars(tr).items() if getattr(f, "__module__", "").startswith(rooms)}
    mine |= {f"random.{name}": getattr(tr.random, name) for name in tr.random.__all__}
    mine |= {f"nn.{name}": getattr(nn, name) for name in nn.__all__ if name not in PLAIN}
    return {name: f for name, f in mine.items() if inspect.isfunction(f) and name not in TRANSFORMATIONS}


OPERATIONS = operations()


def claims(name: str) -> tuple[str, str, str]:
    found = SECTIONS.search(inspect.getdoc(OPERATIONS[name]))
    assert found, f"{name} does not say Names, Gradient and Moves"
    return found.groups()


def kinds(name: str, section: int) -> set[str]:
    """The collectives that a claim names, also by what it refers to."""
    text = claims(name)[section]
    return {*KINDS.findall(text), *(k for other in re.findall(r"as `(\w+)`", text) for k in kinds(other, section))}


GATHERED_OR_WHOLE = [(LAYOUT, lambda fn, x, y: fn(x, y), X, y) for y in (REST, WHOLE)]
PRODUCTS = [
    (LAYOUT, lambda fn, x, w: fn(x, w, over="b"), X, WEIGHT),
    (LAYOUT, lambda fn, x, w: fn(x, w, over="b"), X, WHOLE),
    (LAYOUT, lambda fn, x, y: fn(x, y, over="a"), X, Y),
    (FREE, lambda fn, x, y: fn(x, y, over="a"), X, Y),
]
AXIS, ONE = tr.Axis("a", 8), jnp.float32(1.0)
# Calls that meet what the claims say: a layout, what is called, and its arrays. For what is absent see `calls`.
CALLS = {
    "all_gather": [
        (LAYOUT, lambda fn, x: fn("a/x b -> a b", x), X),
        (LAYOUT, lambda fn, w: tr.dot(X, fn("b/x c -> b c ~x", w), over="b"), WEIGHT),
    ],
    "all_reduce": [(LAYOUT, lambda fn, x: fn("b c +x -> b c", x), PENDING)],
    "all_to_all": [(LAYOUT, lambda fn, x: fn("a/x b -> a b/x", x), X)],
    "arange": [(LAYOUT, lambda fn, step: fn(AXIS, start=step, step=step, dtype=jnp.float32), ONE)],
    "astype": [(LAYOUT, lambda fn, x: fn(x, jnp.bfloat16), X)],
    "at": [(LAYOUT, lambda fn, x: fn(x)["a", 3].set(1.0), X), (LAYOUT, lambda fn, x: fn(x)["b", 3].set(1.0), X)],
    "broadcast_to": [(LAYOUT, lambda fn, x: fn(x, {"a": 8, "b": 8}), x) for x in (REST, WHOLE)],
    "clip": [(LAYOUT, lambda fn, x, y: fn(x, y), X, y) for y in (REST, WHOLE)],
    "concatenate": [(LAYOUT, lambda fn, x: fn([x, x], "a"), X), (LAYOUT, lambda fn, x: fn([x, x], "b"), X)],
    "copysign": [(LAYOUT, lambda fn, x, y: fn(x, y), y, X) for y in (REST, WHOLE)],
    "dot": PRODUCTS,
    "dot_each": [(layout, lambda fn, x, w, f=f: f(lambda a, b, **how: fn(a, (b, b), **how), x, w), *xs)
                 for layout, f, *xs in PRODUCTS],
    "einsum": [
        (LAYOUT, lambda fn, x, w: fn("a b, b c -> a c", x, w), X, WEIGHT),
        (LAYOUT, lambda fn, x, w: fn("a b, b -> a", x, w), X, WHOLE),
        (LAYOUT, lambda fn, x, y: fn("a b, a c -> b c", x, y), X, Y),
        (FREE, lambda fn, x, y: fn("a b, a c -> b c", x, y), X, Y),
    ],
    "from_numpy": [(LAYOUT, lambda fn: fn(np.ones((8, 8)), "a b"))],
    "full": [(LAYOUT, lambda fn, value: fn({"a": 8}, value), ONE)],
    "gathered": [(DATA, lambda fn, t: tr.take(fn(t), "vocab", TARGETS), TABLE)],
    "index": [
        (LAYOUT, lambda fn, x: fn(x, ("a", 3)), X),
        (LAYOUT, lambda fn, x: fn(x, ("a", slice(0, 8, 2))), X),
        (LAYOUT, lambda fn, x: fn(x, ("b", IDS)), WEIGHT),
        (LAYOUT, lambda fn, x: fn(x, ("a", IDS.rename(a="k"))), X),
        (FREE, lambda fn, x: fn(x, ("a", IDS.rename(a="k"))), X),
    ],
    "linspace": [(LAYOUT, lambda fn, stop: fn(AXIS, stop=stop), ONE)],
    "merge_axes": [
        (LAYOUT, lambda fn, x: fn(x, ("a", "b"), "ab"), X),
        (LAYOUT, lambda fn, x: fn(x.transpose("b a"), ("b", "a"), "ba"), X),
    ],
    "nn.attend": [
        (layout, lambda fn, q, k, v: fn(q, k, v), q, k, k)
        for layout, q, k in ((DATA, Q, K), (TENSOR, Q_T, K_T), (CONTEXT, Q_C, K_C), (CONTEXT, Q_C, SLICED_K))
    ],
    "nn.attend_cached": [
        (layout, lambda fn, q, k, v: fn(q, k, v, jnp.int32(3)), q, k, k)
        for layout, q, k in ((DATA, LAST, K), (TENSOR, LAST_T, K_T))
    ],
    "nn.constant": [(LAYOUT, lambda fn: fn({"b": 8}, 1.0))],
    "nn.cross_entropy": [
        (layout, lambda fn, x: fn(x, TARGETS), x) for layout, x in ((DATA, LOGITS), (TENSOR, LOGITS_T))
    ],
    "nn.geglu": [(LAYOUT, lambda fn, x, y: fn(x, y), X, X)],
    "nn.in_one_type": [(LAYOUT, lambda fn, x, y: fn(x, y.astype("bfloat16")), X, X)],
    "nn.in_type_of": [(LAYOUT, lambda fn, x, y: fn(x, y.astype("bfloat16")), X, X)],
    "nn.next_token_loss": [
        (layout, lambda fn, h, t: fn(h, t, TARGETS).total, h, t)
        for layout, h, t in ((DATA, H, TABLE), (TENSOR, H_T, TABLE_T), (CHANNELS, H_E, TABLE))
    ],
    "nn.normal": [(LAYOUT, lambda fn: fn(KEY, {"b": 8}, deviation=1.0))],
    "nn.rotary_tables": [(DATA, lambda fn: fn(tr.arange(Q.axis("pos")), Q.axis("head_dim"), 1e4))],
    "nn.rotate": [(DATA, lambda fn, x: fn(x, ROPE), Q)],
    "nn.swiglu": [(LAYOUT, lambda fn, x, y: fn(x, y), X, X)],
    "nn.tied": [(DATA, lambda fn, t: tr.take(fn(t, TARGETS), "vocab", TARGETS), TABLE)],
    "nn.weight": [(LAYOUT, lambda fn: fn(KEY, {"b": 8, "c": 8}, over="b"))],
    "one_hot": [(LAYOUT, lambda fn, i: fn(i, tr.Axis("c", 8)), IDS)],
    "outer": [(LAYOUT, lambda fn, x, y: fn(tr.multiply, x, y), X.sum("b"), y) for y in (REST, WHOLE)],
    "pad": [(LAYOUT, lambda fn, x: fn(x, {"a": (8, 0)}), X)],
    "random.categorical": [(LAYOUT, lambda fn, x: fn(KEY, x, "a"), X)],
    "random.dropout": [(LAYOUT, lambda fn, x: fn(KEY, x, 0.5), X)],
    "random.fold_in": [(LAYOUT, lambda fn: fn(KEY, 3))],
    "random.randint": [(LAYOUT, lambda fn: fn(KEY, {"a": 8}, 0, 3))],
    "random.shuffle": [(LAYOUT, lambda fn, x: fn(KEY, x, "a"), X)],
    "random.split": [(LAYOUT, lambda fn: fn(KEY, "a", 8))],
    "random.truncated_normal": [(LAYOUT, lambda fn, upper: fn(KEY, {"a": 8}, -1.0, upper), ONE)],
    "random.uniform": [(LAYOUT, lambda fn, stop: fn(KEY, {"a": 8}, maxval=stop), ONE)],
    "rearrange": [
        (LAYOUT, lambda fn, x: fn(x, "(u v) b -> u v b", u=2), X),
        (LAYOUT, lambda fn, x: fn(x, "a b -> (b a)"), X),
    ],
    "reduce_scatter": [(LAYOUT, lambda fn, x: fn("b c +x -> b/x c", x), PENDING)],
    "rename": [(LAYOUT, lambda fn, x: fn(x, b="z"), X)],
    "reshard": [
        (LAYOUT, lambda fn, x: fn("a/x b -> a b", x), X),
        (LAYOUT, lambda fn, w: tr.dot(X, fn("b/x c -> b c ~x", w), over="b"), WEIGHT),
        (LAYOUT, lambda fn, x: fn("b c +x -> b c", x), PENDING),
        (LAYOUT, lambda fn, x: fn("b c +x -> b/x c", x), PENDING),
        (LAYOUT, lambda fn, x: fn("a/x b -> a b/x", x), X),
        (LAYOUT, lambda fn, x: fn("b -> b/x", x), WHOLE),
        (LAYOUT, lambda fn, w: tr.dot(X, fn("b -> b ~x", w), over="b"), WHOLE),
    ],
    "roll": [(LAYOUT, lambda fn, x: fn(x, 1, "a"), X)],
    "save": [(LAYOUT, lambda fn, x: fn(x, "mark"), X)],
    "settle": [(LAYOUT, lambda fn, x: fn(x), PENDING), (FREE, lambda fn, x: fn(x), PENDING)],
    "split": [(LAYOUT, lambda fn, x: fn(x, "a", 2), X)],
    "split_axis": [(LAYOUT, lambda fn, x: fn(x, "a", {"u": 2, "v": 4}), X)],
    "stack": [(LAYOUT, lambda fn, x, y: fn([x, y], "s"), X, y) for y in (REST, WHOLE)],
    "take": [
        (LAYOUT, lambda fn, x: fn(x, "b", IDS), WEIGHT),
        (LAYOUT, lambda fn, x: fn(x, "a", IDS.rename(a="k")), X),
        (FREE, lambda fn, x: fn(x, "a", IDS.rename(a="k")), X),
    ],
    "take_along": [(LAYOUT, lambda fn, x: fn(x, "a", tr.from_numpy(np.ones((8, 8), np.int32), "a b")), X)],
    "top_k": [(LAYOUT, lambda fn, x: fn(x, "a", 2), X)],
    "transpose": [(LAYOUT, lambda fn, x: fn(x, "b a"), X)],
    "tril": [(LAYOUT, lambda fn, x: fn(x, "a", "b"), X)],
    "triu": [(LAYOUT, lambda fn, x: fn(x, "a", "b"), X)],
    "unbind": [(LAYOUT, lambda fn, x: fn(x, "a"), X)],
    "where": [(LAYOUT, lambda fn, x, y: fn(x > 0, x, y), X, y) for y in (REST, WHOLE)],
}  # fmt: skip


def calls(name: str) -> list[tuple]:
    """Those above; else of one array, of two, along `a`, or of a key or nothing and the axis `a`."""
    if name in CALLS:
        return CALLS[name]
    needed = [p for p in inspect.signature(OPERATIONS[name]).parameters.values() if p.default is p.empty]
    names = [p.name for p in inspect.signature(OPERATIONS[name]).parameters.values()]
    cast = lambda x: x.astype(jnp.int32) if "whole numbers" in claims(name)[1] else x
    if names[1:2] in (["over"], ["along"]):
        return [(LAYOUT, lambda fn, x: fn(x, "a"), X)]
    if names[0] == "key":
        return [(LAYOUT, lambda fn: fn(KEY, AXIS))]
    if names[0] in ("axis", "axes"):
        return [(LAYOUT, lambda fn: fn(AXIS))]
    if len(needed) == 2:
        return [(LAYOUT, lambda fn, x, y: fn(x, y), cast(X), cast(y)) for y in (REST, WHOLE)]
    return [(LAYOUT, lambda fn, x: fn(x), cast(X))]


def moved(fn: Callable, *arrays) -> collections.Counter:
    return collections.Counter(row.kind for row in tr.ledger(fn, *arrays).rows)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_says_is_so(name: str):
    names, gradient, _ = claims(name)
    forward, backward = collections.Counter(), collections.Counter()
    results = []

    def operation(*args, **how):
        results.append(OPERATIONS[name](*args, **how))
        return results[-1]

    for layout, call, *arrays in calls(name):
        with layout:
            run = lambda *xs, call=call: call(operation, *xs)
            out = jax.eval_shape(run, *arrays)
            result = out if name == "at" else results[-1]  # `at` gives places, whose updates give arrays
            for part in jax.tree.leaves(result, is_leaf=is_named) if names in NAMES else ():
                assert part.names == NAMES[names](arrays[0].names)
            if gradient.startswith("none"):
                assert not arrays or not differentiable(out) or not differentiable(arrays)
                forward += moved(run, *arrays)
                continue
            assert differentiable(out)

            def both(*xs, run=run):
                result, pull = jax.vjp(run, *xs)
                return result, pull(jax.tree.map(like, result))

            once = moved(run, *arrays)
            forward += once
            backward += moved(both, *arrays) - once
            if gradient.startswith("zero;"):
                assert not any(np.any(leaf) for leaf in jax.tree.leaves(jax.jit(both)(*arrays)[1]))
    assert set(forward) == kinds(name, 2)
    assert set(backward) == kinds(name, 1)


# What claims of names say, of the first array's, which calls reduce along `a`.
NAMES = {
    "those of `x`.": lambda names: names,
    "those of the operand that has all of them.": lambda names: X.names,
    **dict.fromkeys(
        ("those of `x` that are not in `over`.", "those of `x` but `over`.", "those of `x` but the given one."),
        lambda names: tuple(n for n in names if n != "a"),
    ),
}
is_named = lambda x: isinstance(x, tr.NamedArray)


def differentiable(tree) -> bool:
    return any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(tree))


def like(leaf):
    """A gradient that nobody knows to be one number throughout, or as JAX takes it of whole numbers."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    return jax.lax.optimization_barrier(jnp.ones_like(leaf))
