"""No operation that is not linear takes a pending sum, and none sums twice what is settled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import trellis as tr
from trellis.mesh.manual.reshard import TransitionError
from trellis.notation import PendingSumError


def _pending_by_name():
    x, w = tr.shard((tr.ones({"b": 2, "e": 16}), tr.ones({"e": 16, "o": 3})), "compute")
    return tr.dot(x, w, over="e", settle=False)


NOT_LINEAR = {
    "pad with fives": lambda y: tr.pad(y, {"o": (1, 1)}, value=5.0),
    "add one": lambda y: y + 1,
    "sort": lambda y: tr.sort(y, "o"),
    "max": lambda y: y.max("o"),
    "argmax": lambda y: tr.argmax(y, "o"),
    "exp": lambda y: tr.exp(y),
    "square": lambda y: y * y,
    "integers": lambda y: y.astype(jnp.int32),
    "where": lambda y: tr.where(y.rename(o="p")["p", 0] * 0 == 0, y["o", 0], 0.0),
    "divide by itself": lambda y: 1 / y,
    "compare": lambda y: y > 1,
    "concatenate": lambda y: tr.concatenate([y, tr.ones({"b": 2, "o": 3})], "o"),
    "cumprod": lambda y: tr.cumprod(y, "o"),
    "softmax": lambda y: tr.softmax(y, "o"),
    "set": lambda y: y.at["o", 0].set(1.0),
    "seen": lambda y: np.asarray(y),
    "indices": lambda y: tr.take(tr.ones({"v": 4}), "v", y),
    "vmap": lambda y: tr.vmap(lambda r: tr.exp(r), "b")(y),
}


@pytest.mark.parametrize("what", NOT_LINEAR)
@pytest.mark.parametrize("jit", [False, True])
def test_refused_by_name(what, jit):
    with tr.Layout(tr.make_mesh(m=8), compute={"e": "m"}):
        f = lambda: NOT_LINEAR[what](_pending_by_name())
        with pytest.raises(PendingSumError, match=r"\+m"):
            jax.jit(f)() if jit else f()


LINEAR = {
    "pad with zeros": (lambda y: tr.pad(y, {"o": (1, 1)}), [0, 16, 16, 16, 0]),
    "add": (lambda y: y + y, [32] * 3),
    "subtract": (lambda y: y - y, [0] * 3),
    "negate": (lambda y: -y, [-16] * 3),
    "by a number": (lambda y: y * 2.0, [32] * 3),
    "over a number": (lambda y: y / 2.0, [8] * 3),
    "to bfloat16": (lambda y: y.astype(jnp.bfloat16), [16] * 3),
}


@pytest.mark.parametrize("what", LINEAR)
def test_linear_operations_carry_the_sum_on(what):
    f, expected = LINEAR[what]
    with tr.Layout(tr.make_mesh(m=8), compute={"e": "m"}):
        y = f(_pending_by_name())
        assert "+m" in tr.typeof(y)
        np.testing.assert_array_equal(np.asarray(tr.settle(y))[0].astype(np.float32), expected)


def _manual(then, result="b o"):
    def program(x: tr.f32["b e/m"], w: tr.f32["e/m o"]) -> None:
        return then(tr.einsum("b e/m, e/m o -> b o +m", x, w))

    program.__annotations__["return"] = tr.f32[result]
    with tr.Layout(tr.make_mesh(m=8)):
        return tr.shard_map(program)(np.ones((2, 16), np.float32), np.ones((16, 3), np.float32))


def _settled(y):
    return tr.reshard("b o +m -> b o", y)


PLAIN = {
    "jnp.pad with fives": lambda y: jnp.pad(y, ((0, 0), (1, 1)), constant_values=5.0)[:, 1:4],
    "jnp.sort": lambda y: jnp.sort(y, -1),
    "jnp.exp": jnp.exp,
    "jnp.where": lambda y: jnp.where(jnp.ones_like(y, dtype=bool), y, 1.0),
    "jnp.cumsum, maximum": lambda y: jnp.maximum(y, 0.0),
    "jnp.argmax": lambda y: jnp.argmax(y, -1, keepdims=True) + jnp.zeros((2, 3), jnp.int32),
    "int cast": lambda y: y.astype(jnp.int32).astype(jnp.float32),
    "top_k": lambda y: jax.lax.top_k(y, 3)[0],
    "square": lambda y: y * y,
    "concatenate": lambda y: jnp.concatenate([y[:, :1], jnp.ones((2, 2))], 1),
    "under jit": jax.jit(lambda y: jnp.sort(y, -1)),
    "under checkpoint": jax.checkpoint(lambda y: jnp.tanh(y)),
    "in a scan": lambda y: jax.lax.scan(lambda c, _: (jnp.tanh(c), None), y, None, length=2)[0],
    "in a cond": lambda y: jax.lax.cond(True, jnp.sin, jnp.cos, y),
}


@pytest.mark.parametrize("what", PLAIN)
def test_plain_operations_of_manual_mode_are_held_too(what):
    """JAX forgets the sum of some: then the text that settles it says so."""
    told = "a pending sum can only be added to sums pending over the same axes|which is not pending along m"
    with pytest.raises((PendingSumError, TransitionError), match=told):
        _manual(lambda y: _settled(PLAIN[what](y)))


def test_nothing_is_summed_twice():
    with pytest.raises(PendingSumError, match="of a value that was summed over it already.*leave the second sum out"):
        _manual(lambda y: jax.lax.psum(tr.all_reduce("b o +m -> b o", y), "m"))
    np.testing.assert_array_equal(_manual(_settled), np.full((2, 3), 16.0))


SAME = {
    "of a sum, in a loop": lambda y, x: jax.lax.scan(lambda c, _: (jax.lax.psum(c, "m"), None), _settled(y), None, 1)[
        0
    ],
    "of what was gathered": lambda y, x: (
        jax.lax.psum(tr.all_gather("b e/m -> b e", x).sum(-1), "m")[:, None] + _settled(y)
    ),
    "over another axis": lambda y, x: jax.lax.psum(_settled(y), "d"),
    "of a whole argument's": lambda y, x: _settled(y) + jax.lax.psum(jnp.tanh(x), "d").sum(),
    "that is scattered": lambda y, x: (
        tr.all_gather("e/m -> e", jax.lax.psum_scatter(tr.all_gather("b e/m -> b e", x)[0], "m", tiled=True))[None, :3]
        + _settled(y)
    ),
    "of what was gathered, and a number": lambda y, x: (
        jax.lax.psum(2 * jax.lax.all_gather(x, "m", axis=1, tiled=True) + 1, "m")[:, :3] + _settled(y)
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_a_sum_is_of_values_that_differ(what):
    with pytest.raises(
        PendingSumError, match="of a value that (is the same on all devices along it|was summed over it)"
    ):
        _on_two_axes(SAME[what])


@pytest.mark.slow
def test_a_mean_of_what_is_the_same_is_the_same_and_a_constant_s_sum_counts_devices():
    mean = lambda y, x: jax.lax.pmean(_settled(y), "d") * jax.lax.psum(1.0, "d")
    np.testing.assert_array_equal(_on_two_axes(mean), np.full((2, 3), 32.0))
    with pytest.raises(PendingSumError, match="summed over it already"):
        _on_two_axes(lambda y, x: jax.lax.pmean(_settled(y), "m"))
    counted = lambda y, x: _settled(y) * jax.lax.psum(jnp.ones((2, 1)), "d")
    np.testing.assert_array_equal(_on_two_axes(counted), np.full((2, 3), 32.0))


def _on_two_axes(then):
    """Of a product's pending sum and its first factor, on a mesh with an axis along which all is the same."""

    @tr.shard_map
    def program(x: tr.f32["b e/m"], w: tr.f32["e/m o"]) -> tr.f32["b o"]:
        return then(tr.einsum("b e/m, e/m o -> b o +m", x, w), x)

    with tr.Layout(tr.make_mesh(d=2, m=4)):
        return program(np.ones((2, 16), np.float32), np.ones((16, 3), np.float32))


