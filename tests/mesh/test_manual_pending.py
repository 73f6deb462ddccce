"""A pending sum is settled, or only added: everything else is refused while tracing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trellis.mesh import all_gather, make_mesh, reshard
from trellis.mesh.manual.einsum import einsum_plain as einsum
from trellis.mesh.manual.shard_map import shard_map
from trellis.named.grad import grad
from trellis.notation import NotationError, PendingSumError, TypeMismatch, f32, struct_shapes


@pytest.fixture(scope="module", autouse=True)
def mesh():
    mesh = make_mesh(d=4, m=2)
    with jax.set_mesh(mesh):
        yield mesh


def put(shape, text):
    names = [word.split("/")[0] for word in text.split()]
    return jax.device_put(
        jnp.ones(shape), struct_shapes(f32[text], dict(zip(names, shape)), make_mesh(d=4, m=2)).sharding
    )


def product(then, result="batch/d out", axes=None):
    """A product whose pending sum is handed to `then`."""

    def program(x: f32["batch/d in/m"], w: f32["in/m out"]) -> None:
        return then(einsum("batch/d in/m, in/m out -> batch/d out +m", x, w))

    program.__annotations__["return"] = f32[result]
    program.__qualname__ = "program"
    return shard_map(program, axes=axes)(put((8, 4), "batch/d in/m"), put((4, 6), "in/m out"))


def refuses(error, message, fn, *args, **kwargs):
    with pytest.raises(error, match=re.escape(message)):
        fn(*args, **kwargs)


def test_a_forgotten_reshard_at_the_end():
    refuses(
        PendingSumError,
        "a result must match its annotation, got a sum pending along m for f32[batch/d out], in result of `program`: "
        'end the function with reshard("batch/d out +m -> batch/d out", ...), or annotate f32[batch/d out +m]',
        product,
        lambda y: y,
    )


NONLINEAR = {
    # What JAX refuses on its own, in its own words ...
    "max": jax.nn.relu,
    "exp": jnp.exp,
    "mul": lambda y: y * y,
    "add": lambda y: y + jnp.ones_like(y),
    "abs": jnp.abs,
    "gt": lambda y: y > 0,
    "dot_general": lambda y: y @ jnp.ones((6, 2)),
    # ... and what it takes for the whole sum without a word.
    "reduce_max": lambda y: jnp.max(y, 0),
    "cumsum": lambda y: jnp.cumsum(y, 1),
    "gather": lambda y: y[:, jnp.array([1, 0])],
    "select_n": lambda y: jnp.where(jnp.ones(y.shape, bool), y, 0.0),
    "argmax": lambda y: jnp.argmax(y, 1),
    "reduce": lambda y: jax.lax.reduce(y, jnp.float32(1), lambda a, b: a * b + a, (0,)),
    "scatter": lambda y: y.at[:, 0].set(1.0),
    "convert_element_type": lambda y: y.astype(jnp.int32),
    # ... and where it counts once for each device what another operand holds whole.
    "stack": lambda y: jnp.stack([y, jnp.ones_like(y) + 1])[0],
}
JOINED = {
    "select_n": lambda y, other: jnp.where(np.arange(6) % 2 == 0, y, other),
    "a select of its own": lambda y, other: jax.lax.select(np.ones(y.shape) > 0, y, other),
    "several": lambda y, other: jnp.select([np.arange(6) % 2 == 0], [y], other),
    "stack": lambda y, other: jnp.stack([y, other]).sum(0),
    "stack in a call": lambda y, other: jax.jit(lambda a, b: jnp.stack([a, b]).sum(0))(y, other),
    "concatenate": lambda y, other: jnp.concatenate([y, other], 1)[:, :6],
}
INSIDE = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda fn: lambda y: jax.lax.scan(lambda carry, _: (carry, fn(y)), 0, None, length=2)[1],
    "cond": lambda fn: lambda y: jax.lax.cond(True, fn, fn, y),
}


def test_what_jax_takes_for_an_operation_on_the_whole_value():
    """Why there is a check of our own. When this fails, JAX has learned to refuse it: take it out of the docs."""

    def body(x):
        lost = jnp.cumsum(jax.lax.pcast(x, "m", to="unreduced"), 1)
        assert not jax.typeof(lost).mat.unreduced
        return jnp.zeros(())

    specs = jax.sharding.PartitionSpec("d", "m")
    jax.shard_map(body, in_specs=specs, out_specs=jax.sharding.PartitionSpec())(put((8, 4), "batch/d in/m"))


@pytest.mark.parametrize("axes", [None, {"m"}], ids=["all", "partial"])
@pytest.mark.parametrize("operation", NONLINEAR)
def test_a_pending_sum_is_only_added(operation, axes):
    # Where JAX 0.12 refuses a maximum on its own it does not say what it refuses.
    named = f"({operation}|an operation)" if operation == "reduce_max" else operation
    message = (
        f"can only be added to sums pending over the same axes, reshaped or settled, got {named} of a sum pending "
        "along m, in `prog"
    )
    with pytest.raises(PendingSumError, match=message):
        product(NONLINEAR[operation], axes=axes)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("join", JOINED)
def test_a_pending_sum_is_joined_with_sums_pending_alike(join):
    """JAX's types (0.10.2) carry the sum over an operand that all devices hold whole, which would be counted twice."""
    settle = lambda y: reshard("batch/d out +m -> batch/d out", y)
    for whole in (lambda: np.ones((2, 6), np.float32), lambda: jnp.full((2, 6), 2.0)):
        # Where JAX's types carry no sum on, its settling is refused.
        words = "can only be added to sums pending over the same axes, re|pending there, settle it b"
        with pytest.raises(TypeMismatch, match=words):
            product(lambda y, whole=whole: settle(JOINED[join](y, whole())))
    if join.startswith("stack"):
        got = product(lambda y: settle(JOINED[join](y, jnp.zeros_like(y))))
        want = JOINED[join](jnp.full((8, 6), 4.0), jnp.zeros((8, 6)))
        assert jax.device_get(got).tolist() == want.tolist()
    got = product(lambda y: settle(JOINED[join](y, y + y)))
    assert jax.device_get(got).tolist() == JOINED[join](jnp.full((8, 6), 4.0), jnp.full((8, 6), 8.0)).tolist()


