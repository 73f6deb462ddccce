"""Arrays that are on no mesh, or on another: one rule, in every operation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.inspect import collectives
from trellis.mesh import MeshError

KINDS = ["explicit", "auto"]


def _layout(kind: str, **maps) -> tr.Layout:
    return tr.Layout(tr.make_mesh(data=4, model=2, axis_type=kind), **maps)


def _batches(kind: str):
    """The same ids from NumPy, from before the layout, and from JAX on one device."""
    ids = np.arange(8, dtype=np.int32)
    return {
        "numpy": tr.named(ids, "batch"),
        "jax": tr.named(jnp.asarray(ids), "batch"),
        "put": tr.named(jax.device_put(ids, jax.devices()[0]), "batch"),
    }[kind]


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("source", ["numpy", "jax", "put"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sliced", [{}, {"vocab": "model"}, {"embed": "model"}])
def test_lookups_repeat_no_rows(kind, source, sliced):
    ids = _batches(source)
    table = np.arange(64.0, dtype=np.float32).reshape(16, 4)
    with _layout(kind, compute={"batch": "data", **sliced}):
        held = tr.shard(tr.named(jnp.asarray(table), "vocab embed"), "compute")
        for rows in (tr.take(held, "vocab", ids), held["vocab", ids], tr.named(table, "vocab embed")["vocab", ids]):
            assert rows.shape == {"batch": 8, "embed": 4}
            np.testing.assert_array_equal(rows, table[:8])
        if kind == "explicit":
            assert tr.typeof(tr.take(held, "vocab", ids)).startswith("f32[batch/data=8 embed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_table_takes_sharded_ids(kind):
    table = np.arange(64.0, dtype=np.float32).reshape(16, 4)
    with _layout(kind, compute={"batch": "data"}):
        ids = tr.shard(_batches("jax"), "compute")
        np.testing.assert_array_equal(tr.take(tr.named(table, "vocab embed"), "vocab", ids), table[:8])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maps", [dict(params={"e": "data"}), dict(params={"e": "data"}, compute={"o": "model"})])
def test_gradients_of_a_batch_from_numpy(kind, maps):
    x = np.arange(128.0, dtype=np.float32).reshape(8, 16) / 100
    loss = lambda w, x: (tr.dot(x, w, over="e") ** 2).sum().array
    expected = 2 * x.T @ (x @ np.ones((16, 8), np.float32))
    with _layout(kind, **{**maps, "compute": {"b": "data", **maps.get("compute", {})}}):
        w = tr.shard(tr.ones({"e": 16, "o": 8}))
        x = tr.named(x, "b e")
        for gradient in (jax.grad(loss), jax.jit(jax.grad(loss)), tr.named_jit(jax.grad(loss))):
            np.testing.assert_allclose(gradient(w, x), expected, rtol=1e-5)
        if kind == "explicit":
            assert tr.typeof(jax.grad(loss)(w, x)) == "f32[e/data=16 o=8]"
            assert tr.typeof(jax.grad(loss, 1)(w, x)).startswith("f32[b")


def test_the_ledger_has_arguments_where_the_jitted_function_puts_them():
    x, w = tr.named(np.ones((8, 4), np.float32), "batch embed"), tr.named(jnp.ones((4, 3)), "embed mlp")
    gradient = tr.grad(lambda x, w: tr.square(tr.dot(x, w, over="embed")).sum(), (0, 1))
    with _layout("explicit", compute={"batch": "data"}) as layout:
        run = tr.named_jit(gradient)
        found, plain = tr.ledger(run, x, w), tr.ledger(gradient, x, w)
        compiled = collectives(run.lower(x, w).compile(), layout.mesh)
        assert tr.typeof(run(x, w)[0]) == "f32[batch/data=8 embed=4]"
        by_inputs = tr.ledger(tr.named_jit(gradient, inputs={"embed": "data"}), x, w)
    assert [row.kind for row in found] == ["all-reduce"]
    assert found.total() == compiled.total()
    assert [row.kind for row in plain] == ["all-reduce", "all-gather"]  # a gradient is whole, like its array
    assert "embed/data" in str(by_inputs)


@pytest.mark.parametrize("jit", [jax.jit, tr.named_jit])
def test_programs_of_plain_inputs_share_the_work(jit):
    """Where no input is on the mesh, the first operation places it: no device does the whole."""
    x, w = tr.named(np.ones((8, 16), np.float32), "b e"), tr.named(np.ones((16, 4), np.float32), "e o")
    with _layout("explicit", compute={"b": "data", "o": "model"}):
        out = jit(lambda x, w: tr.dot(x, w, over="e"))(x, w)
        assert tr.typeof(out) == "f32[b/data=8 o/model=4]"
        np.testing.assert_array_equal(out, np.full((8, 4), 16.0))
        assert {s.data.shape for s in out.array.addressable_shards} == {(2, 2)}


@pytest.mark.slow(but=9)
@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: x.sum("b"),
        lambda x: tr.sort(x, "b"),
        lambda x: x["b", 1:5],
        lambda x: x["b", tr.named(np.array([1, 2]), "k")],
        lambda x: x.at["b", 2].set(0),
        lambda x: tr.dot(x, x.rename(e="f"), over="b"),
        lambda x: tr.concatenate([x, x], "b"),
        lambda x: tr.stack([x, x], "s"),
        lambda x: tr.merge_axes(x, ("b", "e"), "f"),
        lambda x: tr.vmap(lambda row: row.sum("e"), "b")(x),
        lambda x: tr.scan(lambda c, row: (c + row, c), "b")(tr.zeros({"e": 4}), x)[1],
        lambda x: tr.where(x > 3, x, tr.zeros({"e": 4})),
        lambda x: tr.cumsum(x, "b"),
        lambda x: tr.softmax(x, "e"),
        lambda x: tr.pad(x, {"b": (2, 2)}),
        lambda x: tr.roll(x, 1, "b"),
        lambda x: tr.rearrange(x, "b (e f) -> f b e", f=2),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_is_the_same_as_without_a_layout(use, kind):
    x = tr.named(np.arange(32.0, dtype=np.float32).reshape(8, 4), "b e")
    expected = use(x)
    with _layout(kind, compute={"b": "data", "e": "model"}):
        for run in (use, jax.jit(use)):
            out = run(x)
            assert out.shape == expected.shape
            np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_arrays_of_another_mesh_are_refused():
    with tr.Layout(tr.make_mesh(model=8), compute={"b": "model"}):
        x = tr.shard(tr.ones({"b": 8}), "compute")
    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}):
        for use in (lambda x: x + 1, lambda x: x.sum(), lambda x: x["b", 0], tr.named_jit(lambda x: x + 1)):
            with pytest.raises(MeshError, match=r"mesh in force.*data=8.*of another mesh \(model=8\).*shard"):
                use(x)


def test_how_another_mesh_of_the_same_sizes_is_another():
    meshes = {
        r"data=8, auto\)": tr.make_mesh(axis_type="auto", data=8),
        r"data=8, its devices in another order\)": tr.make_mesh(jax.devices()[::-1], data=8),
    }
    for said, mesh in meshes.items():
        x = tr.named(jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P("data"))), "b")
        for use in (lambda x: x + 1, tr.grad(lambda x: (x * x).sum())):
            with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}), pytest.raises(MeshError, match=said):
                use(x)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_arrays_on_a_single_device(kind):
    """Whole like these, also if `jax.device_put` has taken one from a mesh, whose type still has its slices."""
    x, device = tr.named(np.arange(8.0, dtype=np.float32), "b"), jax.devices()[3]
    with _layout(kind, compute={"b": "data"}):
        for there in (jax.device_put(x, device), jax.device_put(tr.shard(x, "compute"), device)):
            np.testing.assert_array_equal(there + 1, x.array + 1)
            given = {"named": there, "plain": jax.device_put(np.float32(3.0), device)}
            found = tr.grad(lambda tree: (tree["named"] * tree["named"] * tree["plain"]).sum())(given)
            np.testing.assert_array_equal(found["named"], 6 * x.array)
            assert found["plain"] == 140 and tr.typeof(found["named"]) == "f32[b=8]"


def test_after_the_layout_has_ended():
    """A value can be used, and a gradient says where it is to be taken."""
    with _layout("explicit", params={"e": "data"}, compute={"b": "data"}):
        w, x = tr.shard(tr.ones({"e": 16})), tr.shard(tr.ones({"b": 8, "e": 16}), "compute")
    np.testing.assert_array_equal(tr.dot(x, w, over="e"), np.full(8, 16.0))
    np.testing.assert_array_equal(w["e", 3:5], [1, 1])
    with pytest.raises(MeshError, match="take it inside `with layout:`"):
        jax.grad(lambda w: tr.dot(x, w, over="e").sum().array)(w)


AFTER = {
    "custom gradient": lambda x, y: tr.logaddexp(x, y),
    "outer": lambda x, y: tr.outer(tr.add, x, y.rename(b="c", e="f")),
    "product": lambda x, y: tr.dot(x, y["b", 0], over="e"),
    "products": lambda x, y: tr.dot_each(x, (y["b", 0], y["b", 1]), over="e")[1],
    "mask": lambda x, y: x.sum("b", where=y > 0),
    "softmax": lambda x, y: tr.softmax(x, "e", where=y > -9),
    "lookup": lambda x, y: x.rename(b="rows")["e", (y["e", 0] * 0).astype(jnp.int32)],
    "joined": lambda x, y: tr.concatenate([x, y], "e"),
    "update": lambda x, y: x.at["b", 0].add(y["b", 1]),
}


@pytest.mark.parametrize("operation", AFTER)
def test_arrays_on_and_off_a_mesh_after_its_layout_has_ended(operation):
    """What is on no mesh is whole on the mesh of the others, in compiled gradients, too."""
    a, b = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
    gradient = jax.grad(lambda x, y: (AFTER[operation](x, y) ** 2).sum().array, argnums=(0, 1))
    wanted = jax.jit(gradient)(tr.named(a, "b e"), tr.named(b, "b e"))
    with _layout("explicit", params={"b": "data"}):
        on = tr.shard((tr.named(a, "b e"), tr.named(b, "b e")))
    compiled = jax.jit(gradient)
    for args in ((on[0], tr.named(b, "b e")), (tr.named(a, "b e"), on[1])):
        for found, gradient in zip(compiled(*args), wanted, strict=True):
            np.testing.assert_allclose(found.array, gradient.array, rtol=1e-5, atol=1e-6)


def test_operations_on_whole_dimensions_in_jit_after_their_layout_has_ended():
    values = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    with _layout("explicit", params={"b": "data"}):
        x = tr.shard(tr.named(values, "b e"))
    found = jax.jit(lambda x: (tr.top_k(x, "e", 2)[0], tr.sort(x, "e"), x.at["e", 0].set(1.0)))(x)
    ordered = np.sort(values, axis=1)
    np.testing.assert_array_equal(found[0].array, ordered[:, :1:-1])
    np.testing.assert_array_equal(found[1].array, ordered)
    np.testing.assert_array_equal(found[2].array[:, 1:], values[:, 1:])


@pytest.mark.parametrize("jit", [jax.jit, tr.named_jit])
def test_a_program_closes_over_arrays_of_a_mesh_after_their_layout_has_ended(jit):
    """JAX takes the devices from a program's arguments, and none of these is on the mesh."""
    with _layout("explicit", params={"b": "data"}):
        x = tr.shard(tr.arange(tr.Axis("b", 8)))
    np.testing.assert_array_equal(jit(lambda y: x * y)(tr.named(np.int32(2), "")), 2 * np.arange(8))
    np.testing.assert_array_equal(jit(lambda: x["b", np.array([2, -2])])(), [2, 6])