@pytest.mark.slow
def test_linear_plain_operations_carry_the_sum_on():
    out = _manual(lambda y: tr.reshard("b q +m -> b q", jax.lax.pad(y.T.T + y, 0.0, ((0, 0, 0), (1, 1, 0)))), "b q")
    np.testing.assert_array_equal(out[0], [0, 32, 32, 32, 0])


@pytest.mark.slow
def test_settle_sums_in_manual_mode_too():
    """By name: over the devices along which a sum is pending, and along no others."""
    layout = tr.Layout(tr.make_mesh(d=2, m=4))

    @tr.shard_map
    def program(x: tr.f32["b/d e/m"], w: tr.f32["e/m o"]) -> tr.f32["b/d o"]:
        y = tr.einsum("b e, e o -> b o", x, w)
        assert tr.typeof(y) == "f32[b/d=2 o=3 +m]"
        return tr.exp(tr.settle(y) - 16.0)

    with layout:
        x, w = (tr.ones([tr.Axis(*axis) for axis in each]) for each in ((("b", 2), ("e", 16)), (("e", 16), ("o", 3))))
        x, w = tr.reshard("b e -> b/d e/m", x), tr.reshard("e o -> e/m o", w)
        found = tr.ledger(program, x, w)
        assert [(row.kind, *row.axes) for row in found] == [("all-reduce", "m")]
        np.testing.assert_array_equal(np.asarray(program(x, w)), np.ones((2, 3), np.float32))


SUMMED = {
    "what a callback gives": lambda y, x: jax.pure_callback(np.sum, jax.ShapeDtypeStruct((), x.dtype), x),
    "an order": lambda y, x: jnp.argsort(x[0]).sum().astype(x.dtype),
    "a choice": lambda y, x: jax.lax.cond(jax.lax.axis_index("m") > 1, lambda: 1.0, lambda: 2.0),
    "a choice in a loop": lambda y, x: jax.lax.fori_loop(
        0, 2, lambda i, c: c + jax.lax.cond(jax.lax.axis_index("m") > 1, lambda: 1.0, lambda: 2.0), 0.0
    ),
}


