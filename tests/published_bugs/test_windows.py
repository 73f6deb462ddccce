"""39 and 40 of docs/published-bugs.md: two gradients of windows over slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis import f32
from trellis.errors import UserError

MESH = tr.make_mesh(data=2, model=2, stage=2)
X = np.asarray(jax.random.normal(jax.random.key(0), (8, 16, 4)))
WEIGHT = np.asarray(jax.random.normal(jax.random.key(1), (3, 4)))
OF_SEQUENCES = ("NWC", "WIO", "NWC")


def depthwise(x, weight):
    """Each channel by itself, causal: `batch pos channel`, `tap channel`."""
    taps = weight[:, None]
    return jax.lax.conv_general_dilated(
        x, taps, (1,), [(2, 0)], dimension_numbers=OF_SEQUENCES, feature_group_count=x.shape[-1]
    )


@tr.shard_map
def by_slices(x: f32["batch/data pos channel"], weight: f32["tap channel"]) -> f32["batch/data pos channel"]:
    return depthwise(x, weight)


def shifted(x, weight):
    pos = x.shape[1]
    return sum(jnp.pad(x, ((0, 0), (2, 0), (0, 0)))[:, tap : tap + pos] * weight[tap][None, None] for tap in range(3))


def gradient(convolve):
    return jax.grad(lambda weight, x: jnp.sum(convolve(x, weight) ** 2))


def largest(size, stride, x):
    """The largest of each window along `pos`; those of three positions begin before the first one."""
    beyond = (size - 1) // 2
    padding = ((0, 0), (beyond, beyond), (0, 0))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, size, 1), (1, stride, 1), padding)


def scattered(size, stride):
    return jax.grad(lambda x: jnp.sum(largest(size, stride, x) ** 2))


def placed(*spec):
    return jax.device_put(X, jax.NamedSharding(MESH, P(*spec))), jax.device_put(WEIGHT, jax.NamedSharding(MESH, P()))


@pytest.mark.slow
def test_what_xla_makes_of_them():
    """Where this fails, XLA is right: `trellis.program.windows` may go."""
    x, weight = placed("data")
    found, alone = jax.jit(gradient(depthwise))(weight, x), gradient(depthwise)(WEIGHT, X)
    np.testing.assert_allclose(found, 4 * alone, rtol=1e-4)
    found, alone = jax.jit(scattered(3, 1))(placed(None, "data")[0]), scattered(3, 1)(X)
    assert np.abs(found - alone).max() > 0.1 * np.abs(alone).max()


@pytest.mark.parametrize("spec", [("data",), (None, "data"), ("data", "model"), (("data", "stage"),)])
def test_a_weights_gradient_that_would_be_multiplied_is_refused(spec):
    x, weight = placed(*spec)
    with jax.set_mesh(MESH), pytest.raises(UserError, match="summed over all mesh axes") as error:
        tr.ledger(gradient(depthwise), weight, x)
    assert "; the same along " in str(error.value) and "test_windows.py" in str(error.value)
    assert "tr.shard_map" in str(error.value)


@pytest.mark.parametrize(("sizes", "right"), [({"data": 4}, True), ({"data": 2, "model": 2}, False)])
def test_where_the_compiler_places_everything(sizes, right):
    """Types do not say what is summed, so several mesh axes are refused; a device's own slice is not."""
    mesh = tr.make_mesh(jax.devices()[:4], axis_type="auto", **sizes)
    x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
    weight = jax.device_put(WEIGHT, jax.NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        tr.ledger(gradient(by_slices), weight, x)
        if right:
            tr.ledger(gradient(depthwise), weight, x)
        else:
            with pytest.raises(UserError, match="on data=2, model=2, of which the compiler chooses"):
                tr.ledger(gradient(depthwise), weight, x)
        found, alone = jax.jit(gradient(depthwise))(weight, x), gradient(depthwise)(WEIGHT, X)
    np.testing.assert_allclose(found, alone * (1 if right else 2), rtol=1e-4)


def test_a_weights_gradient_that_is_summed_over_all_devices_is_right():
    x, weight = placed("data", ("model", "stage"))
    with jax.set_mesh(MESH):
        assert tr.ledger(gradient(depthwise), weight, x).total(kind="all-reduce")
        found = jax.jit(gradient(depthwise))(weight, x)
    np.testing.assert_allclose(found, gradient(depthwise)(WEIGHT, X), rtol=1e-4)


@pytest.mark.parametrize("convolve", [by_slices, shifted])
def test_what_the_error_says_to_write_is_right(convolve):
    x, weight = placed("data")
    with jax.set_mesh(MESH):
        rows = tr.ledger(gradient(convolve), weight, x).rows
        found = jax.jit(gradient(convolve))(weight, x)
    assert {(row.kind, row.axes) for row in rows} == {("all-reduce", ("data",))}
    np.testing.assert_allclose(found, gradient(depthwise)(WEIGHT, X), rtol=1e-4)


def test_windows_that_lose_gradients_are_refused():
    x, _ = placed(None, "data")
    with jax.set_mesh(MESH), pytest.raises(UserError, match="windows of 3 that move on by 1 along data"):
        tr.ledger(scattered(3, 1), x)


def test_windows_where_the_compiler_places_everything_are_refused_on_several_devices():
    mesh = tr.make_mesh(jax.devices()[:4], axis_type="auto", data=4)
    x = jax.device_put(X, jax.NamedSharding(mesh, P(None, "data")))
    with jax.set_mesh(mesh):
        with pytest.raises(UserError, match="windows of 3 that move on by 1 on data=4, which the compiler slices by"):
            tr.ledger(scattered(3, 1), x)
        found, right = jax.jit(scattered(3, 1))(x), scattered(3, 1)(X)
        assert np.abs(found - right).max() > 0.1 * np.abs(right).max()
        tr.ledger(scattered(3, 2), x)
    alone = tr.make_mesh(jax.devices()[:1], axis_type="auto", data=1)
    with jax.set_mesh(alone):
        tr.ledger(scattered(3, 1), jax.device_put(X, jax.NamedSharding(alone, P())))


@pytest.mark.parametrize("first", ["trace", "lower", "types", "within"])
def test_a_program_is_refused_whatever_was_asked_of_it_before(first):
    """JAX keeps what it traced, also for another program, and traces nothing anew for a call."""
    step, (x, weight) = tr.named_jit(gradient(depthwise)), placed("data")
    if first == "within":
        jax.jit(lambda *given: step(*given)).trace(weight, x)
    else:
        with pytest.raises(UserError, match="summed over all mesh axes"):
            {"trace": step.trace, "lower": step.lower, "types": lambda *given: jax.eval_shape(step, *given)}[first](
                weight, x
            )
    for _ in range(2):
        with pytest.raises(UserError, match="summed over all mesh axes"):
            step(weight, x)


@pytest.mark.parametrize(
    ("size", "stride", "spec"), [(2, 2, (None, "data")), (3, 2, (None, "data")), (3, 1, ("data",))]
)
def test_windows_that_lose_none_are_right(size, stride, spec):
    x, _ = placed(*spec)
    with jax.set_mesh(MESH):
        tr.ledger(scattered(size, stride), x)
        found = jax.jit(scattered(size, stride))(x)
    np.testing.assert_allclose(found, scattered(size, stride)(X), rtol=1e-6)


@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_loop_of_one_s_own_is_told_after_its_first_step_and_from_then_on(donate):
    step = tr.named_jit(gradient(depthwise), donate=donate)
    for use in (step, step, step.lower):
        x, weight = placed("data")
        with pytest.raises(UserError, match="summed over data; the same along"):
            use(weight, x)
    x, weight = placed("data")
    right = tr.named_jit(gradient(shifted), donate=donate)
    np.testing.assert_allclose(right(weight, x), gradient(depthwise)(WEIGHT, X), rtol=1e-4)


def test_what_was_refused_on_some_slices_runs_on_others():
    step = tr.named_jit(gradient(depthwise))
    for _ in range(2):
        x, weight = placed("data")
        with pytest.raises(UserError):
            step(weight, x)
        x, weight = placed(MESH.axis_names)
        np.testing.assert_allclose(step(weight, x), gradient(depthwise)(WEIGHT, X), rtol=1e-4)
