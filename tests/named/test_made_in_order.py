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


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_name_another_order_positions_is_refused(what):
    REFUSED[what]()
    with layout("ring"), pytest.raises(tr.NamesError, match="dealt out"):
        REFUSED[what]()


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
