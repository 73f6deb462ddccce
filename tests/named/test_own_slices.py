"""What is summed is summed of each device's own slice, also where another operation reads the whole.

JAX 0.10.2 does not state how the results of some operations lie (`round`, `sign`, comparisons). XLA then gathers them
for all of their readers if one of them wants that, and a sum over devices counted every slice several times, with the
bytes that the ledger says.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr

LAYOUT = {"heads": "context", "pos": "expert"}


def alike(fn):
    """A function of arrays, and the same one of a named array."""
    return fn, lambda x: x.with_array(fn(x.array))


# Of arrays, and of named arrays.
OPERATIONS = {
    "round": alike(jnp.round),
    "floor": alike(jnp.floor),
    "sign": alike(jnp.sign),
    "floor_divide": (lambda x: jnp.floor_divide(x, 0.3), lambda x: tr.floor_divide(x, 0.3)),
    "compare": alike(lambda x: (x > 0.1).astype(jnp.float32)),
    "is_finite": alike(lambda x: jnp.isfinite(1 / x).astype(jnp.float32)),
    "clip": (lambda x: jnp.clip(x, -0.5, 0.5), lambda x: tr.clip(x, -0.5, 0.5)),
    "where": (lambda x: jnp.where(x > 0, x, 0.5), lambda x: tr.where(x > 0, x, 0.5)),
    "cumsum": (lambda x: jnp.cumsum(x, 0), lambda x: tr.cumsum(x, "heads")),
    "sort": (lambda x: jnp.sort(x, 0), lambda x: tr.sort(x, "heads")),
    "jit": alike(jax.jit(jnp.round)),
    "cond": alike(lambda x: jax.lax.cond(jnp.float32(1) > 0, lambda x: x * 2, lambda x: x, x)),
    "scan": alike(lambda x: jax.lax.scan(lambda x, _: (jnp.round(x * 1.5), None), x, length=3)[0]),
    "checkpoint": alike(jax.checkpoint(lambda x: jnp.round(x) * x)),
    "integers": alike(lambda x: (x * 10).astype(jnp.int32).astype(jnp.float32)),
    "erf_inv": alike(lambda x: jax.scipy.special.erfinv(x / 10)),
    "barrier": alike(jax.lax.optimization_barrier),
}
SUMS = {
    "dot": (lambda y: jnp.sum(y * y), lambda y: tr.dot(y, y, over=("heads", "pos"))),
    "sum": (jnp.sum, lambda y: y.sum()),
    "mean of one": (lambda y: y.mean(0), lambda y: y.mean("heads")),
    "product over one": (
        lambda y: jnp.einsum("ab,ac->bc", y, y),
        lambda y: tr.dot(y, y.rename(pos="k"), over="heads"),
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_of_what_is_gathered_beside_it(operation, kind):
    (plain, named), (sum_plain, sum_named) = OPERATIONS[operation], SUMS[kind]
    x = np.random.default_rng(3).normal(size=(4, 4)).astype(np.float32)

    def ours(x):
        y = named(x)
        return sum_named(y), tr.roll(y, -3, "heads")

    expected = jax.jit(lambda x: (sum_plain(plain(x)), jnp.roll(plain(x), -3, 0)))(x)
    with tr.Layout(tr.make_mesh(jax.devices()[:4], context=2, expert=2), compute=LAYOUT):
        found = jax.jit(ours)(tr.shard(tr.named(x, "heads pos"), "compute"))
    for value, like in zip(found, expected, strict=True):
        np.testing.assert_allclose(value.array, like, rtol=1e-5, atol=1e-6)


def test_a_program_of_plain_arrays():
    """The one in docs/published-bugs.md, 42."""

    @jax.jit
    def squares(x):
        y = jnp.round(x)
        partial = jnp.einsum("a,a->", y, y, out_sharding=jax.P(unreduced={"data"}))
        return jax.reshard(partial, jax.P()), jax.reshard(y, jax.P())

    with jax.set_mesh(tr.make_mesh(jax.devices()[:2], data=2)):
        total, whole = squares(jax.device_put(jnp.arange(4.0), jax.P("data")))
    assert total == 14 and (whole == jnp.arange(4.0)).all()


@pytest.mark.parametrize("operation", ["round", "sign", "compare", "cond"])
def test_a_gradient_of_what_is_gathered_beside_it(operation):
    """Of parameters that multiply it: a product over slices of the batch, which JAX writes."""
    plain, named = OPERATIONS[operation]
    x, w = (np.random.default_rng(i).normal(size=(4, 4)).astype(np.float32) for i in (3, 4))

    def loss(w, x):
        y = named(x)
        return (tr.dot(y, w, over="pos") ** 2).sum().array, tr.roll(y, -3, "heads")

    def expected_loss(w, x):
        return ((plain(x) @ w) ** 2).sum(), jnp.roll(plain(x), -3, 0)

    expected, _ = jax.jit(jax.grad(expected_loss, has_aux=True))(w, x)
    with tr.Layout(tr.make_mesh(jax.devices()[:4], context=2, expert=2), compute=LAYOUT):
        wrt, rows = tr.shard(tr.named(w, "pos mlp"), "compute"), tr.shard(tr.named(x, "heads pos"), "compute")
        found, _ = jax.jit(jax.grad(loss, has_aux=True))(wrt, rows)
    np.testing.assert_allclose(found.array, expected, rtol=1e-5, atol=1e-6)
