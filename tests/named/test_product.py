"""The product's own gradient against `dot_general`'s."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.mesh.meshes import make_mesh
from trellis.named.backend import copied_turned, loop_over, product
from trellis.named.tuned import Tuned, tuned_for

# Shapes and the summed dimensions: one or several, in either order, with the narrower operand on either side.
CASES = [
    ((4, 6, 3), (3, 5), ((2,), (0,))),
    ((4, 6, 5), (5, 3), ((2,), (0,))),
    ((4, 6, 3), (5, 3), ((2,), (1,))),
    ((4, 6, 3, 2), (3, 2, 5), ((2, 3), (0, 1))),
    ((4, 6, 3, 2), (2, 5, 3), ((2, 3), (2, 0))),
    ((3, 2, 4), (3, 4, 2, 5), ((1, 0, 2), (2, 0, 1))),
    ((3, 4), (4, 6, 2, 3), ((1,), (0,))),
    ((3, 4), (4, 3), ((1, 0), (0, 1))),
]


def gradients(function, a, b, numbers, weights):
    return jax.jit(jax.grad(lambda a, b: jnp.sum(function(a, b, numbers) * weights), (0, 1)))(a, b)


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("turned", ["narrower", "none"])
@pytest.mark.parametrize("a_shape,b_shape,summed", CASES)
def test_the_gradient_is_that_of_dot_general(a_shape, b_shape, summed, turned):
    keys = jax.random.split(jax.random.key(0), 3)
    a, b = jax.random.normal(keys[0], a_shape), jax.random.normal(keys[1], b_shape)
    numbers = (summed, ((), ()))
    out = jax.lax.dot_general(a, b, numbers)
    weights = jax.random.normal(keys[2], out.shape)
    np.testing.assert_allclose(product(a, b, numbers), out, rtol=1e-6)
    wanted = gradients(jax.lax.dot_general, a, b, numbers, weights)
    with tuned_for(Tuned(turned=turned)):
        found = gradients(product, a, b, numbers, weights)
    for seen, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "one, other, both", [("bfloat16", "float16", "float32"), ("int8", "uint8", "int16"), ("bfloat16", "float32", None)]
)
def test_numbers_of_two_types_are_multiplied_as_jax_does(one, other, both):
    a, b = jnp.full((2, 3), 3, one), jnp.full((3, 4), 200, other)
    for x, y in ((a, b), (b.T, a.T)):
        made = product(x, y, (((1,), (0,)), ((), ())))
        assert made.dtype == jnp.dtype(both or "float32") and jnp.all(made == 1800)
    if both == "float32":
        grads = jax.grad(lambda a, b: product(a, b, (((1,), (0,)), ((), ()))).sum(), (0, 1))(a, b)
        assert [g.dtype for g in grads] == [a.dtype, b.dtype] and jnp.all(grads[0] == 800) and jnp.all(grads[1] == 6)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("widths", [(3, 8), (8, 4)])
def test_gradients_lie_where_their_values_do(widths, copied):
    mesh = make_mesh(data=4, model=2)
    embed, mlp = widths
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (8, 2, embed)), jax.random.normal(keys[1], (embed, mlp))
    weights = jax.random.normal(keys[2], (8, 2, mlp))
    numbers = (((2,), (0,)), ((), ()))
    wanted = gradients(jax.lax.dot_general, x, w, numbers, weights)
    with jax.set_mesh(mesh):
        put = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))

        def total(x, w, weights):
            if copied:
                x, w = jax.reshard(x, P("data", reduced={"model"})), jax.reshard(w, P(None, "model", reduced={"data"}))
            out = product(x, w, numbers, spec=P("data", None, "model"))
            return jnp.sum(out * weights)

        arrays = put(x, "data"), put(w, None, "model"), put(weights, "data", None, "model")
        seen = jax.jit(jax.grad(total, (0, 1)))(*arrays)
        for gradient, array in zip(seen, arrays[:2], strict=True):
            assert jax.typeof(gradient).sharding.spec == jax.typeof(array).sharding.spec
    for gradient, expected in zip(seen, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(gradient), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_pending_sum_goes_through():
    mesh = make_mesh(model=8)
    a, b = jax.random.normal(jax.random.key(0), (4, 16)), jax.random.normal(jax.random.key(1), (16, 2))
    with jax.set_mesh(mesh):
        a_there, b_there = (
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((a, P(None, "model")), (b, P("model")))
        )

        def total(a, b):
            out = product(a, b, (((1,), (0,)), ((), ())), spec=P(unreduced={"model"}))
            return jnp.sum(jax.reshard(out, P(None, None)) ** 2)

        seen = jax.jit(jax.grad(total, (0, 1)))(a_there, b_there)
    wanted = jax.jit(jax.grad(lambda a, b: jnp.sum((a @ b) ** 2), (0, 1)))(a, b)
    for gradient, expected in zip(seen, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(gradient), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int32", "bool"])
def test_a_pending_sum_of_whole_numbers_is_what_it_is_when_settled(dtype):
    x, w = tr.full({"a": 4, "b": 8}, 3, dtype), tr.ones({"b": 8, "c": 8}, dtype)
    uses = [lambda y: y / 2, lambda y: y * 0.5, lambda y: -y, lambda y: y.sum("c"), lambda y: y.astype("float32")]
    with tr.Layout(make_mesh(model=8), compute={"b": "model"}), jax.numpy_dtype_promotion("standard"):
        pending = tr.dot(x, w, over="b", settle=False)
        for use in uses:
            if dtype == "bool":
                with pytest.raises(tr.PendingSumError):
                    use(pending)
            else:
                found, wanted = tr.settle(use(pending)), use(tr.settle(pending))
                assert found.dtype == wanted.dtype and found.tolist() == wanted.tolist()


def test_policies_see_the_product():
    x, w = jnp.ones((4, 3)), jnp.ones((3, 5))

    def dots(policy):
        layer = jax.checkpoint(lambda x, w: jnp.sin(product(x, w, (((1,), (0,)), ((), ())))), policy=policy)
        return str(jax.make_jaxpr(jax.grad(lambda w: layer(x, w).sum()))(w)).count("dot_general[")

    everything, nothing = jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.nothing_saveable
    assert dots(nothing) == dots(everything) + 1


def test_the_cotangent_is_settled_once_on_a_cpu():
    x, w = jnp.ones((4, 3)), jnp.ones((3, 5))
    text = str(jax.make_jaxpr(jax.grad(lambda w: jnp.sin(product(x, w, (((1,), (0,)), ((), ())))).sum()))(w))
    assert text.count("optimization_barrier") == 1
    batched = str(jax.make_jaxpr(jax.grad(lambda w: product(w, w, (((1,), (1,)), ((0,), (0,)))).sum()))(w))
    assert "optimization_barrier" not in batched


def test_what_is_turned_is_copied_by_itself():
    """Not within what makes it, which XLA's CPU compiler would then evaluate in strided order."""
    over_embed = (((2,), (0,)), ((), ()))

    def loss(ups, downs):
        x = jnp.ones((4, 16, 48))
        for up, down in zip(ups, downs):
            scaled = x * jnp.sum(x, -1, keepdims=True)
            x = x + product(jnp.tanh(product(scaled, up, over_embed)), down, over_embed)
        return jnp.sum(x * x)

    ups, downs = [jnp.ones((48, 64))] * 3, [jnp.ones((64, 48))] * 3
    text = jax.jit(jax.grad(loss, (0, 1))).lower(ups, downs).compile().as_text()
    computations = re.findall(r"^%?[\w.\-]+ \(.*?\{$(.*?)^\}", text, re.M | re.S)
    copies = [body for body in computations if re.search(r" (copy|transpose)\(", body) and " dot(" not in body]
    assert copies and not [body for body in copies if re.search(r" (add|multiply|tanh)\(", body)]