@pytest.mark.parametrize("axes", [None, {"m"}], ids=["all", "partial"])
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("operation", ["exp", "cumsum"])
def test_a_pending_sum_is_only_added_inside_transformations(operation, inside, axes):
    with pytest.raises(PendingSumError, match=f"got {operation} of a sum pending along m"):
        product(INSIDE[inside](NONLINEAR[operation]), axes=axes)


@pytest.mark.parametrize("axes", [None, {"m"}], ids=["all", "partial"])
def test_the_refusal_names_the_line_and_the_reshard(axes):
    def then(y):
        return jnp.cumsum(y, 1)  # the line

    refuses(
        PendingSumError,
        "in `program` (test_manual_pending.py:"
        f"{then.__code__.co_firstlineno + 1}: return jnp.cumsum(y, 1)  # the line): "
        'write reshard("batch/d out +m -> batch/d out", ...) first',
        product,
        then,
        axes=axes,
    )


@pytest.mark.slow
@pytest.mark.parametrize("axes", [None, {"m"}], ids=["all", "partial"])
def test_sums_of_pending_sums_are_pending_sums(axes):
    def then(y):
        y = jnp.concatenate([y + y, y], 1).reshape(y.shape[0], 2, 6).astype(jnp.bfloat16)
        return reshard("batch/d out +m -> batch/d out", jnp.sum(y, 1).astype(jnp.float32))

    assert jax.device_get(product(then, axes=axes)).tolist() == [[12.0] * 6] * 8


@pytest.mark.parametrize("axes", [None, {"m"}], ids=["all", "partial"])
def test_a_stack_of_sums_pending_alike_is_one(axes):
    def then(y):
        return jnp.sum(reshard("k batch/d out +m -> k batch/d out", jnp.stack([y, y + y])), 0)

    assert jax.device_get(product(then, axes=axes)).tolist() == [[12.0] * 6] * 8


def test_a_carry_that_becomes_pending_with_axes_left():
    def then(y):
        start = jax.lax.pcast(jnp.zeros((8, 6), out_sharding=jax.typeof(y).sharding), "m", to="varying")
        return jax.lax.scan(lambda _, __: (y, None), start, None, length=2)[0]

    refuses(PendingSumError, "got scan of a sum pending along m, in `program`", product, then, axes={"m"})


@pytest.mark.parametrize(
    "settle", [lambda y: reshard("+m -> ", y), lambda y: jax.lax.psum(y, "m")], ids=["reshard", "psum"]
)
def test_mapping_over_a_pending_sum(settle):
    @shard_map
    def program(x: f32["batch/d in/m"]) -> f32["batch/d"]:
        return jax.vmap(lambda row: settle(einsum("in/m, in/m -> +m", row, row)))(x)

    x = put((8, 4), "batch/d in/m")
    np.testing.assert_allclose(program(x), (x * x).sum(1), rtol=1e-6)


