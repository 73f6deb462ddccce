"""Positions dealt out over devices (`Layout.dealt`): arrays that are made with them are in their order, or refused."""

import functools

import jax
import numpy as np
import pytest

import trellis as tr

KEY, POS = jax.random.key(1), tr.Axis("pos", 16)
WEIGHTS = np.arange(16, dtype=np.float32)
LAYOUTS = {
    "ring": dict(compute={"pos": "ring"}, dealt=("ring",)),
    "over both": dict(compute={"pos": "b/ring"}, dealt=("b", "ring")),
    "over one of both": dict(compute={"pos": "ring/b"}, dealt=("ring",)),
    "whole in use": dict(compute={"batch": "b"}, dealt=("ring",)),
}
MADE = {
    "normal": lambda: tr.random.normal(KEY, {"pos": 16}),
    "normal at rest": lambda: tr.random.normal(KEY, {"pos": 16}, at="params"),
    "randint": lambda: tr.random.randint(KEY, {"pos": 16}, 0, 100),
    "permutation": lambda: tr.random.permutation(KEY, POS),
    "split": lambda: tr.vmap(lambda k: tr.random.normal(k, {}), "pos")(tr.random.split(KEY, POS)),
    "from_numpy": lambda: tr.from_numpy(WEIGHTS * 3, "pos"),
    "in_order": lambda: tr.in_order(lambda x: x.cumsum("pos"), tr.from_numpy(WEIGHTS, "pos")),
}
IN_ORDER = {
    "a name is summed": lambda x, w: tr.in_order(lambda x: x.cumsum("pos").sum("batch"), x),
    "another order of names": lambda x, w: tr.in_order(lambda x: x.cumsum("pos").transpose("pos batch"), x),
    "a new name": lambda x, w: tr.in_order(lambda x: tr.outer(tr.add, x.cumsum("pos"), tr.ones({"embed": 3})), x),
    "two arrays": lambda x, w: tr.in_order(lambda both: both[0].cumsum("pos") * both[1], (x, w)),
    "two results": lambda x, w: sum(tr.in_order(lambda x: {"a": x, "b": x.flip("pos")}, x).values()),
    "no positions": lambda x, w: tr.outer(tr.multiply, tr.in_order(lambda x: x["pos", -1], x), w),
}
AROUND = {
    "multiplied": lambda y, w: tr.cumsum(y * w, "pos"),
    "renamed": lambda y, w: tr.outer(tr.multiply, y, w.rename(pos="p")).cumsum("p").sum("p"),
    "of keys": lambda y, w: tr.outer(tr.multiply, y, w.rename(pos="key_pos")).cumsum("key_pos")["key_pos", -1],
    "its result": lambda y, w: (y, w),
    "settled": lambda y, w: y * tr.settle(w),
    "sharded": lambda y, w: y * tr.shard(w, {}),
    "resharded": lambda y, w: y * tr.reshard("pos/ring -> pos", w),
    "in a loop": lambda y, w: tr.scan(lambda c, _: (c * w, None), tr.Axis("step", 2))(y, None)[0],
    "beside a map": lambda y, w: tr.vmap(lambda row: row * w, "batch")(y),
    "in a condition": lambda y, w: tr.cond(y.sum() > 0, lambda y: y * w, lambda y: y, y),
    "compiled": lambda y, w: jax.jit(lambda y: y * w)(y),
    "compiled for it": lambda y, w: jax.jit(tr.multiply)(y, w),
    "checkpointed": lambda y, w: jax.checkpoint(tr.multiply)(y, w),
    "mapped": lambda y, w: tr.vmap(lambda a, b: a + b, "pos")(y, w),
    "differentiated": lambda y, w: y * tr.grad(lambda w: (w * w).sum())(w),
    "through a tree": lambda y, w: y * jax.tree.map(lambda a: a * 2, w),
    "beside itself": lambda y, w: y.cumsum("pos") * w,
}
REFUSED = {
    "stack": lambda: tr.stack([tr.full({}, float(i)) for i in range(16)], "pos"),
    "split_axis": lambda: tr.arange(tr.Axis("t", 32)).split_axis("t", {"pos": 16, "d": 2}),
    "rearrange": lambda: tr.arange(tr.Axis("t", 32)).rearrange("(pos d) -> pos d", pos=16, d=2),
    "top_k": lambda: tr.arange(tr.Axis("t", 16)).top_k("t", 16, new_name="pos")[0],
    "scan": lambda: tr.scan(lambda c, _: (c + 1.0, c), POS)(tr.full({}, 0.0), None)[1],
    "split of keys": lambda: tr.random.split(KEY, "key_pos", 16),
    "normal of keys": lambda: tr.random.normal(KEY, {"key_pos": 16}),
}


def layout(name):
    return tr.Layout(tr.make_mesh(ring=4, b=2), **LAYOUTS[name])


def weighed(make):
    """A number that another order of positions changes."""
    return (tr.named(WEIGHTS, "pos") * make().astype(np.float32)).sum().array


def all_weighed():
    return {name: weighed(make) for name, make in MADE.items()}


