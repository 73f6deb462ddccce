"""What random programs found in `vmap`, each in its smallest form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import f32, nn
from trellis.mesh import MeshError


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_mapped_function_may_give_what_is_on_no_mesh():
    x, constant = drawn(8, 3), np.linspace(-1.0, 1.0, 3, dtype=np.float32)
    with tr.Layout(tr.make_mesh(data=4, context=2), compute={"layers": "data"}):
        mapped = tr.vmap(lambda row: (tr.named(constant, "mlp"), row * 2.0), "layers")
        same, twice = tr.named_jit(mapped)(tr.shard(tr.named(x, "layers mlp"), "compute"))
    np.testing.assert_array_equal(same.array, np.broadcast_to(constant, (8, 3)))
    np.testing.assert_array_equal(twice.array, x * 2.0)


def test_the_gradient_of_a_product_of_all_elements_that_is_mapped_over_slices_is_refused_by_an_error_of_ours():
    x = drawn(6, 6)
    loss = lambda x: tr.vmap(lambda r: tr.prod(r.split_axis("pos", {"a": 3, "b": 2})), "heads")(x).sum().array
    with tr.Layout(tr.make_mesh(jax.devices()[:6], data=3, model=2), compute={"heads": ("data", "model")}):
        placed = tr.shard(tr.named(x, "pos heads"), "compute")
        np.testing.assert_allclose(loss(placed), x.prod(0).sum(), rtol=1e-5)
        with pytest.raises(MeshError, match="use named operations"):
            jax.grad(loss)(placed)


def test_a_lookup_in_a_mapped_mask():
    """Along a sliced name, mapped over another one that is whole: JAX cannot map what begins a pending sum."""
    x, mask = drawn(4, 3), np.array([False, True, True, False])
    with tr.Layout(tr.make_mesh(data=4, context=2), compute={"vocab": "context"}):
        placed = tr.shard(tr.named(x, "vocab mlp"), "compute")
        kept = tr.vmap(lambda column: column["vocab", mask], "mlp")(placed)
    np.testing.assert_array_equal(kept.array, x[mask].T)


def test_mapping_arrays_of_a_mesh_after_their_layout_has_ended():
    with tr.Layout(tr.make_mesh(model=8), params={"mlp": "model"}):
        x = tr.shard(tr.named(drawn(4, 8), "embed mlp"))
    keys = tr.random.split(jax.random.key(0), "mlp", 8)
    with pytest.raises(MeshError, match="sliced the same way, got .*: call it while their layout is in force"):
        tr.vmap(lambda key, row: row, "mlp")(keys, x)


@pytest.mark.slow
def test_an_outer_product_that_is_mapped_over_a_whole_name_and_its_gradient():
    x, y = drawn(2, 4, 4), drawn(4, 6, seed=1)
    one = lambda y, x: tr.einsum("mlp layers, vocab -> vocab mlp layers", x, y)
    loss = lambda x, y: (tr.vmap(one, "pos")(y, x) ** 2).sum().array
    expected = jax.jit(jax.grad(lambda x, y: (jnp.einsum("mpl,pv->pvml", x, y) ** 2).sum(), argnums=(0, 1)))(x, y)
    with tr.Layout(tr.make_mesh(jax.devices()[:2], context=2), compute={"layers": "context"}):
        args = tr.shard((tr.named(x, "mlp pos layers"), tr.named(y, "pos vocab")), "compute")
        gradients = jax.grad(loss, argnums=(0, 1))(*args)
    for gradient, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient.array, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["data", "data/model"])
@pytest.mark.parametrize("params", [{"embed": "data"}, {"rank": "data"}, {"embed": "data", "mlp": "data"}])
def test_the_gradient_of_a_product_of_parameters_that_a_mapped_function_closes_over(params, batch):
    """Of one that rests in slices of a mapped mesh axis with one that is whole, and of two in slices."""
    x, a, b = drawn(4, 6), drawn(6, 2, seed=1), drawn(2, 4, seed=2)

    def loss(x, a, b):
        rows = tr.vmap(lambda row: tr.dot(row, tr.dot(a, b, over="rank"), over="embed"), "batch")(x)
        return (rows * rows).sum().array

    expected = jax.jit(jax.grad(lambda x, a, b: ((x @ (a @ b)) ** 2).sum(), argnums=(0, 1, 2)))(x, a, b)
    mesh = (
        tr.make_mesh(jax.devices()[:4], data=2, model=2)
        if "model" in batch
        else tr.make_mesh(jax.devices()[:2], data=2)
    )
    with tr.Layout(mesh, params=params, compute={"batch": batch}):
        names = ("batch embed", "embed rank", "rank mlp")
        args = [tr.named(each, text) for each, text in zip((x, a, b), names, strict=True)]
        gradients = jax.grad(loss, argnums=(0, 1, 2))(tr.shard(args[0], "compute"), *map(tr.shard, args[1:]))
    for gradient, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient.array, wanted, rtol=1e-4)


@pytest.mark.slow
def test_a_second_derivative_of_products_of_a_whole_value_in_a_mapped_function():
    x = drawn(4)

    def loss(x):
        y = x.rename(layers="mlp")
        rows = tr.vmap(lambda _: tr.dot_each(y, [y], over="mlp")[0], "layers")(x)
        return (rows * rows).sum().array

    expected = jax.jvp(jax.grad(lambda x: 4 * (x * x).sum() ** 2), (x,), (np.ones_like(x),))[1]
    with tr.Layout(tr.make_mesh(jax.devices()[:2], model=2), compute={"layers": "model"}):
        placed = tr.shard(tr.named(x, "layers"), "compute")
        second = jax.jvp(jax.grad(loss), (placed,), (jax.tree.map(jnp.ones_like, placed),))[1]
    np.testing.assert_allclose(second.array, expected, rtol=1e-5)


def test_a_mapped_function_may_give_what_is_sliced_over_the_mesh_axis_that_it_is_mapped_over():
    x, y = drawn(4, 3), drawn(6, seed=1)
    with tr.Layout(tr.make_mesh(jax.devices()[:2], model=2), params={"heads": "model"}, compute={"layers": "model"}):
        rows, outside = tr.shard(tr.named(x, "layers mlp"), "compute"), tr.shard(tr.named(y, "heads"))
        same = tr.vmap(lambda row: outside, "layers")(rows)
        np.testing.assert_array_equal(same.array, np.broadcast_to(y, (4, 6)))
        with pytest.raises(tr.NamesError, match="a name must stand for one dimension only, got 'layers layers mlp'"):
            tr.vmap(lambda row: rows, "layers")(rows)


@pytest.mark.slow
def test_without_a_layout_a_mapped_function_may_read_what_is_sliced_over_the_mesh_axis_that_it_is_mapped_over():
    x, y = drawn(4), drawn(6, seed=1)
    mesh = tr.make_mesh(jax.devices()[:2], model=2)
    put = lambda a, name: tr.named(jax.device_put(a, jax.NamedSharding(mesh, jax.P("model"))), name)
    rows, outside = put(x, "layers"), put(y, "heads")
    loss = lambda rows, outside: (tr.vmap(lambda row: row * outside, "layers")(rows) ** 3).sum().array
    expected = jax.jit(jax.grad(lambda x, y: ((x[:, None] * y[None]) ** 3).sum(), (0, 1)))(x, y)
    with jax.set_mesh(mesh):
        gradients = jax.grad(loss, (0, 1))(rows, outside)
    np.testing.assert_allclose(gradients[0].array, expected[0], rtol=1e-4)
    np.testing.assert_allclose(gradients[1].array, expected[1], rtol=1e-4)
    # After the mesh a sum of its own is right, and what it gives back in slices is refused.
    squares = tr.vmap(lambda row: tr.dot(outside, outside, over="heads"), "layers")(rows)
    np.testing.assert_allclose(squares.array, np.full(4, (y * y).sum()), rtol=1e-5)
    with pytest.raises(
        MeshError, match="arrays that are whole along .*, got one sliced over them .* make it an argument"
    ):
        tr.vmap(lambda row: tr.sin(outside), "layers")(rows)


def test_a_cond_in_manual_mode_that_is_mapped_and_reads_a_constant_is_refused_by_an_error_of_ours():
    x, constant = drawn(4, 3), np.linspace(0.0, 1.0, 3, dtype=np.float32)

    @tr.shard_map
    def slices(x: f32["layers/model mlp"]) -> f32["layers/model mlp"]:
        add = lambda row: row + tr.named(jnp.asarray(constant), "mlp")
        return tr.vmap(lambda row: jax.lax.cond(row.sum().array > 0, add, lambda row: row, row), "layers")(x)

    mesh = tr.make_mesh(jax.devices()[:2], model=2)
    with (
        jax.set_mesh(mesh),
        pytest.raises(MeshError, match=r"a cond only if its branches .* use where\(...\) instead of cond"),
    ):
        slices(tr.named(jax.device_put(x, jax.NamedSharding(mesh, jax.P("model"))), "layers mlp"))


def test_mapping_arrays_of_a_mesh_beside_one_of_none_after_their_layout_has_ended():
    with tr.Layout(tr.make_mesh(jax.devices()[:2], data=2), compute={}):
        x = tr.shard(tr.named(drawn(4, 2), "batch vocab"), "compute")
    dot = tr.vmap(lambda row, other: tr.dot(row, other, over="vocab"), "batch")
    with pytest.raises(
        MeshError, match="arrays of one mesh, got some that are on none, .*: call it inside `with layout:`"
    ):
        dot(x, tr.named(jnp.ones((4, 2)), "batch vocab"))


@pytest.mark.slow
@pytest.mark.parametrize("program", [lambda fn, x, w: fn(x, w), lambda fn, x, w: jax.jit(fn)(x, w)], ids=["", "jit"])
@pytest.mark.parametrize("rule", ["elementwise", "product", "lookup"])
def test_a_backward_rule_of_ones_own_in_a_mapped_function(rule, program):
    """JAX runs it after the map has ended, under the layout outside, which slices another name over its mesh axis."""
    x, w = drawn(4, 8), drawn(8, 2, seed=1)
    rules = {
        "elementwise": (lambda x, g, w: g * tr.tanh(x), lambda x, g, w: g * jnp.tanh(x)),
        "product": (lambda x, g, w: tr.dot(tr.dot(g, w, over="pos"), w, over="mlp"), lambda x, g, w: w @ (g @ w)),
        "lookup": (
            lambda x, g, w: g * tr.take(x, "pos", tr.arange(tr.Axis("out", 3))).sum("out"),
            lambda x, g, w: g * x[:3].sum(),
        ),
    }

    def loss(np_, vmap, total, backward):
        def one(x, w):
            fn = jax.custom_vjp(lambda x, w: np_.sin(x))
            fn.defvjp(lambda x, w: (np_.sin(x), (x, w)), lambda kept, g: (backward(kept[0], g, kept[1]), 0.0 * kept[1]))
            return fn(x, w)

        return jax.grad(lambda x, w: total(vmap(one)(x, w) ** 2))

    ours, plain = rules[rule]
    expected = loss(jnp, lambda fn: jax.vmap(fn, (0, None)), jnp.sum, plain)(x, w)
    with tr.Layout(tr.make_mesh(jax.devices()[:2], model=2), compute={"batch": "model", "pos": "model"}):
        args = tr.shard((tr.named(x, "batch pos"), tr.named(w, "pos mlp")), "compute")
        fn = loss(tr, lambda fn: tr.vmap(fn, "batch"), lambda y: y.sum().array, ours)
        np.testing.assert_allclose(program(fn, *args).array, expected, rtol=1e-4, atol=1e-5)


def test_named_operations_in_a_map_of_plain_arrays_keep_off_its_mesh_axis():
    x, w = drawn(4, 8), drawn(8, 2, seed=1)
    expected = jax.jit(jax.grad(lambda w: ((jnp.tanh(x) @ w) ** 2).sum()))(w)

    def loss(w, x):
        row = lambda row: tr.dot(tr.tanh(tr.named(row, "pos")), w, over="pos").array
        return (jax.vmap(row)(x) ** 2).sum()

    layout = dict(params={"pos": "model"}, compute={"batch": "model", "pos": "model"})
    with tr.Layout(tr.make_mesh(jax.devices()[:2], model=2), **layout):
        rows = tr.shard(tr.named(x, "batch pos"), "compute").array
        gradient = jax.grad(loss)(tr.shard(tr.named(w, "pos mlp")), rows)
    np.testing.assert_allclose(gradient.array, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_loss_inside_a_cond_of_a_map_takes_no_copies():
    tokens, table = np.arange(12).reshape(4, 3) % 6, drawn(6, 4)
    rows = drawn(4, seed=1)

    def loss(row, table, tokens):
        ids = tr.named(jnp.asarray(tokens, jnp.int32), "batch pos")
        return nn.next_token_loss(tr.take(table, "vocab", ids) * row, table, ids).total

    def branches(table, tokens):
        other = lambda row: tr.named(loss(row, table, tokens), "")
        return lambda row: jax.lax.cond(row.array > 0, other, lambda row: row, row)

    def selected(table, tokens):
        return lambda row: tr.where(row > 0, tr.named(loss(row, table, tokens), ""), row)

    mapped = lambda fn: jax.jit(lambda rows, table: tr.vmap(fn(table, tokens), "layers")(rows).array)
    expected = mapped(selected)(tr.named(rows, "layers"), tr.named(table, "vocab embed"))
    mesh = tr.make_mesh(jax.devices()[:4], data=2, model=2)
    for fn, compute in (
        (branches, {"batch": "data"}),
        (selected, {"batch": "data"}),
        (branches, {"layers": "model", "batch": "data"}),
    ):
        with tr.Layout(mesh, compute=compute):
            args = tr.shard((tr.named(rows, "layers"), tr.named(table, "vocab embed")), "compute")
            np.testing.assert_allclose(mapped(fn)(*args), expected, rtol=1e-5)


def test_a_product_with_copies_inside_a_cond_of_a_map_is_refused_by_an_error_of_ours():
    def gradient(row, w):
        chosen = lambda w: tr.cond(row.sum() > 0, lambda: tr.dot(row, w, over="e").sum(), lambda: w.sum())
        return tr.grad(chosen)(w)

    rows, w = tr.named(drawn(3, 4), "layers e"), tr.named(drawn(4, 4, seed=1), "e o")
    with tr.Layout(tr.make_mesh(jax.devices()[:2], model=2), params={"e": "model"}, compute={"o": "model"}):
        with pytest.raises(
            MeshError, match=r"JAX cannot map an operation on copies .* or let the layout's compute slice"
        ):
            tr.vmap(lambda row: gradient(row, tr.shard(w)), "layers")(rows)


@pytest.mark.slow
@pytest.mark.parametrize("argument", [True, False])
def test_a_derivative_inside_a_map_by_its_row_and_outside_by_a_parameter(argument):
    """As of a physics loss. Of a parameter that rests in slices of the mesh axis and is closed over JAX has none."""
    x, w = drawn(4, 6), drawn(6, seed=1)

    def loss(w, x):
        def slope(row, w):
            return jax.grad(lambda row: tr.tanh(tr.dot(row, w, over="embed")).array)(row).sum()

        rows = tr.vmap(slope, "batch")(x, w) if argument else tr.vmap(lambda row: slope(row, w), "batch")(x)
        return (rows * rows).sum().array

    slopes = lambda w: jax.vmap(jax.grad(lambda row: jnp.tanh(row @ w)))(x).sum(1)
    expected = jax.jit(jax.grad(lambda w: (slopes(w) ** 2).sum()))(w)
    with tr.Layout(tr.make_mesh(jax.devices()[:2], data=2), params={"embed": "data"}, compute={"batch": "data"}):
        args = tr.shard(tr.named(w, "embed")), tr.shard(tr.named(x, "batch embed"), "compute")
        if not argument:
            with pytest.raises(
                MeshError, match="got one sliced over them .*, in vmap: make it an argument of the function"
            ):
                jax.grad(loss)(*args)
        else:
            np.testing.assert_allclose(jax.grad(loss)(*args).array, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("per_row", [False, True])
def test_the_gradient_of_rows_in_random_order_in_a_map_over_slices(per_row):
    x, weights, key = drawn(2, 8), drawn(2, seed=1), jax.random.key(35)
    keys = jax.random.split(key, 8) if per_row else jnp.stack([key] * 8)
    mixed = lambda x: jax.vmap(jax.random.permutation, in_axes=(0, 1))(keys, x)
    expected = jax.jit(jax.grad(lambda x: ((mixed(x) * weights[None]) ** 2).sum()))(x)

    def loss(x, keys, weights):
        shuffled = lambda row, key: tr.random.shuffle(key if per_row else jax.random.key(35), row, "pos")
        return ((tr.vmap(shuffled, "embed")(x, keys) * weights) ** 2).sum().array

    with tr.Layout(tr.make_mesh(data=2, model=2, context=2), compute={"embed": "data"}):
        args = tr.shard((tr.named(x, "pos embed"), tr.named(keys, "embed"), tr.named(weights, "pos")), "compute")
        np.testing.assert_allclose(jax.grad(loss)(*args).array, expected, rtol=1e-5)


LAYOUTS = [
    ({"data": 4, "model": 2}, {}, {"b": "data", "e": "model"}),
    ({"data": 4, "model": 2}, {"e": "model"}, {"b": "data"}),
    ({"data": 4, "model": 2}, {"e": "data"}, {"e": "model"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=["both", "rests", "elsewhere"])
@pytest.mark.parametrize("where", ["forward", "backward rule"])
def test_branches_by_a_mapped_predicate(where, layout):
    """JAX computes both and selects, which its types refuse of values in slices: in a map, or after it has ended."""
    x, w = drawn(8, 4), drawn(4, seed=1)

    def chosen(x, g, w):
        return jax.lax.cond((x.sum() > 0).array, lambda w: g * w, lambda w: g * w * 2.0, w)

    def backward(kept, g):
        return chosen(kept[0], g, kept[1]), 0.0 * kept[1]

    rule = jax.custom_vjp(lambda x, w: (x * w).sum())
    rule.defvjp(lambda x, w: ((x * w).sum(), (x, w)), backward)
    each = rule if where == "backward rule" else lambda x, w: chosen(x, x.sum(), w).sum()
    loss = lambda x, w: tr.vmap(each, "b")(x, w).sum().array
    args = tr.named(x, "b e"), tr.named(w, "e")
    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(*args)
    mesh, params, compute = layout
    with tr.Layout(tr.make_mesh(**mesh), params=params, compute=compute):
        placed = tr.shard(args[0], "compute"), tr.shard(args[1])
        for fn in (jax.grad(loss, argnums=(0, 1)), jax.jit(jax.grad(loss, argnums=(0, 1)))):
            for got, right in zip(fn(*placed), expected, strict=True):
                np.testing.assert_allclose(got.array, right.array, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_lookup_of_a_sliced_table_inside_a_cond_of_a_map():
    """For the lookup on each device JAX has no rule, and an error without words."""
    ids = np.arange(12).reshape(4, 3) % 4

    def row(x):
        def other(x):
            table = tr.random.normal(jax.random.key(0), {"vocab": 4, "embed": 4}) * tr.tanh(x)
            targets = tr.named(jnp.asarray(ids, jnp.int32), "batch pos")
            return tr.named(nn.next_token_loss(nn.Embedding(table)(targets), table, targets).total, "")

        return jax.lax.cond((x > 0).array, other, lambda x: x, x)

    rows = tr.named(drawn(5), "heads")
    expected = jax.jit(tr.vmap(row, "heads"))(rows)
    with tr.Layout(tr.make_mesh(jax.devices()[:4], context=4), compute={"vocab": "context"}):
        np.testing.assert_allclose(tr.vmap(row, "heads")(tr.shard(rows, "compute")), expected, rtol=1e-5)


def test_what_runs_on_slices_of_an_array_closed_over_is_refused_by_an_error_of_ours():
    rows, x = drawn(6, 6), drawn(4, 6, seed=1)
    with tr.Layout(
        tr.make_mesh(jax.devices()[:6], expert=2, data=3), params={"vocab": "data"}, compute={"batch": "data"}
    ):
        rows, x = tr.shard(tr.named(rows, "batch vocab"), "compute"), tr.shard(tr.named(x, "heads vocab"))
        with pytest.raises(
            MeshError, match="got one sliced over them .*, in vmap: make it an argument of the function"
        ):
            tr.vmap(lambda row: tr.top_k(x, "heads", 3)[0], "batch")(rows)
        given = tr.vmap(lambda row, x: tr.top_k(x, "heads", 3)[0], "batch")(rows, x)
    np.testing.assert_array_equal(given["batch", 1].array, -np.sort(-np.asarray(x), axis=0)[:3])


@pytest.mark.slow
def test_a_whole_factor_from_outside_meets_slices_of_another_mesh_axis():
    rows, w = drawn(8, 5, 8), drawn(5, 2, seed=1)
    plain = lambda w, rows: jax.vmap(lambda row: (jnp.tanh(row.T @ w) ** 2).sum())(rows).sum()
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(w, rows)
    loss = lambda w, rows: (
        tr.vmap(lambda r: (tr.tanh(tr.dot(r, w, over="heads")) ** 2).sum(), "batch")(rows).sum().array
    )
    with tr.Layout(tr.make_mesh(data=2, context=4), compute={"batch": "data", "mlp": "context"}):
        placed = [tr.shard(tr.named(w, "heads pos"), "compute"), tr.shard(tr.named(rows, "batch heads mlp"), "compute")]
        for grad in (jax.grad(loss, argnums=(0, 1)), tr.named_jit(jax.grad(loss, argnums=(0, 1)))):
            for mine, theirs in zip(grad(*placed), expected, strict=True):
                np.testing.assert_allclose(mine.array, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_a_product_that_is_mapped_in_a_branch_takes_copies():
    """A row that is whole meets slices, and its derivative is mapped: JAX asked how copies are sliced, and refused."""
    rows, w = drawn(4, 2), drawn(2, 3, seed=1)
    by_row = lambda r, w: tr.square(tr.tanh(tr.dot(r, w, over="embed"))).sum()
    other = lambda rows, w, h: tr.settle(h * 0.5 + tr.vmap(by_row, "layers")(rows, w).sum("layers"))

    def loss(rows, w, h):
        h = jax.lax.cond((w.sum() > 1e9).array, lambda h: w, lambda h: other(rows, w, h), h)
        return (h * h).sum().array

    named = [tr.named(rows, "layers embed"), tr.named(w, "embed batch"), tr.named(drawn(2, 3, seed=2), "embed batch")]
    expected = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*named)
    with tr.Layout(tr.make_mesh(jax.devices()[:3], context=3), compute={"batch": "context"}):
        placed = [tr.shard(x, "compute") for x in named]
        for grad in (jax.grad(loss, argnums=(0, 1, 2)), jax.jit(jax.grad(loss, argnums=(0, 1, 2)))):
            for mine, theirs in zip(grad(*placed), expected, strict=True):
                np.testing.assert_allclose(mine.array, theirs.array, rtol=2e-5, atol=2e-5)


def test_copies_are_mapped_as_what_they_are_copies_of():
    mesh = tr.make_mesh(jax.devices()[:2], data=2)
    with jax.set_mesh(mesh):
        x = jax.device_put(drawn(3, 4), jax.NamedSharding(mesh, jax.P()))
        loss = lambda x: jax.vmap(jnp.sin)(jax.reshard(x, jax.P(None, None, reduced={"data"}))).sum()
        np.testing.assert_allclose(jax.grad(loss)(x), jnp.cos(x), rtol=1e-6)
