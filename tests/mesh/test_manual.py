"""`shard_map` from annotations: what goes in and out, against one device's numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from trellis.mesh import all_gather, make_mesh, reshard
from trellis.mesh.manual.einsum import einsum_plain as einsum
from trellis.mesh.manual.shard_map import shard_map
from trellis.mesh.manual.shift import shift
from trellis.named import einsum as named_einsum
from trellis.named import named, tanh
from trellis.notation import (
    NotationError,
    PendingSumError,
    Stack,
    TypeMismatch,
    f32,
    i32,
    struct,
    struct_shapes,
    typeof,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(d=4, m=2, devices=jax.devices()[:8])


def put(mesh, shape, text, seed=0):
    """A random array, sliced as the text says."""
    where = struct_shapes(f32[text], {str(i): i for i in ()} | dict(zip(_names(text), shape, strict=True)), mesh)
    return jax.device_put(jax.random.normal(jax.random.key(seed), shape), where.sharding)


def _names(text):
    return [word.split("/")[0] for word in text.split() if word[0] not in "+~"]


@struct
class Weights:
    w1: f32["in hidden1/d"]
    w2: f32["hidden1 hidden2/d"]
    w3: f32["hidden2/d"]


@shard_map
def forward_pass(x: f32["batch/d in"], w: Weights) -> f32["batch/d"]:
    w1 = all_gather("in hidden1/d -> in hidden1 ~d", w.w1)
    y = jax.nn.relu(einsum("batch/d in, in hidden1 ~d -> batch/d hidden1", x, w1))
    w2 = all_gather("hidden1 hidden2/d -> hidden1 hidden2 ~d", w.w2)
    z = jax.nn.relu(einsum("batch/d hidden1, hidden1 hidden2 ~d -> batch/d hidden2", y, w2))
    w3 = all_gather("hidden2/d -> hidden2 ~d", w.w3)
    return einsum("batch/d hidden2, hidden2 ~d -> batch/d", z, w3)


@pytest.mark.slow
def test_the_published_fully_sharded_example():
    mesh = make_mesh(d=8)
    with jax.set_mesh(mesh):
        tree = struct_shapes(Weights, {"in": 8, "hidden1": 8, "hidden2": 8}, mesh)
        keys = iter(jax.random.split(jax.random.key(0), 3))
        w = jax.tree.map(lambda a: jax.device_put(jax.random.normal(next(keys), a.shape), a.sharding), tree)
        x = put(mesh, (32, 8), "batch/d in", 7)
        value, gradient = jax.jit(jax.value_and_grad(lambda w: jnp.sum(forward_pass(x, w) ** 2)))(w)
        assert typeof(forward_pass(x, w)) == "f32[32/d]"
        assert jax.tree.map(typeof, gradient) == jax.tree.map(typeof, w)
    h, v = jax.device_get(x), jax.device_get(w)

    def whole(w):
        return jnp.sum((jax.nn.relu(jax.nn.relu(h @ w.w1) @ w.w2) @ w.w3) ** 2)

    want, want_gradient = jax.jit(jax.value_and_grad(whole))(jax.tree.map(jnp.asarray, v))
    np.testing.assert_allclose(value, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient, want_gradient)


@struct
class Block:
    up: f32["embed/d hidden/m"]
    down: f32["hidden/m embed/d"]


@struct
class Net:
    layers: Stack["layers", Block]
    head: f32["embed/d"]


def net_program(x: f32["batch/d embed"], net: Net) -> f32["batch/d"]:
    @jax.checkpoint
    def layer(h, block: Block):
        up = all_gather("embed/d hidden/m -> embed hidden/m ~d", block.up)
        down = all_gather("hidden/m embed/d -> hidden/m embed ~d", block.down)
        copied = reshard("batch/d embed -> batch/d embed ~m", h)
        mid = jnp.tanh(einsum("batch/d embed ~m, embed hidden/m ~d -> batch/d hidden/m", copied, up))
        out = einsum("batch/d hidden/m, hidden/m embed ~d -> batch/d embed +m", mid, down)
        return h + reshard("batch/d embed +m -> batch/d embed", out), None

    h, _ = jax.lax.scan(layer, x, net.layers)
    head = all_gather("embed/d -> embed ~d", net.head)
    return einsum("batch/d embed, embed ~d -> batch/d", h, head)


@pytest.mark.slow
def test_a_scanned_checkpointed_network_and_its_gradient(mesh):
    with jax.set_mesh(mesh):
        tree = struct_shapes(Net, {"layers": 3, "embed": 8, "hidden": 16}, mesh)
        keys = iter(jax.random.split(jax.random.key(1), 3))
        net = jax.tree.map(lambda a: jax.device_put(jax.random.normal(next(keys), a.shape) * 0.3, a.sharding), tree)
        x = put(mesh, (8, 8), "batch/d embed", 2)
        program = shard_map(net_program)
        value = jnp.sum(program(x, net)) ** 2  # not compiled as one
        got = jax.jit(jax.grad(lambda net, x: jnp.sum(program(x, net)) ** 2, argnums=(0, 1)))(net, x)
        assert typeof(got[0].layers.up) == "f32[3 8/d 16/m]"

    def whole(net, x):
        for i in range(3):
            x = x + jnp.tanh(x @ net.layers.up[i]) @ net.layers.down[i]
        return jnp.sum(x @ net.head) ** 2

    whole_arrays = jax.tree.map(jnp.asarray, jax.device_get((net, x)))
    want_value, want = jax.jit(jax.value_and_grad(whole, argnums=(0, 1)))(*whole_arrays)
    np.testing.assert_allclose(value, want_value, rtol=1e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4), got, want)


@pytest.mark.slow
def test_a_gradient_taken_inside_is_summed_over_the_devices(mesh):
    @shard_map
    def loss_and_gradient(x: f32["batch/d embed"], w: f32["embed"]) -> tuple[f32[""], f32["embed"]]:
        def loss(w):
            copied = reshard("embed -> embed ~d", w)
            y = einsum("batch/d embed, embed ~d -> batch/d", x, copied)
            return jax.lax.psum(jnp.sum(y**2), "d")

        return jax.value_and_grad(loss)(w)

    with jax.set_mesh(mesh):
        x, w = put(mesh, (8, 4), "batch/d embed"), put(mesh, (4,), "embed", 1)
        loss, gradient = loss_and_gradient(x, w)
    x, w = jax.device_get((x, w))
    want = jax.jit(jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2)))(jnp.asarray(w))
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, want[1], rtol=1e-4)


@pytest.mark.slow
def test_named_arrays_carry_their_slices_inside_and_their_shardings_outside(mesh):
    seen = []

    @shard_map
    def program(x: f32["batch/d embed/m"], w: f32["embed/m out"]) -> f32["batch/d out"]:
        seen.extend([typeof(x), x.shape, x.array.shape])
        y = named_einsum("batch embed, embed out -> batch out", x, w, settle=False)
        seen.append(typeof(y))
        return reshard("batch/d out +m -> batch/d out", y)

    with jax.set_mesh(mesh):
        x = named(put(mesh, (8, 4), "batch/d embed/m"), "batch embed")
        w = named(put(mesh, (4, 6), "embed/m out", 1), "embed out")
        y = program(x, w)
    assert seen == ["f32[batch/d=8 embed/m=4]", {"batch": 8, "embed": 4}, (2, 2), "f32[batch/d=8 out=6 +m]"]
    assert typeof(y) == "f32[batch/d=8 out=6]"
    np.testing.assert_allclose(y.array, jax.device_get(x.array) @ jax.device_get(w.array), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"d": 8, "m": 1}, {"d": 1, "m": 8}], ids=str)
def test_named_arrays_where_an_axis_has_size_one(sizes):
    mesh = make_mesh(**sizes)

    @shard_map
    def program(x: f32["batch/d embed/m"], w: f32["embed/m out"]) -> f32["batch/d out/m"]:
        y = named_einsum("batch embed, embed out -> batch out", x, w, settle=False)
        return reshard("batch/d out +m -> batch/d out/m", y)

    with jax.set_mesh(mesh):
        x = named(put(mesh, (8, 16), "batch/d embed/m"), "batch embed")
        w = named(put(mesh, (16, 8), "embed/m out", 1), "embed out")
        y = program(x, w)
    np.testing.assert_allclose(y.array, jax.device_get(x.array) @ jax.device_get(w.array), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_containers_static_arguments_and_optional_arrays(mesh):
    @shard_map
    def program(
        xs: list[f32["batch/d embed"]], times: int, bias: f32["embed"] | None = None, *, net: Net
    ) -> dict[str, tuple[f32["batch/d embed"], f32[""] | None] | list[Net]]:
        total = jax.lax.psum(jnp.sum(xs[0]), "d")
        return {"a": (xs[0] * times, total), "b": (xs[1], None), "c": [net]}

    with jax.set_mesh(mesh):
        xs = [put(mesh, (8, 4), "batch/d embed", i) for i in range(2)]
        tree = struct_shapes(Net, {"layers": 3, "embed": 4, "hidden": 2}, mesh)
        net = jax.tree.map(lambda a: jax.device_put(jnp.ones(a.shape), a.sharding), tree)
        out = program(xs, 3, net=net)
    np.testing.assert_allclose(out["a"][0], 3 * np.asarray(xs[0]))
    np.testing.assert_allclose(out["a"][1], np.sum(xs[0]), rtol=1e-5)
    assert out["b"][1] is None
    assert jax.tree.map(typeof, out["c"][0]) == jax.tree.map(typeof, net)


@pytest.mark.slow
def test_leading_dimensions_and_integers(mesh):
    @shard_map
    def double(x: f32["... embed/m"], ids: i32["batch/d 2"]) -> tuple[f32["a b embed/m"], i32["batch/d 2"]]:
        return x * 2, ids + 1

    with jax.set_mesh(mesh):
        x = put(mesh, (2, 3, 4), "a b embed/m")
        ids = jax.device_put(
            jnp.arange(8, dtype=jnp.int32).reshape(4, 2), struct_shapes(i32["b/d 2"], {"b": 4}, mesh).sharding
        )
        y, more = double(x, ids)
    np.testing.assert_allclose(y, 2 * np.asarray(x))
    np.testing.assert_array_equal(more, np.arange(8).reshape(4, 2) + 1)


@pytest.mark.slow
def test_pending_sums_and_copies_pass_in_and_out(mesh):
    @shard_map
    def product(x: f32["batch/d in/m"], w: f32["in/m out ~d"]) -> f32["batch/d out +m"]:
        return einsum("batch/d in/m, in/m out ~d -> batch/d out +m", x, w)

    @shard_map
    def settle(y: f32["batch/d out +m"]) -> f32["batch/d out/m"]:
        return reshard("batch/d out +m -> batch/d out/m", y)

    with jax.set_mesh(mesh):
        x, w = put(mesh, (8, 4), "batch/d in/m"), put(mesh, (4, 6), "in/m out", 1)

        def both(x, w):
            copied = jax.reshard(w, jax.sharding.PartitionSpec("m", None, reduced={"d"}))
            y = product(x, copied)
            return settle(y), typeof(y)

        y, kind = both(x, w)
        gradient = jax.grad(lambda w: jnp.sum(both(x, w)[0] ** 2))(w)
    assert kind == "f32[8/d 6 +m]"
    x, w = jax.device_get((x, w))
    np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, 2 * x.T @ (x @ w), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_shift_passes_slices_around_the_ring(mesh):
    @shard_map
    def ring(x: f32["batch/d embed"]) -> f32["batch/d embed"]:
        return shift("batch/d embed", x, "d", by=1)

    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    with jax.set_mesh(mesh):
        x = jax.device_put(whole, struct_shapes(f32["b/d e"], {"b": 8, "e": 4}, mesh).sharding)
        np.testing.assert_array_equal(ring(x), np.roll(whole, 2, axis=0))
        gradient = jax.grad(lambda y: jnp.sum(ring(y) * x))(x)
    np.testing.assert_array_equal(gradient, np.roll(whole, -2, axis=0))


def test_the_mesh_may_be_given_or_found_on_the_arguments(mesh):
    def double(x: f32["batch/d embed"]) -> f32["batch/d embed"]:
        return x * 2

    x = put(mesh, (8, 4), "batch/d embed")
    np.testing.assert_allclose(shard_map(double, mesh=mesh)(x), 2 * np.asarray(x))
    np.testing.assert_allclose(shard_map(double)(x), 2 * np.asarray(x))


def test_a_sliced_dimension_that_is_scanned_or_mapped_away(mesh):
    def row(x, w):
        wide = reshard("embed -> embed ~m", x)
        out = einsum("embed ~m, embed hidden/m -> hidden/m", wide, w)
        return reshard("+m -> ", einsum("hidden/m, hidden/m -> +m", out, out))

    @shard_map
    def scanned(x: f32["batch/d embed"], w: f32["embed hidden/m"]) -> f32["batch/d"]:
        return jax.lax.scan(lambda _, x: (None, row(x, w)), None, x)[1]

    @shard_map
    def forgets(x: f32["batch/d embed"], w: f32["embed hidden/m"]) -> f32[""]:
        return jax.lax.scan(lambda _, x: (None, row(x, w)), None, x)[1][0]

    with jax.set_mesh(mesh):
        x, w = put(mesh, (8, 4), "batch/d embed"), put(mesh, (4, 6), "embed hidden/m", 1)
        np.testing.assert_allclose(scanned(x, w), np.sum((np.asarray(x) @ np.asarray(w)) ** 2, 1), rtol=1e-4)
        with pytest.raises(TypeMismatch, match="which differs along d, for '', in result of `"):
            forgets(x, w)


def test_no_mesh():
    def double(x: f32["batch/d embed"]) -> f32["batch/d embed"]:
        return x * 2

    message = (
        "manual mode needs a mesh, got none, in `double`: call it inside `with layout:`, or write shard_map(mesh=...)"
    )
    with pytest.raises(NotationError, match=re.escape(message)):
        shard_map(double)(jnp.ones((8, 4)))


def test_auto_mode_around_a_manual_function():
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)

    @shard_map
    def total(x: f32["batch/d embed"]) -> f32["embed"]:
        return jax.lax.psum(jnp.sum(x, 0), "d")

    with jax.set_mesh(mesh):
        x = jnp.arange(32, dtype=jnp.float32).reshape(8, 4)
        np.testing.assert_allclose(jax.jit(total)(x), np.asarray(x).sum(0))


@pytest.mark.slow
def test_an_axis_of_size_one_needs_no_other_program():
    mesh = make_mesh(d=8, m=1)
    with jax.set_mesh(mesh):
        tree = struct_shapes(Net, {"layers": 3, "embed": 8, "hidden": 16}, mesh)
        net = jax.tree.map(lambda a: jax.device_put(jnp.full(a.shape, 0.1), a.sharding), tree)
        x = put(mesh, (8, 8), "batch/d embed", 2)
        y = shard_map(net_program)(x, net)
    h = np.asarray(x)
    for _ in range(3):
        h = h + np.tanh(h @ np.full((8, 16), 0.1)) @ np.full((16, 8), 0.1)
    np.testing.assert_allclose(y, h @ np.full(8, 0.1), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_collectives_of_jaxs_own_along_an_axis_of_one_device(size):
    """A loop begins with the type that it goes on with, and a sum is over both axes, as on more devices."""

    @shard_map
    def program(x: f32["batch/r in/d"], w: f32["layers in/d out"]) -> f32["batch/r"]:
        def turn(carry, w):
            total, x = carry
            x = jax.lax.ppermute(x, "r", [(i, (i + 1) % size) for i in range(size)])
            return (total + einsum("batch/r in/d, in/d out -> batch/r out +d", x, w), x), None

        zeros = reshard("batch out -> batch/r out +d", jnp.zeros((size * x.shape[0], w.shape[2])))
        (total, x), _ = jax.lax.scan(turn, (zeros, x), w)
        total = reshard("batch/r out +d -> batch/r out", total).sum(1) + jax.lax.psum(x, ("r", "d")).sum()
        return jax.lax.fori_loop(0, 2, lambda _, c: jnp.sin(c) + reshard("b/r -> b", c).sum(), total)

    def whole(x, w):
        moved = [jnp.roll(x, i * len(x) // size, 0) for i in (1, 2)]
        c = sum(x @ one for x, one in zip(moved, w)).sum(1) + x.sum()
        return jnp.sin(c2 := jnp.sin(c) + c.sum()) + c2.sum()

    with jax.set_mesh(mesh := make_mesh(jax.devices()[: 2 * size], d=2, r=size)):
        arrays = put(mesh, (4, 4), "batch/r in/d"), put(mesh, (2, 4, 3), "layers in/d out", 1)
        got = jax.jit(jax.value_and_grad(lambda *arrays: jnp.cos(program(*arrays)).sum(), argnums=(0, 1)))(*arrays)
    want = jax.jit(jax.value_and_grad(lambda *arrays: jnp.cos(whole(*arrays)).sum(), argnums=(0, 1)))(
        *jax.device_get(arrays)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), got, want)


def test_einsum_of_plain_arrays_in_explicit_mode(mesh):
    with jax.set_mesh(mesh):
        x, w = put(mesh, (8, 4), "batch/d in/m"), put(mesh, (4, 6), "in/m out", 1)
        y = jax.jit(lambda x, w: einsum("batch/d in/m, in/m out -> batch/d out +m", x, w))(x, w)
        assert typeof(y) == "f32[8/d 6 +m]"
        y = reshard("batch/d out +m -> batch/d out/m", y)
    np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(w), rtol=1e-5, atol=1e-5)


def test_einsum_without_a_mesh():
    x, w = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    np.testing.assert_allclose(
        einsum("batch/d in/m, in/m out -> batch/d out +m", jnp.asarray(x), jnp.asarray(w)), x @ w
    )


# Some mesh axes left to the surrounding program.


def mlp(x: f32["batch/d embed"], up: f32["embed hidden/m"], down: f32["hidden/m embed"]) -> f32["batch/d embed"]:
    copied = reshard("batch/d embed -> batch/d embed ~m", x)
    mid = jnp.tanh(einsum("batch/d embed ~m, embed hidden/m -> batch/d hidden/m", copied, up))
    out = einsum("batch/d hidden/m, hidden/m embed -> batch/d embed +m", mid, down)
    return reshard("batch/d embed +m -> batch/d embed", out)


def scattered(
    x: f32["batch/d embed/m"], up: f32["embed hidden/m"], down: f32["hidden/m embed"]
) -> f32["batch/d embed/m"]:
    gathered = all_gather("batch/d embed/m -> batch/d embed ~m", x)
    mid = jnp.tanh(einsum("batch/d embed ~m, embed hidden/m -> batch/d hidden/m", gathered, up))
    out = einsum("batch/d hidden/m, hidden/m embed -> batch/d embed +m", mid, down)
    return reshard("batch/d embed +m -> batch/d embed/m", out)


@pytest.mark.slow
def test_named_arrays_with_axes_left(mesh):
    def program(
        x: f32["batch/d embed"], up: f32["embed hidden/m"], down: f32["hidden/m embed"]
    ) -> f32["batch/d embed"]:
        mid = named_einsum("batch embed, embed hidden -> batch hidden", x, up)
        out = named_einsum("batch hidden, hidden embed -> batch embed", tanh(mid), down, settle=False)
        return out if forget else reshard("batch/d embed +m -> batch/d embed", out)

    with jax.set_mesh(mesh):
        x = named(put(mesh, (8, 8), "batch/d embed"), "batch embed")
        up = named(put(mesh, (8, 16), "embed hidden/m", 1), "embed hidden")
        down = named(put(mesh, (16, 8), "hidden/m embed", 2), "hidden embed")
        forget = False
        y = jax.jit(shard_map(program, axes={"m"}))(x, up, down)
        forget = True
        with pytest.raises(PendingSumError, match="got a sum pending along m for f32\\[batch/d embed\\], in result of"):
            shard_map(program, axes={"m"})(x, up, down)
    x, up, down = (np.asarray(a.array) for a in (x, up, down))
    np.testing.assert_allclose(y.array, np.tanh(x @ up) @ down, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("program", [mlp, scattered])
@pytest.mark.parametrize("axes", [{"m"}, {"d", "m"}])
def test_axes_left_to_an_explicit_program(mesh, program, axes):
    with jax.set_mesh(mesh):
        x = put(mesh, (8, 8), "batch/d embed" + ("/m" if program is scattered else ""))
        up, down = put(mesh, (8, 16), "embed hidden/m", 1), put(mesh, (16, 8), "hidden/m embed", 2)
        mapped = shard_map(program, axes=axes)

        def loss(x, up, down):
            return jnp.sum(mapped(x, up, down) ** 2)

        value, got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, up, down)
        assert [typeof(g) for g in got] == [typeof(a) for a in (x, up, down)]

    def whole(x, up, down):
        return jnp.sum((jnp.tanh(x @ up) @ down) ** 2)

    arrays = tuple(map(jnp.asarray, jax.device_get((x, up, down))))
    want_value, want = jax.jit(jax.value_and_grad(whole, argnums=(0, 1, 2)))(*arrays)
    np.testing.assert_allclose(value, want_value, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), got, want)


@pytest.mark.slow
@pytest.mark.parametrize("run", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
def test_a_manual_function_inside_a_manual_function(mesh, run):
    @shard_map(axes={"d"})
    def outer(x: f32["batch/d embed"], up: f32["embed hidden/m"], down: f32["hidden/m embed"]) -> f32["batch/d embed"]:
        return shard_map(mlp, axes={"m"})(x, up, down)

    with jax.set_mesh(mesh):
        arrays = put(mesh, (8, 8), "b/d e"), put(mesh, (8, 16), "e h/m", 1), put(mesh, (16, 8), "h/m e", 2)
        y, pull = jax.vjp(run(outer), *arrays)
        gradients = jax.jit(pull)(jnp.cos(y))
    x, up, down = map(jnp.asarray, jax.device_get(arrays))
    want, pull = jax.vjp(lambda x, up, down: jnp.tanh(x @ up) @ down, x, up, down)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), gradients, pull(jnp.cos(want)))


def test_slices_that_an_inner_function_leaves_are_summed_around_it(mesh):
    @shard_map(axes={"m"})
    def inner(x: f32["batch/d in/m"]) -> f32["batch/d in/m"]:
        return jnp.sin(x)

    @shard_map(axes={"d"})
    def outer(x: f32["batch/d in/m"]) -> f32["batch/d"]:
        return inner(x).sum(1) + jax.grad(lambda x: (inner(x) ** 2).sum())(x).sum(1)

    with jax.set_mesh(mesh):
        x = put(mesh, (8, 4), "batch/d in/m")
        np.testing.assert_allclose(
            jax.jit(outer)(x), (np.sin(x) + np.sin(2 * np.asarray(x))).sum(1), rtol=1e-4, atol=1e-4
        )


def test_pending_sums_add_up_over_a_scan_with_axes_left(mesh):
    @shard_map(axes={"m"})
    def program(x: f32["batch/d in/m"], w: f32["in/m out"]) -> f32["batch/d out"]:
        y = einsum("batch/d in/m, in/m out -> batch/d out +m", x, w)
        total, _ = jax.lax.scan(lambda total, _: (total + y, None), y, None, length=2)
        return reshard("batch/d out +m -> batch/d out", total)

    with jax.set_mesh(mesh):
        x, w = put(mesh, (8, 4), "batch/d in/m"), put(mesh, (4, 6), "in/m out", 1)
        y = jax.jit(program)(x, w)
    np.testing.assert_allclose(y, 3 * np.asarray(x) @ np.asarray(w), rtol=1e-4, atol=1e-4)
