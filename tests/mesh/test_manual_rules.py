"""Backward rules of one's own in manual mode, as other trainers write tensor parallelism.

JAX's types sum the gradient of what is the same on all devices: a rule that sums it, too, counts it once for each.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import trellis as tr
from trellis.notation import PendingSumError, TypeMismatch


def with_rule(forward, backward):
    fn = jax.custom_vjp(forward)
    fn.defvjp(lambda x: (forward(x), None), lambda _, d: (backward(d),))
    return fn


def by_equinox(forward, backward):
    fn = eqx.filter_custom_vjp(forward)
    fn.def_fwd(lambda _, x: (forward(x), None))
    fn.def_bwd(lambda kept, d, perturbed, x: backward(d))
    return fn


def alike(x):
    return x


def total(x):
    return lax.psum(x, "m")


def varying(d):
    return lax.pcast(d, ("m",), to="varying")


def gradients(enter, leave, outside=False):
    """Of a block whose first weight is sliced by columns and whose second by rows; and those of one device."""

    def block(x, w, v, enter, leave):
        return leave(jnp.tanh(enter(x) @ w) @ v)

    def loss(*given):
        return (block(*given) ** 2).sum()

    @tr.shard_map
    def forward(x: tr.f32["b e"], w: tr.f32["e h/m"], v: tr.f32["h/m e"]) -> tr.f32["b e"]:
        return block(x, w, v, enter, leave)

    @tr.shard_map
    def manual(
        x: tr.f32["b e"], w: tr.f32["e h/m"], v: tr.f32["h/m e"]
    ) -> tuple[tr.f32["b e"], tr.f32["e h/m"], tr.f32["h/m e"]]:
        return jax.grad(loss, (0, 1, 2))(x, w, v, enter, leave)

    rng = np.random.default_rng(0)
    given = [rng.normal(size=size).astype(np.float32) for size in ((4, 8), (8, 16), (16, 8))]
    with tr.Layout(tr.make_mesh(d=2, m=4)):
        found = jax.grad(lambda *a: (forward(*a) ** 2).sum(), (0, 1, 2))(*given) if outside else manual(*given)
    return found, jax.grad(loss, (0, 1, 2))(*given, alike, alike)


RIGHT = {
    "JAX's own": (alike, total),
    "identity": (with_rule(alike, alike), total),
    "identity, by a library": (by_equinox(alike, alike), total),
    "a sum": (alike, with_rule(total, varying)),
}


@pytest.mark.slow
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("rules", RIGHT)
def test_rules_that_sum_nothing_twice_are_right(rules, outside):
    for mine, wanted in zip(*gradients(*RIGHT[rules], outside=outside), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("outside", [False, True])
def test_a_rule_that_sums_what_jax_has_summed_is_refused(outside):
    """Also where the function is differentiated from outside, whose program JAX makes."""
    with pytest.raises(PendingSumError, match="of a value that was summed over it already.*: leave the second sum out"):
        gradients(with_rule(alike, total), total, outside=outside)


@pytest.mark.slow
def test_a_rule_written_with_a_library_is_refused_like_any_other():
    """What makes it a rule is that JAX calls it, not the file in which its function stands."""
    with pytest.raises(PendingSumError, match="of a value that was summed over it already"):
        gradients(by_equinox(alike, total), total, outside=True)


WHERE = {
    "a call": lambda rule, x: jax.jit(rule)(x),
    "a loop": lambda rule, x: lax.scan(lambda x, _: (rule(x), None), x, length=2)[0],
    "a branch": lambda rule, x: lax.cond(True, rule, alike, x),
    "remat": lambda rule, x: jax.checkpoint(rule)(x),
    "a map": lambda rule, x: jax.vmap(rule)(x),
}


@pytest.mark.parametrize("where", WHERE)
def test_a_rule_is_checked_wherever_it_stands(where):
    """Also if nothing is sliced, so that JAX's types sum nothing either."""

    @tr.shard_map
    def value(x: tr.f32["b e"], w: tr.f32["e h"]) -> tr.f32["b h"]:
        return WHERE[where](with_rule(alike, total), x) @ w

    with tr.Layout(tr.make_mesh(d=2, m=4)):
        x, w = jnp.ones((4, 8)), jnp.ones((8, 2))
        assert value(x, w).shape == (4, 2)  # a program that nobody differentiates has no rule to refuse
        with pytest.raises(PendingSumError, match="leave the second sum out"):
            jax.grad(lambda x: value(x, w).sum())(x)


@pytest.mark.slow
def test_a_result_without_a_gradient_hides_no_rule():
    """A count that a loop makes, beside the layer's result."""

    @tr.shard_map
    def both(x: tr.f32["b e"], w: tr.f32["e h/m"], v: tr.f32["h/m e"]) -> tuple[tr.f32["b e"], tr.f32[""]]:
        turns = lax.while_loop(lambda s: s < 4, lambda s: s * 2, 1.0 + 0 * jnp.abs(x).sum())
        return lax.psum(jnp.tanh(with_rule(alike, total)(x) @ w) @ v, "m"), turns

    with tr.Layout(tr.make_mesh(d=2, m=4)):
        given = np.ones((4, 8), "f4"), np.ones((8, 16), "f4"), np.ones((16, 8), "f4")
        with pytest.raises(PendingSumError, match="leave the second sum out"):
            jax.grad(lambda *a: both(*a)[0].sum())(*given)


def test_a_rule_whose_gradient_is_the_same_where_its_argument_differs_is_told():
    with pytest.raises(TypeMismatch, match=r"backward rule must return .* return jax.lax.pcast\(gradient, \('m',\)"):
        gradients(alike, with_rule(total, alike))


@pytest.mark.parametrize("outside", [False, True])
def test_a_rule_that_forgets_a_sum_is_told(outside):
    """The gradient of a weight that all devices hold, of each device's rows alone."""
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, d: (d @ kept[1].T, kept[0].T @ d))

    @tr.shard_map
    def value(x: tr.f32["rows/m in"], w: tr.f32["in out"]) -> tr.f32["rows/m out"]:
        return product(x, w)

    @tr.shard_map
    def gradient(x: tr.f32["rows/m in"], w: tr.f32["in out"]) -> tr.f32["in out"]:
        return jax.grad(lambda w: product(x, w).sum())(w)

    with jax.set_mesh(tr.make_mesh(m=8)):
        x, w = jnp.ones((8, 4), out_sharding=jax.P("m")), jnp.ones((4, 2))
        with pytest.raises(TypeMismatch, match=r": return jax.lax.psum\(gradient, \('m',\)\), or pass jax.lax.pcast"):
            tr.grad(lambda w: value(x, w).sum())(w) if outside else gradient(x, w)