_turned = jax.jit(lambda x: jnp.tanh(copied_turned(jnp.sin(x), (1, 0)))).lower


@pytest.mark.parametrize("mode", ["explicit", "auto", "given to jit", "manual"])
def test_a_slice_is_turned_where_it_is(mode):
    """XLA gathers an array whose layout is said before it is sliced."""
    x, mesh = jnp.ones((48, 64)), make_mesh(data=4, model=2)
    spec, other = P("data", "model"), P("model", "data")
    if mode == "manual":
        by_hand = jax.shard_map(lambda x: copied_turned(x, (1, 0)), mesh=mesh, in_specs=spec, out_specs=other)
        lowered = jax.jit(by_hand).lower(jax.device_put(x, NamedSharding(mesh, spec)))
    elif mode == "explicit":
        with jax.set_mesh(mesh):
            lowered = _turned(jax.device_put(x, NamedSharding(mesh, spec)))
    else:
        auto = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        with jax.set_mesh(auto) if mode == "auto" else contextlib.nullcontext():
            lowered = _turned(jax.device_put(x, NamedSharding(auto, spec)))
    compiled = lowered.compile()
    assert "all-gather" not in compiled.as_text() and compiled.output_shardings.spec == other


def test_what_is_turned_is_copied_where_it_is_turned():
    """In the call that keeps it by itself, not after it."""
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1], data=1)):
        text = _turned(jnp.ones((48, 64))).compile().as_text()
    (called,) = re.findall(r" call\(.*?to_apply=%([\w.\-]+)", text)
    computations = dict(re.findall(r"^%([\w.\-]+) \(.*?\{$(.*?)^\}", text, re.M | re.S))
    (fused,) = re.findall(r"calls=%([\w.\-]+)", computations[called])
    assert "f32[64,48]{1,0} copy(" in computations[fused] and text.count(" copy(") == 1


