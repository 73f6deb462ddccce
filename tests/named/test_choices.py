"""Loops with an end of their own, and branches: on every layout what one device computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr

SIZES = {"batch": 8, "embed": 16, "mlp": 8}
LAYOUTS = {
    "data": ({"batch": "data"}, {"batch": "data"}),
    "tensor": ({"mlp": "tensor"}, {"mlp": "tensor", "batch": "data"}),
    "widths at rest": ({"embed": "data", "mlp": "x"}, {"batch": ("data", "x")}),
    "two axes": ({"mlp": ("x", "data")}, {"mlp": ("x", "data"), "batch": "tensor"}),
    "embed": ({"embed": "tensor"}, {"embed": ("tensor", "data")}),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return tr.Layout(tr.make_mesh(data=2, tensor=2, x=2), *LAYOUTS[request.param])


def arrays(at: str = "compute") -> list[tr.NamedArray]:
    rng = np.random.default_rng(0)
    sizes = [("batch", "embed"), ("embed", "mlp"), ("embed",)]
    found = [tr.from_numpy(rng.normal(size=[SIZES[n] for n in names]).astype("f4"), names) for names in sizes]
    return [found[0], *(tr.shard(a, at) if tr.current_layout() else a for a in found[1:])]


def grown(x, w):
    """The stream, and in how many turns it was large."""

    def turn(carry):
        turns, x = carry
        hidden = tr.tanh(tr.dot(x, w, over="embed"))
        return turns + 1, x + 0.3 * tr.dot(hidden, w, over="mlp")

    return tr.while_loop(lambda carry: (carry[1] * carry[1]).sum() < 400.0, turn, (0, x))


@pytest.mark.parametrize("at", ["params", "compute"])
def test_a_loop_ends_where_one_device_ends(layout, at):
    wanted = grown(*arrays()[:2])
    with layout:
        turns, x = tr.named_jit(grown)(*arrays(at)[:2])
    assert int(turns) == int(wanted[0]) > 1
    np.testing.assert_allclose(jax.device_get(x.array), wanted[1].array, rtol=1e-4, atol=1e-4)


def test_a_loop_starts_where_its_body_puts_what_it_carries(layout):
    """A weight at rest is carried as it is used."""
    step = lambda w: 0.75 * (tr.shard(w, "compute") if tr.current_layout() else w)
    wanted = tr.while_loop(lambda w: (w * w).sum() > 1.0, step, arrays()[1])
    with layout:
        found = tr.named_jit(lambda w: tr.while_loop(lambda w: (w * w).sum() > 1.0, step, w))(arrays("params")[1])
        assert tr.typeof(found) == tr.typeof(tr.shard(arrays("params")[1], "compute"))
    np.testing.assert_allclose(jax.device_get(found.array), wanted.array, rtol=1e-5)


def chosen(x, w, b, settle):
    """One branch is a product's sums, the other elementwise; they lie otherwise."""

    def product(x, w):
        hidden = tr.tanh(tr.dot(x, w, over="embed"))
        return tr.einsum("batch mlp, embed mlp -> batch embed", hidden, w, settle=settle), x.sum()

    y, s = tr.cond(x.sum() > 0, product, lambda x, w: (x * b, (2 * x).sum()), x, w)
    return (y * y).sum() + s


@pytest.mark.slow
@pytest.mark.parametrize("settle", [True, False])
@pytest.mark.parametrize("at", ["params", "compute"])
def test_branches_and_their_gradients(layout, at, settle):
    both = tr.value_and_grad(lambda x, w, b: chosen(x, w, b, settle), argnums=(0, 1, 2))
    for sign in (1, -1):
        x, *weights = arrays()
        wanted = both(x * sign, *weights)
        with layout:
            x, *weights = arrays(at)
            found = tr.named_jit(both)(x * sign, *weights)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(jax.device_get(a), b, rtol=2e-4, atol=2e-4)


def test_a_choice_is_one_boolean():
    x, w, _ = arrays()
    with pytest.raises(tr.NamesError, match=r"a single boolean, got bool_\[batch=8\], in cond: reduce it with .all"):
        tr.cond(x.sum("embed") > 0, lambda x: x, lambda x: x, x)
    with pytest.raises(tr.NamesError, match="in while_loop: reduce"):
        tr.while_loop(lambda x: x > 0, lambda x: x, x)
    with pytest.raises(tr.TypeMismatch, match=r"same names, sizes and dtypes, got f32\[.*\] and bf16\[.*\], in cond"):
        tr.cond(x.sum() > 0, lambda x: x, lambda x: x.astype(jnp.bfloat16), x)
    with pytest.raises(tr.TypeMismatch, match=r"the same structure, got PyTreeDef\(\*\) and .* in cond"):
        tr.cond(x.sum() > 0, lambda x: x, lambda x: (x, x), x)
    with pytest.raises(tr.TypeMismatch, match=r"a carry like the one it takes, .* in the while_loop of `turn`"):

        def turn(x):
            return x.sum("batch")

        tr.while_loop(lambda x: x.sum() > 0, turn, x)


@pytest.mark.slow
def test_loops_and_choices_over_slices_carry_numbers():
    """JAX maps one over slices only if all of its carry lies on the mesh, also what began as a number of Python."""
    small = lambda carry: carry[1].sum() < 30.0
    loop = lambda row: tr.while_loop(small, lambda carry: (carry[0] + 1, carry[1] + 1.0), (0, row))
    choice = lambda row: tr.cond(row.sum() > 0, lambda count: count + 1, lambda count: count, 3)
    count = lambda carry, x: (tr.cond(x > 0, lambda n: n + 1, lambda n: n, carry[0]), carry[1] + x)
    through = lambda row: (*loop(row), choice(row), tr.fold(count, "embed")((0, row.sum()), row))
    rows = tr.named(np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32), "batch embed")
    wanted = tr.named_jit(tr.vmap(through, "batch"))(rows)
    with tr.Layout(tr.make_mesh(data=8), compute={"batch": "data"}):
        found = tr.named_jit(tr.vmap(through, "batch"))(rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(jax.device_get(a), b, rtol=1e-5), found, wanted)


def test_a_branch_over_slices_reads_a_parameter_that_is_an_argument():
    """JAX maps what a branch reads from around it as if each row had its own."""
    one = lambda row, w: tr.cond(row.sum() > 0, lambda row: (row * w).sum(), lambda row: row.sum(), row)
    rng = np.random.default_rng(0)
    rows, w = (tr.named(rng.normal(size=s).astype(np.float32), n) for s, n in (((8, 8), "batch embed"), (8, "embed")))
    wanted = jax.jit(tr.vmap(one, "batch"))(rows, w)
    with tr.Layout(tr.make_mesh(data=8), params={"embed": "data"}, compute={"batch": "data"}):
        w = tr.shard(w)
        found = tr.named_jit(tr.vmap(one, "batch"))(rows, w)
        with pytest.raises(tr.MeshError, match="whole along the mesh axes .* make it an argument of the function"):
            tr.named_jit(lambda rows, w: tr.vmap(lambda row: one(row, w), "batch")(rows))(rows, w)
    np.testing.assert_allclose(jax.device_get(found.array), wanted.array, rtol=1e-5)
