"""Two ways to a gradient that is wrong by a factor or a sum, where each device differentiates its own loss.

16. MatX's seqax, a comment in its `train.py`: a loss that is summed over devices inside what is differentiated
    multiplies the gradient by the number of devices, so it must be summed outside.
17. JAX's `shard_map` with `check_vma=False`: gradients of replicated weights are not summed, without an error.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import trellis as tr
from tests.mesh.told import told
from trellis import Axis, f32


def whole(w, x):
    return jnp.sum(jnp.tanh(x @ w))


def summed_inside(x, w):
    def loss(w):
        return jax.lax.psum(jnp.sum(jnp.tanh(x @ w)), "data")  # the sum is inside what is differentiated

    return jax.grad(loss)(w)


def summed_outside(x, w):
    return jax.lax.psum(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), "data")


@pytest.fixture
def arrays(put):
    return put("b/data e", 8, 4), put("e", 4, seed=1)


def unchecked(program, arrays):
    specs = (PartitionSpec("data"), PartitionSpec())
    run = jax.shard_map(program, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    return np.asarray(run(*arrays))


@pytest.mark.slow
def test_16_and_17_what_happens_without_the_types(arrays, alone):
    x, w = alone(*arrays)
    right = jax.jit(jax.grad(whole))(w, x)
    np.testing.assert_allclose(unchecked(summed_outside, arrays), right, rtol=1e-4)
    # The gradient of each device's own part of the loss, times the number of devices: on the first device.
    per_device = jax.grad(whole)(w, x[:2])
    np.testing.assert_allclose(unchecked(summed_inside, arrays), 4 * per_device, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("program", [summed_inside], ids=["psum"])
def test_16_manual_a_sum_inside_has_the_right_gradient(arrays, alone, program):
    def gradient(x: f32["batch/data embed"], w: f32["embed"]) -> f32["embed"]:
        return program(x, w)

    x, w = alone(*arrays)
    np.testing.assert_allclose(tr.shard_map(gradient)(*arrays), jax.grad(whole)(w, x), rtol=1e-4)


@pytest.mark.slow
def test_16_manual_in_the_notation(arrays, alone):
    @tr.shard_map
    def gradient(x: f32["batch/data embed"], w: f32["embed"]) -> f32["embed"]:
        def loss(w):
            copied = tr.reshard("embed -> embed ~data", w)  # its gradient arrives as one sum over devices
            y = jnp.tanh(tr.einsum("batch/data embed, embed ~data -> batch/data", x, copied))
            return tr.all_reduce("+data -> ", tr.einsum("batch/data -> +data", y))

        return jax.grad(loss)(w)

    x, w = alone(*arrays)
    np.testing.assert_allclose(gradient(*arrays), jax.grad(whole)(w, x), rtol=1e-4)


def test_16_manual_a_gradient_that_is_summed_again_is_refused(arrays):
    @tr.shard_map
    def gradient(x: f32["batch/data embed"], w: f32["embed"]) -> f32["embed"]:
        once = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)  # already summed: w is the same on all devices
        return tr.reshard("embed +data -> embed", once)

    message = (
        "which is not pending along data, for 'embed +data', in reshard('embed +data -> embed'): write no +data there"
    )
    with pytest.raises(tr.TypeMismatch) as error:
        gradient(*arrays)
    assert message in told(error, by_line=True)


@pytest.mark.slow
def test_17_manual_there_is_nothing_to_turn_off(arrays, alone):
    with pytest.raises(TypeError, match="unexpected keyword argument 'check_vma'"):
        tr.shard_map(check_vma=False)

    @tr.shard_map
    def forward(x: f32["batch/data embed"], w: f32["embed"]) -> f32["batch/data"]:
        return jnp.tanh(x @ w)

    @tr.shard_map
    def inside(x: f32["batch/data embed"], w: f32["embed"]) -> f32["embed"]:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    x, w = alone(*arrays)
    right = jax.jit(jax.grad(whole))(w, x)
    np.testing.assert_allclose(jax.grad(lambda w: jnp.sum(forward(arrays[0], w)))(arrays[1]), right, rtol=1e-4)
    np.testing.assert_allclose(inside(*arrays), right, rtol=1e-4)


@pytest.mark.slow
def test_16_and_17_explicit_there_is_one_loss(mesh, alone):
    def loss(w, x):
        return tr.tanh(tr.einsum("batch embed, embed -> batch", x, w)).sum().array

    with tr.Layout(mesh, params={"embed": "data"}, compute={"batch": "data"}):
        x = tr.random.normal(jax.random.key(0), [Axis("batch", 8), Axis("embed", 4)])
        w = tr.random.normal(jax.random.key(1), [Axis("embed", 4)])
        got = jax.jit(jax.grad(loss))(w, x)
        # A sum that moves data is a transition, and there is nothing pending here to be summed a second time.
        with pytest.raises(tr.ReshardError, match="the left side of a transition must describe the array"):
            tr.reshard("embed +data -> embed", got)
    a, b = alone(x.array, w.array)
    np.testing.assert_allclose(got.array, jax.grad(whole)(b, a), rtol=1e-4)
