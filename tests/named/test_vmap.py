"""`vmap` over a name: a loss per example, under every layout of its parameters."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import f32, nn
from trellis.inspect import structure_of
from trellis.mesh import MeshError
from trellis.named import NamesError

LAYOUTS = {
    "data": dict(compute={"b": "data"}),
    "fsdp": dict(params={"e": "data"}, compute={"b": "data"}),
    "fsdp, other name": dict(params={"o": "data"}, compute={"b": "data"}),
    "fsdp over two": dict(params={"e": ("data", "model")}, compute={"b": ("data", "model")}),
    "tensor": dict(compute={"b": "data", "o": "model"}),
    "fsdp and tensor": dict(params={"e": "data", "o": "model"}, compute={"b": "data", "o": "model"}),
    "model only": dict(compute={"e": "model"}),
    "nothing": dict(),
}
W = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
X = np.linspace(0, 1, 128, dtype=np.float32).reshape(8, 16)


def _loss(x, w):
    """The loss of one example, as if there were no others."""
    return (tr.tanh(tr.dot(x, w, over="e")) ** 2).sum()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_per_example(layout, kind):
    """The batch is sharded under each second layout in one mode, and under the others in the other."""
    batch = "sharded" if (list(LAYOUTS).index(layout) % 2 == 0) == (kind == "explicit") else "numpy"
    each, total = np.sum(np.tanh(X @ W) ** 2, 1), lambda w: (jnp.tanh(X @ w) ** 2).sum()
    expected = jax.jit(jax.grad(total))(W)
    with tr.Layout(tr.make_mesh(data=4, model=2, axis_type=kind), **LAYOUTS[layout]):
        w, x = tr.shard(tr.named(jnp.asarray(W), "e o")), tr.named(X, "b e")
        x = tr.shard(x, "compute") if batch == "sharded" else x
        losses = tr.vmap(_loss, "b")
        mean = lambda w, x: losses(x, w).sum().array
        both = lambda x, w: (losses(x, w), jax.grad(mean)(w, x))
        of_each = tr.vmap(lambda x, w: jax.grad(lambda w: _loss(x, w).array)(w), "b")
        *compiled, per_example = jax.jit(lambda x, w: (*both(x, w), of_each(x, w)))(x, w)
        for found, gradient in (both(x, w), compiled):
            np.testing.assert_allclose(found, each, rtol=1e-5)
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
        assert per_example.shape == {"b": 8, "e": 16, "o": 8}
        np.testing.assert_allclose(per_example.sum("b"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "data", "fsdp and tensor", "fsdp over two"])
def test_a_gradient_for_each_example_by_what_is_closed_over(layout):
    """Whether it rests in slices of the mapped mesh axes or comes from NumPy; also if it is differentiated again."""
    each = lambda w, x: tr.vmap(lambda x: tr.grad(lambda w: _loss(x, w))(w), "b")(x)
    again = lambda w, x: (each(w, x), tr.grad(lambda w: (each(w, x) ** 2).sum())(w))
    from_numpy, x = tr.named(W, "e o"), tr.named(X, "b e")
    expected = jax.jit(again)(from_numpy, x)
    with tr.Layout(tr.make_mesh(data=4, model=2), **LAYOUTS[layout]):
        for w in (from_numpy, tr.shard(from_numpy)):
            for run in (jax.jit(again), again):
                for found, one in zip(run(w, x), expected, strict=True):
                    np.testing.assert_allclose(found, one, rtol=1e-4, atol=1e-5)
        gathered = tr.ledger(each, w, tr.shard(x, "compute")).per_kind()
        assert set(gathered) <= {"all-gather"}
        if layout == "fsdp":
            with pytest.raises(MeshError, match="or take a gradient inside with tr.grad"):
                tr.vmap(lambda x: jax.grad(lambda w: _loss(x, w).array)(w), "b")(x)


@pytest.mark.slow
@pytest.mark.parametrize("params", [{"e": "data"}, {"e": "model"}, {"e": "data", "o": "model"}, {"o": "data"}])
def test_maps_in_each_other_over_what_one_of_their_mesh_axes_slices(params):
    x, w = tr.named(X.reshape(4, 2, 16), "a b e"), tr.named(W, "e o")

    def losses(w, x):
        return tr.vmap(lambda x: tr.vmap(lambda x: _loss(x, w), "b")(x), "a")(x)

    both = lambda w, x: (losses(w, x), tr.grad(lambda w, x: losses(w, x).sum(), (0, 1))(w, x))
    expected = jax.jit(both)(w, x)
    for outer, inner in (("data", "model"), ("model", "data")):
        with tr.Layout(
            tr.make_mesh(jax.devices()[:4], data=2, model=2), params=params, compute={"a": outer, "b": inner}
        ):
            found = tr.named_jit(both)(tr.shard(w), tr.shard(x, "compute"))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def _one(x):
    """A batch of one example."""
    return x.broadcast_to({"batch": 1, **x.shape})


def _layers(w, x):
    """Attention in a loop."""

    def layer(x, w):
        q = tr.tanh(tr.dot(x, w, over="e")).rename(v="head_dim").broadcast_to({"pos": 4, "heads": 1, "head_dim": 8})
        k = q.rename(pos="key_pos", heads="kv_heads")
        return nn.attend(_one(q), _one(k), _one(k))["batch", 0, "heads", 0].rename(head_dim="e")

    return tr.fold(layer, "layers")(x, tr.stack([w, w], "layers"))


TABLE = tr.named(np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8), "v e")
OF_SLICES = {
    "rows": lambda w, x, ids: (tr.take(w, "v", ids) * x).sum(),
    "values": lambda w, x, ids: tr.take_along(w, "v", tr.broadcast_to(ids, {"pos": 4, "e": 8}))["e", ::2].sum(),
    "loss": lambda w, x, ids: (
        nn.next_token_loss(_one(x.rename(e="embed")), w.rename(v="vocab", e="embed"), _one(ids)).total
    ),
    "attention": lambda w, x, ids: (_layers(w, x) ** 2).sum(),
    "cond": lambda w, x, ids: tr.cond(x.sum() > 0, lambda: tr.dot(x, w, over="e").sum(), lambda: (x * 2.0).sum()),
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("compute", [{"pos": "data"}, {"pos": "data", "v": "data"}], ids=["", "rows in slices"])
@pytest.mark.parametrize("what", OF_SLICES)
def test_over_a_whole_name_of_what_jax_does_not_map_with_copies(what, compute):
    """A table is copies along what slices the positions. It is mapped once more, without them."""
    x, ids = np.linspace(-1, 1, 96, dtype=np.float32).reshape(3, 4, 8), np.arange(12, dtype=np.int32).reshape(3, 4) % 8
    x, ids = tr.named(x, "b pos e"), tr.named(ids, "b pos")
    each = lambda w: tr.vmap(lambda x, ids: tr.grad(lambda w: OF_SLICES[what](w, x, ids))(w), "b")(x, ids)
    expected = jax.jit(each)(TABLE)
    with tr.Layout(tr.make_mesh(jax.devices()[:2], data=2), params={"v": "data"}, compute=compute):
        found = tr.named_jit(each)(tr.shard(TABLE))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_gathered_parameters_gradient_is_one_reduce_scatter():
    with tr.Layout(tr.make_mesh(data=8), params={"e": "data"}, compute={"b": "data"}):
        w, x = tr.shard(tr.ones({"e": 16, "o": 8})), tr.shard(tr.ones({"b": 8, "e": 16}), "compute")
        step = jax.jit(jax.grad(lambda w, x: tr.vmap(_loss, "b")(x, w).sum().array))
        moved = tr.ledger(step, w, x)
        assert tr.typeof(step(w, x)) == "f32[e/data=16 o=8]"
        kinds = sorted({row.kind for row in moved.rows if row.payload > 64})
        assert kinds == ["all-gather", "reduce-scatter"]


def test_the_largest_values_are_found_where_their_rows_are():
    """Of a `top_k` that is mapped over slices XLA gathers the rows, and no type says so."""
    x = np.random.default_rng(0).permutation(np.arange(64, dtype=np.float32).repeat(2)).reshape(8, 4, 4)
    best = tr.vmap(lambda x: tr.top_k(x, "e", 2, new_name="k"), "b")
    with tr.Layout(tr.make_mesh(data=4, model=2), compute={"b": "data", "p": "model"}):
        step = jax.jit(best).lower(tr.shard(tr.named(x, "b p e"), "compute")).compile()
        found = step(tr.shard(tr.named(x, "b p e"), "compute"))
    assert not re.findall(r"all-\w+\(|collective-\w+\(", step.as_text())
    for ours, theirs in zip(found, jax.lax.top_k(x, 2)):
        np.testing.assert_array_equal(ours, theirs)
        assert tr.typeof(ours)[3:] == "[b/data=8 p/model=4 k=2]"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data", "fsdp", "fsdp and tensor", None])
def test_keys_for_each_example(layout):
    import contextlib

    def draw():
        keys = tr.random.split(jax.random.key(0), "b", 8)

        def one(key, x):
            first, second = jax.random.split(key)
            names = tr.random.split(key, "k", 2)
            assert names.names == ("k",)
            return tr.random.dropout(first, x, 0.5) + tr.random.normal(second, {"e": 16})

        return tr.vmap(one, "b")(keys, tr.named(X, "b e"))

    expected = jax.jit(draw)()
    here = contextlib.nullcontext()
    if layout is not None:
        here = tr.Layout(tr.make_mesh(data=4, model=2), **LAYOUTS[layout])
    with here:
        np.testing.assert_allclose(draw(), expected, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(draw)(), expected, rtol=1e-6)


def test_over_a_bare_axis():
    three = tr.Axis("k", 3)
    x = tr.ones({"e": 2})
    assert tr.vmap(lambda x: x * 2, three)(x).shape == {"k": 3, "e": 2}
    assert tr.scan(lambda c, x: (c + x, c), three)(x, x)[1].shape == {"k": 3, "e": 2}
    assert tr.fold(lambda c, x: c + x, three)(x, x).tolist() == [4.0, 4.0]
    assert tr.map(lambda x: x, three)(x).shape == {"k": 3, "e": 2}
    with tr.Layout(tr.make_mesh(data=8), compute={"k": "data"}):
        out = tr.vmap(lambda x: x * 2, tr.Axis("k", 16))(x)
        assert tr.typeof(out) == "f32[k/data=16 e=2]"
    with pytest.raises(NamesError, match="k=3"):
        tr.vmap(lambda x: x, three)(tr.ones({"k": 4}))


def test_a_loop_that_ends_otherwise_for_each_row():
    """JAX maps it where its whole carry is mapped."""
    more = lambda x: (x**2).sum().array > 0.6
    alone = lambda x: jax.lax.while_loop(more, lambda x: x * 0.9, x)
    counted = lambda x: jax.lax.while_loop(lambda c: more(c[1]), lambda c: (c[0] + 1, c[1] * 0.9), (jnp.int32(0), x))[1]
    expected = jax.jit(tr.vmap(counted, "b"))(tr.named(X, "b e"))
    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}):
        np.testing.assert_allclose(tr.named_jit(tr.vmap(alone, "b"))(tr.from_numpy(X, "b e")), expected, rtol=1e-6)
        with pytest.raises(MeshError, match="a while_loop over slices that carries something else too") as error:
            tr.named_jit(tr.vmap(counted, "b"))(tr.from_numpy(X, "b e"))
        assert "use a scan of a fixed length and where" in str(error.value)


def test_linear_algebra_is_mapped_one_row_after_the_other():
    """JAX has no QR and no inverse over slices; its error comes while the program is lowered, or before."""
    rows = np.stack([np.eye(4, dtype=np.float32) * (i + 2) for i in range(8)])
    triangle = lambda x: tr.named(jnp.linalg.qr(x.array)[1], "i j")
    inverse = lambda x: tr.named(jnp.linalg.inv(x.array), "i j")
    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}):
        x = tr.named(rows, "b i j")
        for fn, run in ((triangle, tr.named_jit), (triangle, lambda f: f), (inverse, tr.named_jit)):
            with pytest.raises(MeshError, match="tr.map"):
                run(tr.vmap(fn, "b"))(x)
        np.testing.assert_allclose(tr.named_jit(tr.map(inverse, "b"))(x), np.linalg.inv(rows), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("decompose", [jnp.linalg.inv, lambda x: jnp.linalg.qr(x)[1]])
def test_linear_algebra_of_plain_arrays_is_refused_and_each_device_has_its_own(decompose):
    rows = np.stack([np.eye(4, dtype=np.float32) * (i + 2) + 0.1 for i in range(8)])

    @tr.shard_map
    def own(x: f32["b/data i j"]) -> f32["b/data i j"]:
        return decompose(x)

    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}):
        x = tr.from_numpy(rows, "b i j")
        with pytest.raises(MeshError, match=r"with trellis\.shard_map"):
            tr.named_jit(lambda x: x.with_array(decompose(x.array)))(x)
        with pytest.raises(tr.NamesError, match="with trellis.shard_map"):
            tr.lift(decompose)(x)
        np.testing.assert_allclose(own(x.array), decompose(rows), rtol=1e-4, atol=1e-6)
        grad = jax.jit(jax.grad(lambda x: (own(x) ** 2).sum()))(x.array)
    np.testing.assert_allclose(grad, jax.grad(lambda x: (decompose(x) ** 2).sum())(rows), rtol=1e-3, atol=1e-4)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["lgamma", "gammainc"])
def test_functions_that_jax_can_not_lower_for_slices_are_refused_and_each_device_has_its_own(name):
    """JAX 0.12.0 looks up coefficients of these in tables; 0.10.2 computes them."""
    fn = jax.lax.lgamma if name == "lgamma" else lambda x: jax.scipy.special.gammainc(x, x)

    @tr.shard_map
    def own(x: f32["b/data e"]) -> f32["b/data e"]:
        return fn(x)

    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}):
        x = tr.from_numpy(X + 0.5, "b e")
        try:
            found = tr.named_jit(tr.lift(fn))(x).array
        except MeshError as refused:
            assert "lgamma, only where no mesh axis slices the array" in str(refused)
            assert "trellis.shard_map" in str(refused)
            found = None
        own_slices = own(x.array)
    for each in [own_slices] if found is None else [found, own_slices]:
        np.testing.assert_allclose(each, fn(X + 0.5), rtol=1e-5, atol=1e-6)


UPDATES = {
    "add": lambda x, ids: x.at["e", ids].add(x["e", ids] * 2),
    "add along a slice": lambda x, ids: x.at["o", ids].add(x["o", ids] * 2),
    "set": lambda x, ids: x.at["e", ids].set(tr.tanh(x["o", 0]["e", ids])),
    "number": lambda x, ids: x.at["e", 3].multiply(3.0),
    "slice": lambda x, ids: x.at["e", 2:5].add(1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "compute", [{"b": "data", "o": "model"}, {"b": ("data", "model"), "o": "model"}, {"o": "data"}]
)
@pytest.mark.parametrize("what", UPDATES)
def test_updates_have_gradients(what, compute):
    """JAX has none of a `shard_map` that is mapped over slices; what comes out is sliced as the layout says."""
    given, ids = np.linspace(-1, 1, 1024, dtype=np.float32).reshape(8, 16, 8), tr.named([[1, 5, 1]] * 8, "b k")

    def loss(x, ids):
        made = tr.vmap(UPDATES[what], "b")(x, ids)
        return (made**2 * tr.arange(tr.Axis("e", 16), dtype="float32")).sum()

    expected = jax.jit(tr.grad(loss))(tr.named(given, "b e o"), ids)
    with tr.Layout(tr.make_mesh(data=4, model=2), compute=compute):
        x = tr.from_numpy(given, "b e o")
        np.testing.assert_allclose(tr.named_jit(tr.grad(loss))(x, ids), expected, rtol=1e-5, atol=1e-5)
        assert tr.typeof(tr.named_jit(tr.vmap(UPDATES[what], "b"))(x, ids)) == tr.typeof(x)


def test_in_manual_mode():
    @tr.shard_map
    def losses(w: tr.f32["e o"], x: tr.f32["b/data e"]) -> tr.f32["b/data"]:
        w, x = tr.named(w, "e o"), tr.named(x, "b/data e")
        return tr.vmap(_loss, "b")(x, w).array

    with tr.Layout(tr.make_mesh(data=8)):
        np.testing.assert_allclose(losses(W, X), np.sum(np.tanh(X @ W) ** 2, 1), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("along", "since"),
    [
        (lambda x, n: (tr.cumsum(x, n) ** 2).sum(n), (0, 10)),
        (lambda x, n: tr.sort(x, n).max(n), (0, 10)),
        (tr.prod, None),
    ],
    ids=["cumsum", "sort", "prod"],
)
def test_gradients_of_what_devices_do_by_themselves(along, since):
    """Right, or refused where JAX cannot map the gradient over slices: `since` is the first JAX that can."""
    gradient = jax.grad(lambda x: tr.vmap(lambda row: along(row, "e"), "b")(x).sum().array)
    expected = gradient(tr.named(X, "b e"))
    refused = pytest.raises(MeshError, match="JAX can map an operation over slices only if it knows how they are")
    with tr.Layout(tr.make_mesh(data=4, model=2), compute={"b": "data", "e": "model"}):
        with contextlib.nullcontext() if since and jax.__version_info__ >= since else refused:
            np.testing.assert_allclose(gradient(tr.named(X, "b e")), expected, rtol=1e-5)


@pytest.mark.slow
def test_steps_of_parameters_for_each_example():
    """A step over plain arrays, as Optax makes it: right of an argument; of what is closed over, refused."""
    loss = lambda w, row: (tr.dot(row, w, over="e") ** 2.0).sum()
    stepped = lambda w, row: loss(jax.tree.map(lambda w, g: w - 0.1 * g, w, tr.grad(loss)(w, row)), row)
    argument = lambda w, x: tr.vmap(stepped, "b")(w, x).sum()
    around = lambda w, x: tr.vmap(lambda row: stepped(w, row), "b")(x).sum()
    w = tr.named(np.linspace(-1, 1, X.shape[1] * 2, dtype=np.float32).reshape(-1, 2), "e h")
    expected = jax.jit(tr.grad(argument))(w, tr.named(X, "b e"))
    with tr.Layout(tr.make_mesh(data=8), params={"e": "data"}, compute={"b": "data"}):
        w, x = tr.shard(w), tr.named(X, "b e")
        np.testing.assert_allclose(tr.grad(argument)(w, x), expected, rtol=1e-4)
        with pytest.raises(MeshError, match="pass the parameters to the mapped function, which has them whole"):
            tr.grad(around)(w, x)


@pytest.mark.parametrize("manual", [False, True])
def test_what_a_users_function_does_not_do_stays_its_own_error(manual):
    def one(row):
        raise NotImplementedError

    @tr.shard_map
    def slices(x: tr.f32["b/data e"]) -> tr.f32["b/data e"]:
        return jax.vmap(one)(x)

    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}), pytest.raises(NotImplementedError):
        slices(X) if manual else tr.vmap(one, "b")(tr.named(X, "b e"))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("kept", [jax.checkpoint, jax.jit], ids=["checkpoint", "jit"])
def test_what_is_sorted_in_a_map_is_the_same_where_it_is_kept_for_the_backward_pass(kept, descending):
    """The mapped dimension is not the first one of what is sorted, and as long as that."""
    x = tr.named(np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32), "b o e")
    copies = tr.arange(tr.Axis("copy", 3)).astype("float32")

    def one(row):
        sorted_copies = tr.sort(tr.stack([row, 2.0 * row, row * row], "copy"), "e", descending=descending)
        return sorted_copies["o", 1] * copies

    def loss(x, way):
        return (way(tr.vmap(one, "b"))(x) ** 2.0).sum()

    plain, expected = tr.value_and_grad(lambda x: loss(x, lambda fn: fn))(x)
    value, found = tr.value_and_grad(lambda x: loss(x, kept))(x)
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "one",
    [
        lambda row: row.take_along("e", row.argsort("e")),
        lambda row: row.sort("e", descending=True),
        lambda row: row.top_k("e", 2)[0],
    ],
    ids=["argsort", "sort", "top_k"],
)
def test_what_sorts_in_a_map_over_slices_has_derivatives_of_derivatives(one):
    x = tr.named(np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32), "b e")

    def changes(x):
        loss = lambda x: (tr.vmap(one, "b")(x * x) ** 2.0).max("b").sum()
        return jax.jvp(tr.grad(loss), (x,), (x,))

    expected = changes(x)
    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}):
        found = tr.named_jit(changes)(x)
    for one_device, sliced in zip(expected, found, strict=True):
        np.testing.assert_allclose(sliced, one_device, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_a_table_that_a_map_in_a_map_closes_over_is_gathered_as_the_ledger_says(merged):
    """At rest in slices over both maps' mesh axes: the compiler gathered it, and the ledger had nothing."""
    layout = tr.Layout(
        tr.make_mesh(data=4, model=2), {"embed": "data", "vocab": "model"}, {"batch": "data", "pos": "model"}
    )
    look_up = lambda t, e: t.merge_axes(("vocab", "embed"), "z")["z", e] if merged else t["vocab", e]
    rows = lambda t, ids: tr.vmap(lambda r: tr.vmap(lambda e: look_up(t, e), "pos")(r), "batch")(ids)
    both = lambda t, ids: (rows(t, ids), tr.grad(lambda t: tr.sin(rows(t, ids)).sum())(t))
    table, ids = tr.random.normal(jax.random.key(0), {"vocab": 8, "embed": 4}), tr.arange(tr.Axis("pos", 4))
    ids = tr.broadcast_to(ids, {"batch": 4, "pos": 4})
    expected = both(table, ids)
    with layout:
        placed = tr.shard(table), tr.shard(ids, "compute")
        program = tr.named_jit(both)
        for mine, theirs in zip(program(*placed), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
        compiled = program.lower(*placed).compile()
        said = str(structure_of(tr.ledger(program, *placed), compiled, layout.mesh))
    assert "besides" not in said and "missing" not in said, said


@pytest.mark.slow
def test_rows_are_stacked_with_what_is_the_same_for_all():
    x, same = tr.random.normal(jax.random.key(0), {"b": 8, "e": 4}), tr.random.normal(jax.random.key(1), {"e": 4})
    both = lambda same, x: tr.vmap(lambda r: tr.stack([same, r, tr.ones({"e": 4})], "z"), "b")(x)
    loss = lambda same, x: tr.sin(both(same, x)).sum()
    expected, slope = both(same, x), tr.grad(loss)(same, x)
    for params in ({}, {"e": "data"}):
        with tr.Layout(tr.make_mesh(data=4, model=2), params, {"b": "data", "e": "model"}):
            placed = tr.shard(same), tr.shard(x, "compute")
            np.testing.assert_array_equal(tr.named_jit(both)(*placed), expected)
            np.testing.assert_allclose(tr.named_jit(tr.grad(loss))(*placed), slope, rtol=1e-6)
    keys = tr.stack([tr.random.split(jax.random.key(0), "b", 2)] * 2, "z")
    assert tr.typeof(keys) == "key[z=2 b=2]"


@pytest.mark.slow
def test_the_gradient_of_what_an_update_reads_from_outside_is_summed_on_each_device_first():
    """It was summed over devices for each row by itself: as many times the bytes as a device has rows."""
    layout = tr.Layout(tr.make_mesh(data=4, model=2), {"v": "model"}, {"b": "data", "p": "model"})
    each = lambda t, ids: tr.vmap(lambda i: t.at["v", i].add(1.0).max("v"), "b")(ids)
    loss = lambda t, ids: tr.sin(each(t, ids)).sum()
    table, ids = tr.random.normal(jax.random.key(0), {"v": 6, "e": 4}), tr.arange(tr.Axis("p", 4))
    ids = tr.broadcast_to(ids, {"b": 12, "p": 4})
    expected = jax.jit(tr.grad(loss))(table, ids)
    with layout:
        placed = tr.shard(table), tr.shard(ids, "compute")
        step = tr.named_jit(tr.grad(loss))
        np.testing.assert_allclose(step(*placed), expected, rtol=1e-5, atol=1e-6)
        said = str(structure_of(tr.ledger(step, *placed), step.lower(*placed).compile(), layout.mesh))
    assert "besides" not in said and "missing" not in said, said
