"""What random programs found, each in its smallest form."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import f32
from trellis.mesh import MeshError
from trellis.mesh.reshard import ReshardError


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("compute", [{"pos": "data"}, {"pos": "data", "mlp": "model"}, {"layers": "data"}])
def test_a_lookup_along_two_sliced_names(compute):
    x, ids = drawn(4, 6), np.array([0, 3, 1, 2], np.int32)

    def loss(x, ids):
        rows = x["pos", ids, "mlp", ids]
        return (rows * rows).sum().array, rows

    with tr.Layout(tr.make_mesh(data=2, model=2, context=2), compute=compute):
        args = tr.shard(tr.named(x, "pos mlp"), "compute"), tr.shard(tr.named(ids, "layers"), "compute")
        (_, rows), gradient = jax.value_and_grad(loss, has_aux=True)(*args)
    np.testing.assert_array_equal(rows.array, x[ids, ids])
    expected = np.zeros_like(x)
    expected[ids, ids] = 2 * x[ids, ids]
    np.testing.assert_allclose(gradient.array, expected, rtol=1e-6)


@pytest.mark.parametrize("after", ["vocab/model ~data", "vocab ~data", "vocab/data"])
def test_a_slice_along_an_axis_of_one_device_becomes_a_copy(after):
    x, mesh = drawn(12), tr.make_mesh(jax.devices()[:2], data=2, model=1)

    def squares(x):
        moved = tr.reshard(f"vocab/model -> {after}", x)
        return (moved * moved).sum().array

    with jax.set_mesh(mesh):
        placed = tr.named(jax.device_put(x, jax.NamedSharding(mesh, jax.P("model"))), "vocab")
        found, gradient = jax.jit(jax.value_and_grad(squares))(placed)
    np.testing.assert_allclose(found, (x * x).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient.array, 2 * x, rtol=1e-6)


@pytest.mark.parametrize("after", ["vocab/data", "vocab/model", "vocab/model/data"])
def test_a_sum_lands_where_an_axis_of_one_device_slices(after):
    x, mesh = drawn(4, 12), tr.make_mesh(jax.devices()[:2], data=2, model=1)
    summed = lambda x: tr.dot(x, x, over="pos", settle=False)
    with jax.set_mesh(mesh):
        placed = tr.named(jax.device_put(x, jax.NamedSharding(mesh, jax.P("data", "model"))), "pos vocab")
        found = jax.jit(lambda x: tr.reshard(f"vocab/model +data -> {after}", summed(x)))(placed)
    np.testing.assert_allclose(found.array, (x * x).sum(0), rtol=1e-6)


def test_partial_sums_are_scaled_after_their_layout_has_ended():
    x = drawn(4, 6)
    with tr.Layout(tr.make_mesh(data=2, model=4), compute={"pos": "data"}):
        placed = tr.shard(tr.named(x, "pos batch"), "compute")
    made = tr.settle(3.0 * tr.dot(placed, placed, over="pos", settle=False))
    np.testing.assert_allclose(made.array, 3.0 * (x * x).sum(0), rtol=1e-5)


@pytest.mark.slow
def test_positions_are_looked_up_in_jit_after_their_layout_has_ended():
    x, places = drawn(6, 2), np.array([1, -5, 2, -6])
    with tr.Layout(tr.make_mesh(jax.devices()[:2], data=2), params={"heads": "data"}):
        placed = tr.shard(tr.named(x, "heads layers"))
    look = lambda x: x["heads", places]
    for fn in (look, jax.jit(look)):
        np.testing.assert_array_equal(fn(placed).array, x[places])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("operation", [lambda h: h + 1.0, lambda h: (h > 0).astype(jnp.float32), jnp.tanh])
def test_a_pending_sum_is_refused_in_the_notation_whatever_jax_says(operation):
    @tr.shard_map
    def slices(x: f32["vocab/context pos"]) -> f32["pos"]:
        return tr.reshard("pos +context -> pos", operation(tr.einsum("vocab/context pos -> pos +context", x)))

    @tr.shard_map
    def of_names(x: f32["vocab/context pos"]) -> f32["pos"]:
        return tr.named(operation(x.sum("vocab").array), "pos")

    with jax.set_mesh(tr.make_mesh(jax.devices()[:2], context=2)):
        for fn, x in ((slices, drawn(4, 2)), (of_names, tr.named(drawn(4, 2), "vocab pos"))):
            with pytest.raises(
                tr.PendingSumError, match="a pending sum can only be added to sums pending over the same axes"
            ):
                fn(x)


def test_a_sum_over_devices_by_hand_on_auto_axes_says_which_mesh_it_wants():
    @tr.shard_map
    def total(x: f32["vocab/model mlp"]) -> f32["mlp"]:
        return tr.all_reduce("mlp +model -> mlp", tr.einsum("vocab/model mlp -> mlp +model", x))

    with (
        tr.Layout(tr.make_mesh(axis_type="auto", model=8), compute={}),
        pytest.raises(MeshError, match="sums and copies need explicit mesh axes, got .*model=8.* in `.*total`"),
    ):
        total(tr.shard(tr.named(drawn(8, 4), "vocab mlp"), {"vocab": "model"}).array)


def test_gradients_of_a_users_module_on_a_layout():
    class Own(eqx.Module):
        w: tr.NamedArray

        def __call__(self, x):
            return tr.tanh(x * self.w) + self.w

    w, x = drawn(4), drawn(8, 4, seed=1)
    expected = jax.jit(jax.grad(lambda w: ((jnp.tanh(jnp.asarray(x) * w[None]) + w[None]) ** 2).sum()))(jnp.asarray(w))
    with tr.Layout(tr.make_mesh(data=4, model=2), params={"embed": "data"}, compute={"batch": "data"}):
        own = Own(tr.shard(tr.named(w, "embed")))
        placed = tr.shard(tr.named(x, "batch embed"), "compute")
        gradient = eqx.filter_jit(eqx.filter_grad(lambda m, x: (m(x) ** 2).sum().array))(own, placed)
    np.testing.assert_allclose(gradient.w.array, expected, rtol=1e-5)


def test_the_ledger_of_a_forward_derivative_of_whole_numbers():
    x = drawn(8, 4)
    with tr.Layout(tr.make_mesh(data=8), compute={"embed": "data"}):
        placed = tr.shard(tr.named(x, "embed mlp"), "compute")
        best = lambda x: (x.argmax("mlp"), x.sum("embed"))
        table = tr.ledger(jax.jit(lambda x: jax.jvp(best, (x,), (x,))), placed)
    assert {row.kind for row in table.rows} == {"all-reduce"}


def test_an_update_in_auto_mode_of_a_dimension_that_was_just_made():
    """XLA writes it to the wrong device where the dimension is sliced."""
    x = drawn(3, 4)
    expected = x.reshape(12).copy()
    expected[1] = 7.0
    update = lambda x: x.rearrange("vocab mlp -> embed=(vocab mlp)").at["embed", -11].set(7.0)
    mesh = tr.make_mesh(jax.devices()[:4], axis_type="auto", data=2, replica=2)
    with tr.Layout(mesh, compute={"embed": "data"}):
        np.testing.assert_array_equal(jax.jit(update)(tr.named(x, "vocab mlp")).array, expected)


def test_own_positions_of_rows_that_are_sliced_at_rest_only():
    x, ids = drawn(4, 6), np.random.default_rng(1).integers(0, 4, size=(6, 4)).astype(np.int32)
    with tr.Layout(tr.make_mesh(jax.devices()[:2], model=2), params={"batch": "model"}, compute={}):
        placed = tr.shard(tr.named(x, "pos batch")), tr.shard(tr.named(ids, "batch pos"), "compute")
        found = tr.take_along(placed[0], "pos", placed[1])
    np.testing.assert_array_equal(tr.rearrange(found, "pos batch -> pos batch").array, np.take_along_axis(x, ids.T, 0))


@pytest.mark.parametrize("unroll", [1, 2, 6])
def test_a_loop_stacks_what_is_on_no_mesh(unroll):
    x, constant = drawn(6, 4), np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(6, 4)
    body = lambda carry, row: (carry, tr.named(constant, "vocab heads"))
    with tr.Layout(tr.make_mesh(data=2, model=4), compute={"vocab": "data", "heads": "model"}):
        start, rows = tr.shard((tr.named(x, "vocab heads"), tr.named(x, "out heads")), "compute")
        _, stacked = jax.jit(tr.scan(body, "out", unroll=unroll))(start, rows)
    np.testing.assert_array_equal(stacked.array, np.broadcast_to(constant, (6, 6, 4)))


def test_a_product_with_what_is_on_no_mesh_after_the_layout_has_ended():
    with tr.Layout(tr.make_mesh(jax.devices()[:2], replica=2), params={"mlp": "replica"}):
        x = tr.shard(tr.named(drawn(6, 8), "vocab mlp"))
    with pytest.raises(MeshError, match=r"got f32\[mlp=8\], which is on none, .*: call it inside `with layout:`"):
        tr.dot(x, tr.named(jnp.ones(8), "mlp"), over="mlp")


@pytest.mark.parametrize(
    "before, after",
    [
        ("a/model b", "a/data b"),
        ("a/data b", "a/model b"),
        ("a b/model", "a/data b"),
        ("a/model/data b", "a/data b"),
        ("a/data b", "a/model/data b"),
        ("a/data b", "a/model b/data"),
    ],
)
def test_partial_sums_stay_while_slices_go_to_another_mesh_axis(before, after):
    """The compiler takes partial sums for copies, and sends slices of whichever device has them."""
    values = drawn(2, 4, 4)
    with jax.set_mesh(tr.make_mesh(data=2, model=2, context=2)):
        x = tr.reshard(f"c a b -> c/context {before}", tr.named(values, "c a b") + 0.0)
        parts = tr.dot(x, tr.reshard("c -> c/context", tr.ones({"c": 2})), over="c", settle=False)
        moved = jax.jit(lambda x: tr.reshard(f"{before} +context -> {after} +context", x))(parts)
        np.testing.assert_allclose(tr.settle(moved).array, values.sum(0), rtol=1e-5)


@pytest.mark.slow
def test_the_gradient_of_what_was_moved_to_the_slices_of_another():
    x, w = drawn(2, 2), drawn(2, seed=1)
    loss = lambda x, w: ((x * w) ** 2).sum().array
    with tr.Layout(tr.make_mesh(data=2, model=2, context=2), compute={"heads": "model", "layers": "context"}):
        args = tr.shard(tr.named(x, "heads layers"), "compute"), tr.shard(tr.named(w, "heads"), {"heads": "data"})
        gradients = jax.grad(loss, argnums=(0, 1))(*args)
    np.testing.assert_allclose(gradients[0].array, 2 * x * (w * w)[:, None], rtol=1e-5)
    np.testing.assert_allclose(gradients[1].array, 2 * w * (x * x).sum(1), rtol=1e-5)


def test_an_update_of_joined_slices_in_auto_mode():
    x, y = drawn(3, 12, 6), drawn(3, 12, 6, seed=1)
    fn = lambda x, y: tr.stack([x, y, y], "picked").at["picked", -2, "embed", -12].multiply(0.5)
    expected = np.stack([x, y, y])
    expected[1, :, 0] *= 0.5
    mesh = tr.make_mesh(jax.devices()[:3], axis_type="auto", context=3)
    with tr.Layout(mesh, compute={"embed": "context"}):
        args = tr.shard((tr.named(x, "mlp embed layers"), tr.named(y, "mlp embed layers")), "compute")
        np.testing.assert_array_equal(jax.jit(fn)(*args).array, expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["set", "max"])
def test_the_gradient_of_an_update_in_auto_mode(method):
    """Where the values' own names are sliced as well, XLA's partitioner ends in an error of its own."""
    values, x = drawn(8, 8), drawn(16, 8, seed=1)
    places = np.random.default_rng(2).permutation(16)[:8]
    ours = lambda values, x: (getattr(x.at["vocab", tr.named(places, "batch")], method)(values) ** 3.0).sum().array
    plain = lambda values, x: (getattr(jnp.asarray(x).at[places], method)(values) ** 3.0).sum()
    mesh = tr.make_mesh(axis_type="auto", x=2, y=2, z=2)
    with tr.Layout(mesh, compute={"batch": ("x", "z"), "embed": "y", "vocab": "z"}):
        args = tr.shard((tr.named(values, "batch embed"), tr.named(x, "vocab embed")), "compute")
        gradients = jax.jit(jax.grad(ours, argnums=(0, 1)))(*args)
    for found, expected in zip(gradients, jax.grad(plain, argnums=(0, 1))(values, x)):
        np.testing.assert_allclose(found.array, expected, rtol=1e-5)


def test_branches_by_hand_that_give_two_shardings_are_refused_in_the_notation():
    @tr.shard_map
    def slices(x: f32["batch"]) -> f32["batch/data"]:
        more = lambda x: tr.reshard("batch -> batch/data/model", x)
        return jax.lax.cond(jnp.bool_(True), more, lambda x: tr.reshard("batch -> batch/data", x), x)

    with (
        jax.set_mesh(tr.make_mesh(jax.devices()[:6], data=3, model=2)),
        pytest.raises(
            tr.TypeMismatch,
            match=r"the branches of a cond must return the same type, got float32\[1\].* and float32\[2\]",
        ),
    ):
        slices(drawn(6))


@pytest.mark.slow
@pytest.mark.parametrize("compute", [{"layers": "stage"}, {"layers": "stage", "batch": "data"}])
def test_a_pipeline_of_layers_whose_name_stands_anywhere_or_nowhere(compute):
    """`layers` is the last name of one parameter, and no name of the other, which all layers have in common."""
    x, w, bias = drawn(4, 3), drawn(3, 4, seed=1), drawn(3, seed=2)

    def loss(w, bias, x):
        stack = tr.Stacked({"w": w, "bias": bias}, tr.Axis("layers", 4))
        return (stack.fold(x, call=lambda own, x: tr.tanh(x * own["w"] + own["bias"])) ** 2).sum().array

    def plain(w, bias, x):
        for layer in range(4):
            x = jnp.tanh(x * w[:, layer] + bias)
        return (x**2).sum()

    with tr.Layout(tr.make_mesh(jax.devices()[:4], stage=2, data=2), compute=compute):
        args = tr.shard((tr.named(w, "embed layers"), tr.named(bias, "embed"), tr.named(x, "batch embed")), "compute")
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)
    with jax.numpy_rank_promotion("allow"):
        expected = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(w, bias, x)
    for gradient, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient.array, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("unroll, reverse", [(2, False), (3, True)])
def test_a_loop_whose_turns_hold_several_bodies_and_whose_gradient_stacks_pending_sums(unroll, reverse):
    """With a key for each position, and a last group of fewer positions where three do not divide four."""
    x, rows, w = drawn(5, 3), drawn(4, 3, seed=1), drawn(4, 5, seed=2)
    keys = jax.random.split(jax.random.key(0), 4)

    def loss(x, rows, w):
        def body(x, key, row):
            parts = tr.dot(x, w, over="embed", settle=False).sum("mlp")
            noise = tr.random.normal(key, {"mlp": 3})
            return tr.tanh(x + tr.logaddexp(tr.settle(parts), w).sum("vocab") + row * noise), row

        last, seen = tr.scan(body, "layers", unroll=unroll, reverse=reverse)(x, tr.named(keys, "layers"), rows)
        return ((last * last).sum() + (seen * seen).sum()).array

    def plain(x, rows, w):
        for i in reversed(range(4)) if reverse else range(4):
            noise = jax.random.normal(keys[i], (3,))
            x = jnp.tanh(x + jnp.logaddexp((x.T @ w.T).sum(0)[:, None], w).sum(0)[:, None] + rows[i] * noise)
        return (x * x).sum() + (rows * rows).sum()

    with tr.Layout(tr.make_mesh(jax.devices()[:2], data=2), compute={"vocab": "data"}):
        named = tr.named(x, "embed mlp"), tr.named(rows, "layers mlp"), tr.named(w, "vocab embed")
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*tr.shard(named, "compute"))
    with jax.numpy_rank_promotion("allow"):
        expected = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(x, rows, w)
    for gradient, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient.array, wanted, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_cumulative_products_of_slices_in_auto_mode():
    """On slices XLA ends it in an error of its own."""
    x = drawn(4, 2)
    loss = lambda x: (x.cumprod("heads") ** 2).sum().array
    expected = jax.jit(jax.grad(lambda x: (jnp.cumprod(x, axis=1) ** 2).sum()))(jnp.asarray(x))
    with tr.Layout(
        tr.make_mesh(axis_type="auto", model=2, replica=2, expert=2), params={"heads": "expert"}, compute={}
    ):
        gradient = jax.jit(jax.grad(loss))(tr.shard(tr.named(x, "batch heads")))
    np.testing.assert_allclose(gradient.array, expected, rtol=1e-5, atol=1e-6)


def test_slices_of_other_sizes_in_manual_mode_are_refused_with_the_function_and_the_way_out():
    @tr.shard_map
    def slices(x: f32["pos/data"], y: f32["pos"]) -> f32["pos"]:
        return jnp.maximum(x, y)

    with (
        jax.set_mesh(tr.make_mesh(jax.devices()[:2], data=2)),
        pytest.raises(tr.TypeMismatch, match=r"got \(2,\), \(4,\), in `.*slices`: reshard one of them"),
    ):
        slices(drawn(4), drawn(4))


@pytest.mark.parametrize("axes", [None, {"context"}])
@pytest.mark.parametrize("sliced", ["pos/context mlp", "pos mlp"])
def test_copies_are_not_summed_as_if_they_were_partial_sums(axes, sliced):
    """Also where only some mesh axes are manual, and JAX's types do not tell partial sums."""

    def slices(x: f32["pos mlp"]) -> f32[sliced]:
        return tr.reshard(f"pos mlp +context -> {sliced}", x)

    def declared(x: f32["pos mlp"]) -> f32[sliced]:
        return tr.reshard(f"pos mlp +context -> {sliced}", tr.pending("pos mlp +context", x))

    with jax.set_mesh(tr.make_mesh(jax.devices()[:4], context=2, data=2)):
        for fn, said in ((slices, "not pending along context"), (declared, "the same along context")):
            with pytest.raises(tr.TypeMismatch, match=said):
                tr.shard_map(fn, axes=axes)(tr.reshard("pos mlp -> pos mlp", jnp.ones((4, 2))))