def test_a_gradient_that_a_program_makes_of_no_argument_is_refused_after_its_layout_has_ended():
    """JAX takes the devices from the arguments that a program reads: here from none."""
    with _layout("explicit", params={"b": "data"}):
        x = tr.shard(tr.ones({"b": 8}))
    gradient = tr.named_jit(tr.grad(lambda x: tr.ones({"b": 8}).sum().array))
    with pytest.raises(MeshError, match=r"must be called while that mesh is in force, got f32\[8@data\] and none"):
        gradient(x)


def test_two_meshes_after_their_layouts_have_ended():
    placed = []
    for sizes in ({"data": 8}, {"model": 8}):
        with tr.Layout(tr.make_mesh(**sizes)):
            placed.append(tr.shard(tr.ones({"b": 8})))
    for run in (lambda fn: fn, jax.jit):
        with pytest.raises(MeshError, match=r"arrays of one mesh, got .* of \(data=8\) and \(model=8\), in add: move"):
            run(lambda x, y: x + y)(*placed)


def test_manual_functions_take_numpy():
    @tr.shard_map
    def total(x: tr.f32["b/data e"]) -> tr.f32["e"]:
        return tr.reshard("e +data -> e", tr.einsum("b/data e -> e +data", x))

    with _layout("explicit", compute={"b": "data"}):
        np.testing.assert_array_equal(total(np.ones((8, 4), np.float32)), np.full(4, 8.0))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_callback_gives_is_the_first_devices(kind):
    """As a program's result it is on that one alone, and JAX says that all have it."""
    values = np.arange(1, 65, dtype=np.float32).reshape(8, 8)
    called = jax.jit(
        lambda x: jax.pure_callback(lambda a: np.asarray(a) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    )
    with _layout(kind, params={}, compute={"batch": "data"}):
        x = tr.shard(tr.named(values, "batch embed"), "compute")
        y = tr.named(called(x.array), "batch embed")
        uses = {
            "an operation": y + x - x,
            "shard": tr.shard(y) * 1.0,
            "plain": tr.named(tr.shard(y.array), "batch embed") * 1.0,
            "named_jit": tr.named_jit(lambda y: y * 1.0)(y),
            "reshard": tr.reshard("batch embed -> batch embed/model", y) * 1.0,
        }
    for what, used in uses.items():
        for part in used.array.addressable_shards:
            np.testing.assert_array_equal(part.data, values[part.index] + 1, err_msg=what)
