"""Products that hide their communication: the same values, gradients and bytes as without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from tests.equivalence import block
from tests.equivalence.test_block import one_device
from trellis.mesh import MeshError
from trellis.named import saving
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout

SIZES = {"batch": 4, "pos": 8, "embed": 16, "mlp": 24}
# Positions sliced where the width is not (sequence parallelism), or the stream's own width.
MAPS = {"positions": {"pos": "model"}, "features": {"embed": "model"}, "under context": {"pos": ("context", "model")}}


def layout(which="positions", overlap=("mlp",), **sizes) -> tr.Layout:
    sizes = sizes or ({"data": 2, "context": 2, "model": 2} if "context" in which else {"data": 2, "model": 4})
    rest = {"embed": "data", "mlp": "model"} if which != "features" else {"mlp": "model"}
    compute = {"batch": "data", "mlp": "model", **MAPS[which]}
    return tr.Layout(tr.make_mesh(**sizes), params=rest, compute=compute, overlap=overlap)


def coded(*names) -> tr.NamedArray:
    """Numbers that say which row and column they are, so that a slice in the wrong place is a wrong sum."""
    shape = [SIZES[n] for n in names]
    rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return tr.named(jnp.asarray(np.sin(rows) + rows % 7), names)


def loss(x, into, out, weights):
    hidden = tr.einsum("batch pos embed, embed mlp -> batch pos mlp", x, into)
    back = tr.einsum("mlp embed, batch pos mlp -> batch pos embed", out, hidden * 0.1)
    return (back * weights).sum().array


def run(layout, names=("batch", "pos", "embed")):
    given = [(names, "compute"), (("embed", "mlp"), "params"), (("mlp", "embed"), "params"), (names, "compute")]
    arrays = [coded(*n) for n, _ in given]
    if layout is None:
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays), None, None
    with layout:
        arrays = [tr.shard(x, which) for x, (_, which) in zip(arrays, given, strict=True)]
        step = tr.named_jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays).compile()
        return step(*arrays), tr.ledger(jax.value_and_grad(loss, (0, 1, 2)), *arrays), step


@pytest.mark.slow
@pytest.mark.parametrize("which", MAPS)
def test_values_gradients_and_bytes_are_those_without(which):
    wanted = run(None)[0]
    plain, plain_rows, _ = run(layout(which, overlap=()))
    found, rows, compiled = run(layout(which))
    types = lambda tree: [tr.typeof(x) for x in jax.tree.leaves(tree)]
    assert types(found) == types(plain)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5 * float(jnp.abs(want).max()))
    assert rows.per_axis() == plain_rows.per_axis()
    moved = {row.kind for row in rows.rows if row.axes == ("model",)}
    assert moved == {"permute"}
    assert {row.kind for row in plain_rows.rows if row.axes == ("model",)} == {"all-gather", "reduce-scatter"}
    # Forward slices of x pass and sums of the result, in two chunks; backward the same the other way round.
    steps = compiled.as_text().count(" collective-permute(") + compiled.as_text().count(" collective-permute-start(")
    assert steps == 2 * (1 + 2) * (1 if "context" in which else 3)


@pytest.mark.slow
def test_second_derivatives_are_those_of_one_device():
    def size(x, into, out):
        hidden = tr.tanh(tr.einsum("batch pos embed, embed mlp -> batch pos mlp", x, into) * 0.02)
        back = tr.einsum("mlp embed, batch pos mlp -> batch pos embed", out, hidden)
        return tr.tanh(back * 0.005).sum()

    def second(*given):
        return tr.grad(lambda *given: sum((g**2.0).sum() for g in tr.grad(size, (0, 1, 2))(*given)), (0, 1, 2))(*given)

    given = [coded("batch", "pos", "embed"), coded("embed", "mlp"), coded("mlp", "embed")]
    wanted = jax.jit(second)(*given)
    with layout():
        found = tr.named_jit(second)(tr.shard(given[0], "compute"), *map(tr.shard, given[1:]))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * float(jnp.abs(want.array).max()))


def test_in_bfloat16_sums_over_the_ring_are_float32():
    with layout("features"):
        x, w = tr.shard(coded("batch", "embed").astype("bfloat16"), "compute"), tr.shard(coded("embed", "mlp"))
        product = tr.named_jit(lambda x, w: tr.dot(x, w.astype("bfloat16"), over="embed"))
        found = product(x, w)
    want = np.einsum("be,em->bm", np.asarray(x.array, "f4"), np.asarray(w.array.astype("bfloat16"), "f4"))
    assert tr.typeof(found) == "bf16[batch/data=4 mlp/model=24]"
    # One rounding of the result, none of partial sums.
    np.testing.assert_array_equal(np.asarray(found.array), want.astype(found.dtype))


@pytest.mark.parametrize("dtype, wide, most", [("int8", None, 100), ("int16", jnp.int32, 30000)])
def test_sums_of_whole_numbers_over_the_ring_are_whole(dtype, wide, most):
    given = [np.random.default_rng(0).integers(-most, most, shape).astype(dtype) for shape in ((8, 16), (16, 24))]
    x, w = tr.named(given[0], "pos embed"), tr.named(given[1], "embed mlp")
    product = lambda x, w: tr.einsum("pos embed, embed mlp -> pos mlp", x, w, preferred_element_type=wide)
    with layout():
        found = product(tr.shard(x, "compute"), tr.shard(w))
    wanted = product(x, w)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def test_products_of_one_operand_share_its_passing():
    def two(x, a, b):
        return sum(y.sum().array for y in tr.dot_each(x, (a, b), over="embed"))

    with layout():
        x, w = tr.shard(coded("batch", "pos", "embed"), "compute"), tr.shard(coded("embed", "mlp"))
        rows = [r for r in tr.ledger(jax.grad(two, (0, 1, 2)), x, w, w * 2.0).rows if "pos" in r.what]
    assert [(r.kind, r.direction) for r in rows] == [("permute", "forward")] * 3 + [("permute", "backward")] * 6


def test_sums_that_are_left_pending_are_settled_once_with_others():
    with layout():
        h, w = tr.shard(coded("batch", "pos", "mlp"), "compute"), tr.shard(coded("mlp", "embed"))
        left = lambda h, w: tr.einsum("batch pos mlp, mlp embed -> batch pos embed", h, w, settle=False)
        found = jax.eval_shape(left, h, w)
        assert found.type.pending == ("model",)
        kinds = {row.kind for row in tr.ledger(lambda h, w: tr.settle(left(h, w) + left(h, w)), h, w).rows}
    assert kinds == {"all-gather", "reduce-scatter"}  # of the weight, and of the sum


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, saving.nothing, saving.products, saving.saved], ids=str)
def test_a_block_recomputes_and_keeps_what_it_would_without(policy):
    def step(overlap, run):
        choice = LayoutChoice(preset="fsdp_tensor_sequence", overlap=overlap)
        with make_layout(MeshSizes(data=2, model=4), choice, jax.devices()):
            layers, (x, weights) = tr.shard(block.parameters()), tr.shard(block.inputs(), "compute")
            grad = tr.named_jit(jax.value_and_grad(lambda *a: block.loss(*a, policy), argnums=(0, 1)))
            return run and grad(layers, x, weights), tr.ledger(grad, layers, x, weights)  # traced once for both

    _, plain = step((), run=False)
    found, rows = step(("mlp", "heads"), run=True)
    wanted = one_device()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)
    assert rows.per_axis() == plain.per_axis()
    large = [row for row in rows.rows if row.axes == ("model",) and "batch" in row.what]
    assert {row.kind for row in large} == {"permute"}
    # Queries, output, gate and down: a ring each way; keys, values and up use what queries and gate gathered.
    count = lambda direction: sum(row.times for row in large if row.direction == direction)
    assert count("forward") == count("backward") == block.CONFIG.layers * (2 + 2 * 2) * 3


def test_errors():
    with pytest.raises(MeshError) as error:
        layout(overlap=["heads"])
    assert str(error.value) == (
        "an overlapped name must be sliced over one mesh axis, got overlap 'heads' where compute has 'heads: "
        "nothing', in Layout: add 'heads' to compute, or remove it from overlap"
    )
    with pytest.raises(MeshError) as error:
        mesh = tr.make_mesh(data=2, context=2, model=2)
        tr.Layout(mesh, compute={"mlp": ("context", "model")}, overlap="mlp")
    assert str(error.value) == (
        "an overlapped name must be sliced over one mesh axis, got overlap 'mlp' where compute has 'mlp: "
        "context/model', in Layout: choose one of these axes"
    )
    with layout(), pytest.raises(tr.NotationError) as error:
        h, w = tr.zeros({"batch": 4, "pos": 6, "mlp": 24}), tr.zeros({"mlp": 24, "embed": 16})
        tr.named_jit(lambda h, w: tr.dot(h, w, over="mlp"))(tr.shard(h, {"mlp": "model"}), tr.shard(w))
    assert str(error.value) == (
        "a dimension must be divisible by the mesh axes that slice it, got pos=6 over model=4, in 'pos/model': make "
        "pos 4 or 8, or slice it over other axes"
    )