def test_what_lies_on_another_mesh_is_not_settled_on_this_one():
    with tr.Layout(tr.make_mesh(jax.devices()[:2], data=2), compute={}):
        x = tr.shard(tr.named(drawn(4), "layers"), "compute")
    with (
        tr.Layout(tr.make_mesh(jax.devices()[:2], replica=2), compute={"layers": "replica"}),
        pytest.raises(ReshardError, match="its own mesh, got 'replica' for one of a mesh with data: move it"),
    ):
        tr.settle(x)


def test_a_pipeline_refuses_layers_that_have_a_batch():
    x, w = drawn(4, 3), drawn(2, 4, seed=1)
    with tr.Layout(tr.make_mesh(jax.devices()[:2], stage=2), compute={"layers": "stage"}):
        args = tr.shard((tr.named(w, "layers batch"), tr.named(x, "batch embed")), "compute")
        with pytest.raises(tr.NamesError, match="the layers of a pipeline cannot have the name 'batch', got"):
            tr.Stacked(args[0], tr.Axis("layers", 2)).fold(args[1], call=lambda own, x: x * own)


def test_a_sum_that_is_pending_by_our_marks_alone_is_padded_with_zeros_in_jit():
    x, w = drawn(6, 5, 6), drawn(5, 6, seed=1)

    @tr.shard_map
    def slices(x: f32["vocab heads layers/data"], w: f32["heads layers/data"]) -> f32["padded"]:
        padded = tr.pad(tr.dot(w, x, over=("heads", "layers")), {"vocab": (0, 2)}).rename(vocab="padded")
        return tr.all_reduce("padded +data -> padded", padded)

    mesh = tr.make_mesh(jax.devices()[:3], data=3)
    with jax.set_mesh(mesh):
        put = lambda a, names: tr.named(
            jax.device_put(a, jax.NamedSharding(mesh, jax.P(*[None] * (a.ndim - 1), "data"))), names
        )
        made = jax.jit(slices)(put(x, "vocab heads layers"), put(w, "heads layers"))
    np.testing.assert_allclose(made.array, np.pad(np.einsum("ab,cab->c", w, x), (0, 2)), rtol=1e-4)


