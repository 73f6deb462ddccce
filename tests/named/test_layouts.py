"""Named arrays under a layout: what is placed where, what is gathered, what is refused."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.mesh.layout import current_layout

SIZES = {"batch": 8, "pos": 4, "embed": 16, "mlp": 32}


def layout(**options) -> tr.Layout:
    return tr.Layout(
        tr.make_mesh(data=4, model=2),
        params={"embed": "data", "mlp": "model"},
        compute={"batch": "data", "mlp": "model", "pos": "model"},
        **options,
    )


def numbers(*names) -> tr.NamedArray:
    return tr.random.normal(jax.random.key(len(names)), {n: SIZES[n] for n in names})


def test_shard_puts_trees_where_each_map_says():
    x = numbers("batch", "pos", "embed")
    with layout():
        tree = tr.shard({"w": numbers("embed", "mlp"), "scalar": jnp.float32(1)})
        assert tr.typeof(tree["w"]) == "f32[embed/data=16 mlp/model=32]"
        assert tr.typeof(tr.shard(x, "compute")) == "f32[batch/data=8 pos/model=4 embed=16]"
        assert tr.typeof(tr.shard(x, {"pos": ("data",)})) == "f32[batch=8 pos/data=4 embed=16]"
        inside = tr.named_jit(lambda x: tr.shard(x, "compute"))(x)
        assert tr.typeof(inside) == "f32[batch/data=8 pos/model=4 embed=16]"


@jax.custom_vjp
def _clipped(w, x):
    """`x w` of `batch`, whose gradients are at most 1."""
    return tr.dot(x, w, over="embed")


def _clipped_backward(kept, g):
    w, x = kept
    into_w, into_x = tr.dot(g, x, over="batch"), tr.outer(tr.multiply, g, w)
    return tr.shard(tr.clip(into_w, -1.0, 1.0)), tr.shard(tr.clip(into_x, -1.0, 1.0), "compute")


_clipped.defvjp(lambda w, x: (_clipped(w, x), (w, x)), _clipped_backward)


@pytest.mark.slow
def test_a_backward_rule_of_ones_own_runs_with_and_without_a_layout():
    w, x = numbers("embed"), numbers("batch", "embed")
    gradients = tr.grad(lambda w, x: _clipped(w, x).sum(), argnums=(0, 1))
    alone = gradients(w, x)
    for a, b in zip(tr.named_jit(gradients)(w, x), alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    with layout():
        into_w, into_x = tr.named_jit(gradients)(tr.shard(w), tr.shard(x, "compute"))
    assert tr.typeof(into_w) == "f32[embed/data=16]" and tr.typeof(into_x) == "f32[batch/data=8 embed=16]"
    np.testing.assert_allclose(into_w, alone[0], rtol=1e-5)
    np.testing.assert_allclose(into_x, alone[1], rtol=1e-5)


@pytest.mark.parametrize("around", [contextlib.nullcontext, layout])
def test_a_layout_of_another_mesh_does_not_begin_within_what_is_compiled(around):
    inner = tr.Layout(tr.make_mesh(data=8), compute={"batch": "data"})

    @jax.jit
    def within(x):
        with inner:
            return x * 2.0

    found = "data=4, model=2" if around is layout else "none"
    x = numbers("batch")
    with around() as outer:
        with pytest.raises(
            tr.MeshError, match=rf"got a layout of \(data=8\) where that is \(?{found}.*around the call"
        ):
            within(x)
        assert current_layout() == outer
    assert current_layout() is None and tr.typeof(x * 2.0) == "f32[batch=8]"


def test_without_a_layout_shard_leaves_a_tree_as_it_is():
    x = numbers("batch", "pos")
    tree = {"x": x, "number": jnp.float32(1), "text": "as it is"}
    assert tr.shard(tree)["x"] is x and tr.shard(tree, "compute") == tree
    with pytest.raises(tr.NamesError, match=r"a map to mesh axes needs a layout, got \{'pos': 'data'\} and none in"):
        tr.shard(tree, {"pos": "data"})
    with pytest.raises(tr.NamesError, match="a tree must be placed by one of the layout's maps .* got 'activations'"):
        tr.shard(tree, "activations")


def test_shard_refuses_what_does_not_divide():
    with layout(), pytest.raises(tr.NotationError, match="got embed=6 over data=4, in 'embed/data': make embed 4 or 8"):
        tr.shard(tr.zeros({"embed": 6}))


def test_abstract_trees_need_no_arrays():
    with layout():
        w = tr.abstract(jax.eval_shape(lambda: {"w": tr.zeros({"embed": 16, "mlp": 32})}))["w"]
    assert isinstance(w.array, jax.ShapeDtypeStruct)
    assert tr.typeof(w) == "f32[embed/data=16 mlp/model=32]"


def test_named_jit_takes_maps_for_inputs_and_outputs():
    x, w = numbers("batch", "embed"), numbers("embed", "mlp")
    with layout():
        out = tr.named_jit(lambda x, w: tr.dot(x, w, over="embed"), inputs="params", outputs={"mlp": "data"})(x, w)
        assert tr.typeof(out) == "f32[batch=8 mlp/data=32]"
    np.testing.assert_allclose(out.array, x.array @ w.array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", [layout, contextlib.nullcontext])
def test_what_is_donated_is_given_once(where):
    """Or JAX ends the process where there are several devices."""
    doubled = tr.named_jit(lambda state, *rest: jax.tree.map(lambda x: x * 2, state), donate=0)
    with where():
        w, key, number = tr.shard((numbers("embed"), jax.random.key(0), jnp.asarray(2.0)))
        for state in ({"model": w, "ema": w}, {"model": w.array, "ema": w}):
            with pytest.raises(tr.NamesError, match=r"got f32\[.*as argument 0\['ema'\] and as argument 0\['model'\]"):
                doubled(state)
        with pytest.raises(tr.NamesError, match=r"got f32\[\] as argument 0 and as argument 1, in named_jit\(donate"):
            doubled(*(tr.shard(number) for _ in range(2)))
        with pytest.raises(
            tr.NamesError, match=r"got key\[\] as argument 0\[1\] and as argument 1\['key'\], in named_jit"
        ):
            doubled((w, tr.shard(key)), {"key": tr.shard(key)})
        by_name = tr.named_jit(lambda state, other: (state * 2, other + 1), donate=-2)
        with pytest.raises(tr.NamesError, match="as argument (other|state) and as argument (other|state), in"):
            by_name(state=w, other=w)
        copied = doubled({"model": w, "ema": jax.tree.map(jnp.copy, w)}, key, key)
    np.testing.assert_array_equal(copied["ema"], 2 * np.asarray(numbers("embed")))


def test_positions_of_arguments_are_given_as_donate_and_static():
    times = tr.named_jit(lambda x, n: x * n, static=1)
    for where in (layout(), contextlib.nullcontext()):
        with where:
            np.testing.assert_array_equal(times(tr.ones({"embed": 16}), 2.0), np.full(16, 2))
    with pytest.raises(tr.NamesError, match="got donate_argnums=0, in named_jit: write donate=0"):
        tr.named_jit(lambda x: x, donate_argnums=0)
    with pytest.raises(tr.NamesError, match="got static='x', in named_jit: write static=0 for the first argument"):
        tr.named_jit(lambda x: x, static="x")
    with pytest.raises(tr.NamesError, match=r"got static_argnums=\(1,\), in named_jit: write static=\(1,\)"):
        tr.named_jit(static_argnums=(1,))


def test_named_jit_donates_and_compiles_once_a_layout():
    traces = []

    def double(x):
        traces.append(1)
        return x * 2.0

    step = tr.named_jit(double, donate=0)
    for _ in range(2):
        x = numbers("batch", "embed")
        step(x)
        assert x.array.is_deleted()
    with layout():
        step(tr.shard(numbers("batch", "embed"), "compute"))
    assert len(traces) == 2


@pytest.mark.slow
def test_results_take_the_sharding_of_their_names():
    with layout():
        x, w = tr.shard(numbers("batch", "pos", "embed"), "compute"), tr.shard(numbers("embed", "mlp"))
        up = tr.dot(x, w, over="embed")
        assert tr.typeof(up) == "f32[batch/data=8 pos=4 mlp/model=32]"
        down = tr.dot(up, tr.shard(numbers("mlp", "embed")), over="mlp")
        assert tr.typeof(down) == "f32[batch/data=8 pos/model=4 embed=16]"
        assert tr.typeof(up.sum("mlp")) == "f32[batch/data=8 pos/model=4]"
        assert tr.typeof(tr.zeros({"batch": 8, "mlp": 32})) == "f32[batch/data=8 mlp/model=32]"


@pytest.mark.slow
def test_partial_sums_may_wait_and_be_settled_once():
    def both(x, w, settle):
        one = tr.einsum("batch mlp, mlp embed -> batch embed", x, w, settle=settle)
        two = tr.einsum("batch mlp, mlp embed -> batch embed", x * 2.0, w, settle=settle)
        return tr.settle(one - two * 0.5 + one)

    x, w = numbers("batch", "mlp"), numbers("mlp", "embed")
    with layout():
        there, weight = tr.shard(x, "compute"), tr.shard(w, "compute")
        partial = jax.eval_shape(lambda x, w: tr.dot(x, w, over="mlp", settle=False), there, weight)
        assert tr.typeof(partial) == "f32[batch/data=8 embed=16 +model]"
        for settle, count in ((True, 2), (False, 1)):
            rows = tr.ledger(lambda x, w, s=settle: both(x, w, s), there, weight).rows
            assert sum(r.times for r in rows if r.kind == "all-reduce") == count
            out = tr.named_jit(lambda x, w, s=settle: both(x, w, s))(there, weight)
            np.testing.assert_allclose(out.array, x.array @ w.array, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda p: tr.exp(p), "exp"),
        (lambda p: p * p, "multiply, by something other than a number,"),
        (lambda p: p + 1.0, "add, with something that is not the same partial sum,"),
        (lambda p: p.max("embed"), "max"),
        (lambda p: tr.softmax(p, "embed"), "softmax"),
        (lambda p: tr.dot(p, p, over="embed"), "dot"),
        (lambda p: p["embed", 0], "indexing"),
    ],
)
def test_nonlinear_operations_on_partial_sums_name_the_forgotten_reshard(use, what):
    with layout():
        x, w = tr.shard(numbers("batch", "mlp"), "compute"), tr.shard(numbers("mlp", "embed"), "compute")
        message = (
            rf"only linear operations take partial sums, got {what} of "
            r"f32\[batch/data=8 embed=16 \+model\]: write "
            r'reshard\("batch/data embed \+model -> batch/data embed", ...\) first, or settle\(...\)'
        )
        with pytest.raises(tr.PendingSumError, match=message):
            jax.eval_shape(lambda x, w: use(tr.dot(x, w, over="mlp", settle=False)), x, w)


def test_operations_jax_refuses_on_slices_gather_that_one_axis():
    x = numbers("batch", "mlp")
    with layout():
        there = tr.shard(x, "compute")
        for use in (lambda x: x.sort("mlp"), lambda x: x.cumsum("mlp"), lambda x: tr.top_k(x, "mlp", 2)[0]):
            (row,) = tr.ledger(use, there).rows
            assert (row.kind, row.what) == ("all-gather", "batch/data mlp/model -> batch/data mlp")
        np.testing.assert_array_equal(tr.named_jit(lambda x: x.sort("mlp"))(there).array, jnp.sort(x.array, axis=1))
    with layout(strict=True):
        there = tr.shard(x, "compute")
        with pytest.raises(tr.NamesError, match=r"sort needs the whole of 'mlp', got .* under a strict layout"):
            jax.eval_shape(lambda x: x.sort("mlp"), there)


def test_the_largest_none_of_slices():
    x = numbers("batch", "mlp", "embed")
    with layout():
        there = tr.shard(x, "compute")
        for name in ("mlp", "embed"):
            values, places = tr.named_jit(lambda x, n=name: tr.top_k(x, n, 0, new_name="k"))(there)
            assert values.shape == places.shape == {n: s for n, s in x.shape.items() if n != name} | {"k": 0}
            gradient = tr.named_jit(tr.grad(lambda x, n=name: (x + tr.top_k(x, n, 0)[0].sum()).sum()))(there)
            np.testing.assert_array_equal(gradient, np.ones_like(x.array))


@pytest.mark.parametrize("along", ["pos", "embed"])
def test_a_gradient_of_no_values_that_are_sorted(along):
    values = np.ones((8, 4, 4), np.float32)
    with layout():
        x = tr.shard(tr.named(values, "batch pos embed"), "compute")
        gradient = tr.named_jit(tr.grad(lambda x: tr.sort(x["pos", 0:0], along).sum()))(x)
    np.testing.assert_array_equal(np.asarray(gradient), 0 * values)


def test_gathering_one_axis_after_the_other():
    both = {"params": {"embed": ("data", "model")}, "compute": {"batch": ("data", "model")}}
    mesh = tr.make_mesh(data=4, model=2)
    x, w = numbers("batch", "embed"), numbers("embed", "mlp")
    kinds = {}
    for gather in ("joint", "per_axis"):
        with tr.Layout(mesh, **both, gather=gather):
            there, weight = tr.shard(x, "compute"), tr.shard(w)
            value = lambda w, x: (tr.dot(x, w, over="embed") ** 2.0).sum().array
            rows = tr.ledger(jax.grad(value), weight, there).rows
            kinds[gather] = [(r.kind, r.axes) for r in rows if r.payload > 4]
            gradient = tr.named_jit(jax.grad(value))(weight, there)
            expected = 2 * x.array.T @ (x.array @ w.array)
            np.testing.assert_allclose(gradient.array, expected, rtol=1e-4, atol=1e-3)
    assert kinds["joint"] == [("all-gather", ("data", "model")), ("reduce-scatter", ("data", "model"))]
    assert [k for k, _ in kinds["per_axis"]] == ["all-gather"] * 2 + ["reduce-scatter"] * 2


def test_slices_of_two_dimensions_are_gathered_one_after_the_other():
    """Together as many mesh axes as slice one of them; so what comes back is scattered, and not summed whole."""
    slices = {"params": {"experts": ("replica", "data"), "embed": "model"}}
    x, w = numbers("batch", "embed"), tr.ones({"experts": 4, "embed": SIZES["embed"]})
    value = lambda w, x: (tr.dot(x, w, over="embed") ** 2.0).sum().array
    mesh = tr.make_mesh(replica=2, data=2, model=2)
    with tr.Layout(mesh, **slices, compute={"batch": ("replica", "data", "model")}):
        there, weight = tr.shard(x, "compute"), tr.shard(w)
        rows = [row for row in tr.ledger(jax.grad(value), weight, there) if row.payload > 4]
        gradient = tr.named_jit(jax.grad(value))(weight, there)
    both = ("replica", "data")
    assert [(row.kind, row.axes) for row in rows] == [
        ("all-gather", ("model",)),
        ("all-gather", both),
        ("reduce-scatter", both),
        ("reduce-scatter", ("model",)),
    ]
    expected = 2 * np.asarray(x.array @ w.array.T).T @ x.array
    np.testing.assert_allclose(gradient.array, expected, rtol=1e-4, atol=1e-3)


def test_the_last_dimension_is_gathered_first():
    """What is gathered after it then lies along the first dimension, where nothing has to be copied."""
    slices = {"params": {"experts": "data", "embed": "model"}, "compute": {"batch": ("data", "model")}}
    x, w = numbers("batch", "embed"), tr.ones({"experts": 4, "embed": SIZES["embed"]})
    with tr.Layout(tr.make_mesh(data=4, model=2), **slices, gather="per_axis"):
        rows = tr.ledger(lambda w, x: tr.dot(x, w, over="embed").sum().array, tr.shard(w), tr.shard(x, "compute")).rows
    assert [r.axes for r in rows if r.kind == "all-gather"] == [("model",), ("data",)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("longer", "plain"),
    [
        (lambda x: tr.pad(x, {"pos": (1, 0)}), lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))),
        (lambda x: tr.concatenate([x["pos", :1], x], "pos"), lambda x: jnp.concatenate([x[:, :1], x], 1)),
    ],
)
def test_a_length_that_mesh_axes_do_not_divide_is_whole_for_a_while(longer, plain):
    """A token shift: one place more, and cut again."""
    x = numbers("batch", "pos", "embed")
    with layout():
        shifted = lambda x: longer(x)["pos", :4] * x
        placed = tr.shard(x, "compute")
        assert tr.typeof(longer(placed)) == "f32[batch/data=8 pos=5 embed=16]"
        found = tr.named_jit(shifted)(placed)
        assert tr.typeof(found) == "f32[batch/data=8 pos/model=4 embed=16]"
        gradient = tr.named_jit(tr.grad(lambda x: tr.square(shifted(x)).sum()))(placed)
    by_hand = lambda x: plain(x)[:, :4] * x
    np.testing.assert_allclose(found.array, by_hand(x.array), rtol=1e-6)
    np.testing.assert_allclose(
        gradient.array, jax.grad(lambda x: jnp.square(by_hand(x)).sum())(x.array), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"context": "exchange"},
            r"context must name .*, got context='exchange', in Layout: write context=\{'context'",
        ),
        ({"dealt": True}, r"dealt must name .*, got dealt=True, in Layout: write dealt='context'"),
        ({"context": ("ring",)}, r"context must be a map, got 'ring' in it, in Layout: write context=\{'context'"),
        ({"params": ("embed",)}, r"params must be a map, got 'embed' in it, in Layout: write params=\{'batch'"),
        ({"overlap": 3}, r"overlap must name .*, got overlap=3, in Layout: write overlap=\('mlp', 'heads'\)"),
    ],
)
def test_what_a_layout_has_besides_its_maps_is_of_its_kind(given, message):
    with pytest.raises(tr.MeshError, match=message):
        tr.Layout(tr.make_mesh(context=8), compute={"pos": "context"}, **given)


def test_on_another_mesh_everything_else_stays():
    """As a proof does that moves a program onto its target: rings would be proven there of what exchanges tokens."""
    here, there = (tr.make_mesh(data=2, context=2, devices=jax.devices()[n : n + 4]) for n in (0, 4))
    how = dict(context={"context": "exchange"}, dealt="context", cut=("batch",), gather="per_axis", overlap=("pos",))
    made = lambda mesh: tr.Layout(mesh, params={"embed": "data"}, compute={"batch": "data", "pos": "context"}, **how)
    assert made(here).on(there) == made(there)