def test_a_weight_with_three_dimensions_is_not_copied_for_the_gradient_of_what_it_multiplies():
    def inputs_gradient(w, contracted):
        x = jnp.ones((64, *(w.shape[i] for i in contracted)))
        numbers = ((tuple(range(1, x.ndim)), contracted), ((), ()))
        grad = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.tanh(product(x, w, numbers)))))
        return grad.lower(x, w).compile().as_text()

    for text in (inputs_gradient(jnp.ones((48, 4, 16)), (0,)), inputs_gradient(jnp.ones((4, 16, 48)), (0, 1))):
        assert " dot(" in text and " copy(" not in text and " transpose(" not in text


def test_a_weight_gradient_is_no_product_over_the_first_dimension_of_its_left_operand():
    """Which XLA's CPU compiler would make again of a product that is transposed, for the slow path."""
    x, w = jnp.ones((256, 48)), jnp.ones((48, 16))
    numbers = (((1,), (0,)), ((), ()))
    text = jax.jit(jax.grad(lambda w: jnp.sum(jnp.tanh(product(x, w, numbers))))).lower(w).compile().as_text()
    assert "f32[16,48]" in text and "lhs_contracting_dims={0}" not in text


@pytest.mark.parametrize("count", [1, 5])
def test_a_loop_over_parts_is_a_scan_and_nothing_in_it_slices_parts_but_what_comes_next(count):
    parts = jnp.arange(count), jax.random.normal(jax.random.key(0), (count, 3, 8))

    def body(carry, part):
        number, rows = part
        weights = jnp.exp(carry["total"] * 0 + rows[:, :, None] - rows[:, None, :])
        return {"total": carry["total"] + weights.mean(), "last": number}, weights.sum()

    start = {"total": jnp.float32(0), "last": jnp.int32(-1)}
    run = jax.jit(lambda parts: loop_over(body, start, parts))
    wanted = jax.lax.scan(body, start, parts)
    for seen, expected in zip(jax.tree.leaves(run(parts)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(seen, expected, rtol=1e-6)
    exponentials = [c for c in run.lower(parts).compile().as_text().split("\n\n") if " exponential(" in c]
    assert exponentials and not any("dynamic-slice(" in computation for computation in exponentials)


def test_in_auto_mode_a_result_that_is_sliced_over_a_summed_axis_beside_another_is_whole():
    """XLA's partitioner (JAX 0.10.2, plain JAX too) left zeros in a part of it."""
    x, y = (np.random.default_rng(seed).normal(size=(4, 4)).astype(np.float32) for seed in (0, 1))
    mesh = tr.make_mesh(axis_type="auto", data=2, model=2, context=2)
    with tr.Layout(mesh, compute={"heads": ("model", "data"), "batch": ("model", "context")}):
        placed = [tr.shard(tr.named(a, "batch heads"), "compute") for a in (x, y)]
        found = jax.jit(lambda x, y: tr.dot(x, y, over="heads"))(*placed)
    np.testing.assert_allclose(found, (x * y).sum(1), rtol=1e-5, atol=1e-6)