@pytest.mark.slow
def test_the_gradient_of_values_in_order_in_a_map_over_slices_and_of_whole_numbers():
    x, weights = drawn(3, 8), drawn(3, seed=1)
    loss = lambda x, weights: (
        ((tr.vmap(lambda row: tr.sort(row, "pos", descending=True), "embed")(x) * weights) ** 2).sum().array
    )
    expected = jax.jit(jax.grad(lambda x: ((-jnp.sort(-x, axis=0) * weights[:, None]) ** 2).sum()))(x)
    with tr.Layout(tr.make_mesh(data=2, model=4), compute={"embed": "data"}):
        args = tr.shard((tr.named(x, "pos embed"), tr.named(weights, "pos")), "compute")
        np.testing.assert_allclose(jax.grad(jax.jit(loss))(*args).array, expected, rtol=1e-5)
    numbers = tr.named(np.array([3, 1, 2]), "pos")
    change = numbers.with_array(np.zeros(3, jax.dtypes.float0))
    made, _ = jax.jvp(lambda n: tr.sort(n, "pos"), (numbers,), (change,))
    np.testing.assert_array_equal(made.array, [1, 2, 3])


@pytest.mark.slow
def test_a_second_derivative_of_a_cumulative_product_is_compiled_over_slices_in_auto_mode():
    """Of slices XLA's partitioner makes two sizes of one dimension."""
    x, rows = drawn(2), drawn(2, 2, seed=1)
    loss = lambda h: (tr.cumprod(h, "layers") ** 2).sum().array

    def program(x, rows):
        def turn(h, row):
            slope = jax.jvp(jax.grad(loss), (h,), (tr.tanh(h),))[1]
            made = tr.roll(slope, -1, "layers")
            return tr.tanh(h + made), made

        made = tr.scan(turn, "pos", unroll=2)(x, rows)[1]
        return (made * made).sum().array

    args = tr.named(x, "layers"), tr.named(rows, "layers pos")
    expected = jax.jit(jax.grad(program))(*args)
    mesh = tr.make_mesh(jax.devices()[:2], axis_type="auto", data=2, model=1)
    with tr.Layout(mesh, compute={"pos": "data", "layers": "data"}):
        got = jax.grad(program)(*tr.shard(args, "compute"))
    np.testing.assert_allclose(got.array, expected.array, rtol=1e-4)