@pytest.mark.parametrize("what", SUMMED)
def test_what_differs_though_its_type_says_that_it_is_the_same_is_summed(what):
    """JAX types these as the same on all devices."""
    made = _on_two_axes(lambda y, x: _settled(y) * 0 + jax.lax.psum(SUMMED[what](y, x), "m"))
    one = {"what a callback gives": 32.0, "an order": 24.0, "a choice": 6.0, "a choice in a loop": 12.0}
    np.testing.assert_array_equal(made, np.full((2, 3), one[what]))


CHOSEN = {
    "a branch": lambda first, w: jax.lax.cond(first, jnp.negative, jnp.abs, w),
    "the turns of a loop": lambda first, w: jax.lax.while_loop(
        lambda c: c[0], lambda c: (c[0] & False, -w), (first, w)
    )[1],
}


@pytest.mark.parametrize("what", CHOSEN)
def test_what_each_device_chooses_of_what_is_the_same_differs_and_is_summed(what):
    @tr.shard_map(mesh=tr.make_mesh(d=8))
    def program(w: tr.f32["e"]) -> tr.f32["e"]:
        own = jax.lax.pcast(w, ("d",), to="varying")
        return jax.lax.psum(CHOSEN[what](jax.lax.axis_index("d") == 0, own), "d")

    np.testing.assert_array_equal(program(np.ones(3, np.float32)), np.full(3, 6.0))


def test_a_mean_of_a_gradient_that_the_types_have_summed_is_refused():
    """Data parallel as it is written elsewhere: it would be as many times too large as there are devices."""

    @tr.shard_map
    def gradient(x: tr.f32["batch/d e"], w: tr.f32["e"]) -> tr.f32["e"]:
        return jax.lax.pmean(jax.grad(lambda w: ((x @ w) ** 2).mean())(w), "d")

    with tr.Layout(tr.make_mesh(d=8)), pytest.raises(PendingSumError, match="summed over it already"):
        gradient(np.ones((8, 4), np.float32), np.ones(4, np.float32))


@pytest.mark.parametrize("scatter", ["tr.reduce_scatter", "jax.lax.psum_scatter"])
def test_slices_of_a_sum_differ_and_their_squares_are_summed(scatter):
    """The norm of gradients of which each device holds a slice, as sharded optimizers clip by it."""

    @tr.shard_map
    def norm(x: tr.f32["batch/d e"]) -> tr.f32[""]:
        parts = x.sum(0)
        if scatter == "tr.reduce_scatter":
            mine = tr.reduce_scatter("e +d -> e/d", tr.einsum("batch/d e -> e +d", x))
        else:
            mine = jax.lax.psum_scatter(parts, "d", tiled=True)
        return jnp.sqrt(jax.lax.psum((mine**2).sum(), "d"))

    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    with tr.Layout(tr.make_mesh(d=8)):
        np.testing.assert_allclose(norm(x), np.linalg.norm(x.sum(0)), rtol=1e-6)
        with pytest.raises(PendingSumError, match="summed over it already"):
            _norm_of_a_gathered_sum(x)


@tr.shard_map
def _norm_of_a_gathered_sum(x: tr.f32["batch/d e"]) -> tr.f32[""]:
    whole = tr.all_reduce("e +d -> e", tr.einsum("batch/d e -> e +d", x))
    return jnp.sqrt(jax.lax.psum((whole**2).sum(), "d"))


@pytest.mark.parametrize("join", [jnp.concatenate, jnp.stack, lambda parts: ravel_pytree({"a": parts})[0]])
def test_a_sum_of_parts_of_which_one_is_summed_is_refused(join):
    """The gradient of what all devices hold is summed by JAX's types, that of what each has for itself is not."""

    @tr.shard_map(mesh=tr.make_mesh(d=8))
    def gradients(x: tr.f32["batch/d in"], w: tr.f32["in"]) -> tr.f32["in"]:
        gradient = jax.grad(lambda w: jnp.sin(x @ w).sum())
        own = gradient(jax.lax.pcast(w, ("d",), to="varying"))
        return over(join([gradient(w), own])).reshape(2, -1)[1]

    x, w = np.ones((8, 2), np.float32), np.ones(2, np.float32)
    over = lambda parts: jax.lax.psum(parts, "d")
    with pytest.raises(
        PendingSumError, match="summed over it already in a part, and is joined.*: sum the others alone"
    ):
        gradients(x, w)
    over = lambda parts: jax.lax.pmean(parts, "d")  # is right for a part that is already the mean
    np.testing.assert_allclose(gradients(x, w), np.full(2, np.cos(2.0)), rtol=1e-6)
    over = lambda parts: jax.lax.psum(jnp.where(jax.lax.axis_index("d") == 0, parts, 0), "d")
    np.testing.assert_allclose(gradients(x, w), np.full(2, np.cos(2.0)), rtol=1e-6)