@pytest.mark.parametrize("axes", [None, {"m"}], ids=["all", "partial"])
@pytest.mark.parametrize("begun", [0.0, 2.0])
def test_what_is_whole_begins_a_pending_sum(axes, begun):
    """A loop carries it from zeros, and a sum is added to it once. Gradients as on one device."""

    @shard_map(axes=axes)
    def program(x: f32["times batch/d in/m"], w: f32["in/m out"], start: f32["batch/d out"]) -> f32["batch/d out"]:
        def turn(total, x):
            return total + einsum("batch/d in/m, in/m out -> batch/d out +m", x, w), None

        total, _ = jax.lax.scan(turn, reshard("batch/d out -> batch/d out +m", start), x)
        return reshard("batch/d out +m -> batch/d out", total)

    def loss(f, *arrays):
        return jnp.sum(f(*arrays) ** 2)

    arrays = put((3, 8, 4), "times batch/d in/m"), put((4, 6), "in/m out"), begun * put((8, 6), "batch/d out")
    got = jax.jit(jax.value_and_grad(lambda *arrays: loss(program, *arrays), (0, 1, 2)))(*arrays)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), "one")):
        plain = lambda x, w, start: start + jnp.einsum("tbi,io->bo", x, w)
        want = jax.value_and_grad(lambda *arrays: loss(plain, *arrays), (0, 1, 2))(*map(np.asarray, arrays))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_a_loop_may_begin_with_zeros_made_there_and_stack_pending_sums():
    @shard_map
    def program(x: f32["times batch/d in"]) -> f32["in out"]:
        def turn(total, x):
            total = total + einsum("batch/d in, batch/d out -> in out +d", x, x)
            return total, total

        total, every = jax.lax.scan(turn, reshard("in out -> in out +d", jnp.zeros((4, 4))), x)
        return reshard("in out +d -> in out", total + jnp.sum(every, 0))

    x = put((2, 8, 4), "times batch/d in")
    value, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(program(x))))(x)
    # The first turn counts three times, the second twice.
    assert (float(value), np.asarray(gradient)[:, 0].tolist()) == (640.0, [[24.0] * 4, [16.0] * 4])


def test_what_sums_are_added_to_is_told():
    refuses(
        PendingSumError,
        'write reshard("batch/d out +m -> batch/d out", ...), or reshard("batch/d out -> batch/d out +m", ...) of what '
        "it is added to, first",
        product,
        lambda y: 0 + y,
    )


@pytest.mark.parametrize("axes", [None, {"m"}], ids=["all", "partial"])
def test_a_sum_of_a_pending_sum_is_pending(axes):
    def then(y):
        return reshard("batch/d +m -> batch/d", einsum("batch/d out +m -> batch/d +m", y))

    assert product(then, "batch/d", axes=axes).tolist() == [24.0] * 8
    refuses(
        NotationError,
        "the result of a pending sum must be pending too, got 'batch/d out +m' and no '+m' on the right, in "
        "einsum('batch/d out +m -> batch/d')",
        product,
        lambda y: einsum("batch/d out +m -> batch/d", y),
        axes=axes,
    )


def test_a_loop_over_slices_of_a_pending_sum():
    then = lambda y: jax.lax.map(lambda row: reshard("out +m -> out", row), y)
    refuses(PendingSumError, "got scan of a sum pending along m, in `program`", product, then)


@pytest.mark.slow
def test_a_gradient_of_a_choice_between_pending_sums():
    def chosen(x: f32["batch/d in/m"], w: f32["in/m out"]) -> f32["batch/d out"]:
        y = einsum("batch/d in/m, in/m out -> batch/d out +m", x, w)
        return reshard("batch/d out +m -> batch/d out", jnp.where(jnp.tri(2, 6) > 0, y, y + y))

    refuses(
        TypeMismatch,
        "JAX can only differentiate sums and rearrangements of a pending sum '+x', got another operation on one (such "
        "as `where`), in `<lambda>`: settle it first",
        grad(lambda x, w: jnp.sum(shard_map(chosen)(x, w))),
        put((8, 4), "batch/d in/m"),
        put((4, 6), "in/m out"),
    )


TAKES_COPIES = {
    "a loop from outside": lambda step, x, w: jax.lax.fori_loop(0, 2, lambda _, x: step(x, w[0]), x),
    "a loop over slices": lambda step, x, w: jax.lax.scan(lambda x, w: (step(x, w), None), x, w)[0],
    "a branch": lambda step, x, w: jax.lax.cond(jnp.array(True), lambda: step(x, w[1]), lambda: x),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", TAKES_COPIES.values(), ids=TAKES_COPIES)
def test_gradients_of_what_loops_and_branches_take_of_copies(run):
    def step(x, w):
        return jnp.tanh(einsum("batch/d a, a b ~d -> batch/d b", x, w))

    @shard_map
    def program(x: f32["batch/d a"], w: f32["layers a/d b"]) -> f32["batch/d b"]:
        return run(step, x, all_gather("layers a/d b -> layers a b ~d", w))

    x, w = put((8, 4), "batch/d a"), 0.1 * put((3, 4, 4), "layers a/d b")
    got = jax.jit(jax.grad(lambda w: jnp.sum(program(x, w) ** 2)))(w)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), "one")):
        x, w = np.asarray(x), np.asarray(w)
        want = jax.grad(lambda w: jnp.sum(run(lambda x, w: jnp.tanh(x @ w), jnp.asarray(x), w) ** 2))(w)
    np.testing.assert_allclose(got, want, rtol=1e-4)