@functools.cache
def in_natural_order():
    return all_weighed()


@pytest.mark.slow
@pytest.mark.parametrize("where", LAYOUTS)
def test_what_is_made_of_positions_is_dealt_out(where):
    want = in_natural_order()
    with layout(where):
        for found in (all_weighed(), jax.jit(all_weighed)()):
            for name in MADE:
                np.testing.assert_allclose(found[name], want[name], rtol=1e-5, err_msg=name)


def weighed_in_order():
    """Numbers that another order of positions changes: of each value, and of its gradient."""
    values = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
    x, weights = tr.from_numpy(values, "batch pos"), tr.from_numpy(WEIGHTS, "pos")
    found = {}
    for name, make in IN_ORDER.items():
        value, d_x = tr.value_and_grad(lambda x, make=make: (tr.sin(make(x, weights)) * weights).sum())(x)
        found[name] = value.array, (d_x * tr.from_numpy(values * WEIGHTS, "batch pos")).sum().array
    return found


@pytest.mark.slow
@pytest.mark.parametrize("where", LAYOUTS)
def test_what_goes_by_order_may_take_and_give_any_tree(where):
    want = jax.jit(weighed_in_order)()
    with layout(where):
        found = jax.jit(weighed_in_order)()
    for name in IN_ORDER:
        np.testing.assert_allclose(found[name], want[name], rtol=1e-4, err_msg=name)


def test_what_goes_by_order_has_positions():
    with pytest.raises(
        tr.NamesError, match=r"needs an array with the name 'pos', got f32\[embed=4\], in in_order: call the function"
    ):
        tr.in_order(lambda x: x, tr.zeros({"embed": 4}))


@pytest.mark.parametrize("how", ["eager", "named_jit", "grad"])
@pytest.mark.parametrize("what", AROUND)
def test_positions_from_around_are_refused(what, how):
    """They are dealt out, and what goes by order takes them for ordered; an array on no mesh is ordered."""
    values = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)

    def made(x, w, read=AROUND[what]):
        return tr.in_order(lambda y: read(y, w), x)

    def loss(x, w):
        return sum(leaf.sum().array for leaf in jax.tree.leaves(made(x, w), is_leaf=lambda x: hasattr(x, "names")))

    run = {"eager": made, "named_jit": tr.named_jit(made), "grad": jax.grad(loss)}[how]
    with layout("ring"):
        x, w = tr.from_numpy(values, "batch pos"), tr.from_numpy(WEIGHTS, "pos")
        with pytest.raises(tr.NamesError, match="can only read positions that are its arguments, got f32.*: pass it"):
            run(x, w)


def test_what_it_says_of_positions_from_around():
    with layout("ring"):
        x = tr.from_numpy(WEIGHTS, "pos")
        with pytest.raises(tr.NamesError) as error:
            tr.in_order(lambda y: (y * x).cumsum("pos"), x)
        assert str(error.value) == (
            "the function of in_order can only read positions that are its arguments, got f32[pos/ring=16] from around "
            "it, in multiply: pass it, too, as in in_order(f, (x, y))"
        )
        with pytest.raises(tr.NamesError, match="in np.asarray: pass it, too"):
            tr.in_order(lambda y: y * tr.named(np.asarray(x), "pos"), x)
        times = jax.jit(lambda y: y * x)
        for _ in range(2):  # JAX keeps what it has traced
            with pytest.raises(tr.NamesError, match="in multiply: pass it, too"):
                tr.in_order(lambda y: times(y).cumsum("pos"), x)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_what_goes_by_order_reads_other_arrays_and_those_on_no_mesh(jit):
    x = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
    outside = tr.named(jax.numpy.asarray(WEIGHTS), "pos")

    def made():
        scale, rows = tr.full({"batch": 2}, 2.0), tr.named(x, "batch pos")
        first = tr.in_order(lambda y: (y * scale * outside * tr.arange(POS).astype("float32")).cumsum("pos"), rows)
        keys = tr.in_order(lambda m: m.cumsum("key_pos"), tr.outer(tr.multiply, first, keyed(outside)))
        return first, keys, tr.in_order(keyed, tr.named(WEIGHTS, "pos"))

    keyed = lambda w: w.rename(pos="key_pos")
    want = made()
    with layout("ring"):
        for a, b in zip((tr.named_jit(made) if jit else made)(), want, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4)


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_name_another_order_positions_is_refused(what):
    REFUSED[what]()
    with layout("ring"), pytest.raises(tr.NamesError, match="dealt out"):
        REFUSED[what]()


@pytest.mark.slow
def test_gradients_of_what_is_drawn_for_dealt_positions():
    values = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)

    def gradient():
        x = tr.from_numpy(values, "batch pos")
        found = tr.grad(lambda x: (x * x * tr.random.normal(KEY, {"pos": 16})).sum())(x)
        return (found * tr.from_numpy(values * WEIGHTS, "batch pos")).sum().array

    want = gradient()
    for where in LAYOUTS:
        with layout(where):
            np.testing.assert_allclose(gradient(), want, rtol=1e-5, err_msg=where)