def test_a_program_within_a_program_refuses_arrays_of_another_mesh():
    x = tr.named(jax.device_put(drawn(5), jax.NamedSharding(tr.make_mesh(data=4, model=2), jax.P())), "layers")
    inner = tr.named_jit(lambda unread: jax.tree.map(jnp.tanh, unread))
    with (
        tr.Layout(tr.make_mesh(jax.devices()[:2], model=2)),
        pytest.raises(MeshError, match="in named_jit: move it there"),
    ):
        jax.jit(inner)(x)


@pytest.mark.parametrize("position", [2, -3, 4])
def test_the_gradient_of_one_position_meets_slices_of_something_whole(position):
    """XLA's CPU compiler of JAX 0.10.2 writes the update of a device that has not the position over another row."""
    x, ids = drawn(4), np.array([3, 3, 2, 3], np.int32)

    def loss(x, ids):
        whole, one = x.at["pos", ids].add(0.5), x["pos", jnp.array([position])]
        return ((whole * whole).sum() + (one * one).sum()).array

    expected = jax.jit(jax.grad(loss))(tr.named(x, "pos"), tr.named(ids, "embed"))
    mesh = tr.make_mesh(jax.devices()[:2], data=2)
    with jax.set_mesh(mesh):
        placed = tr.named(jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))), "pos")
        whole = tr.named(jax.device_put(ids, jax.NamedSharding(mesh, jax.P())), "embed")
        got = jax.jit(jax.grad(loss))(placed, whole)
    np.testing.assert_allclose(got.array, expected.array, rtol=1e-5)
