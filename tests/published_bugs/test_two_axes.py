"""28 of docs/published-bugs.md: slices along two mesh axes that become partial sums over both."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import trellis as tr

SLICES = np.arange(1.0, 25, dtype=np.float32)


def mesh_of(x, y):
    return tr.make_mesh(jax.devices()[: x * y], x=x, y=y)


def test_what_xla_makes_of_it():
    """Where this fails, XLA is right: the steps in `trellis.mesh.reshard` may go."""
    parts = P(None, unreduced={"x", "y"})
    with jax.set_mesh(mesh_of(2, 3)):
        whole = jax.jit(lambda a, b: jax.reshard(jax.reshard(a, parts) + jax.reshard(b, parts), P(None)))
        found = whole(jax.device_put(SLICES, P(("x", "y"))), jax.device_put(0 * SLICES, P(None)))
        assert np.abs(found - SLICES).max() > 1


@pytest.mark.parametrize(("x", "y"), [(2, 3), (4, 2)])
@pytest.mark.parametrize("order", ["xy", "yx"])
def test_the_gradient_of_slices_of_copies(x, y, order):
    slices = "/".join(("a", *order))

    def loss(w):
        copies = tr.reshard("a -> a ~x ~y", w)
        mine = tr.reshard(f"a ~x ~y -> {slices}", copies)
        return (mine * mine).sum() + tr.reshard("a ~x ~y -> a", copies).sum()

    with jax.set_mesh(mesh_of(x, y)):
        w = jax.device_put(SLICES, P(None))
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(w), 2 * SLICES + 1)
        rows = tr.ledger(jax.grad(loss), w).rows
    assert [row.kind for row in rows if row.direction == "backward"] == ["all-reduce"]


@pytest.mark.parametrize(("x", "y"), [(2, 3), (4, 2)])
def test_slices_that_a_text_makes_partial_sums(x, y):
    parts = lambda before, w: tr.reshard(f"{before} -> a +x +y", w)
    with jax.set_mesh(mesh_of(x, y)):
        whole = jax.jit(lambda a, b: tr.reshard("a +x +y -> a", parts("a/x/y", a) + parts("a", b)))
        found = whole(jax.device_put(SLICES, P(("x", "y"))), jax.device_put(0 * SLICES, P(None)))
    np.testing.assert_array_equal(found, SLICES)
