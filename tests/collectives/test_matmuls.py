"""Overlapped matrix multiplications give the plain product's values and gradients, and move what a ring moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import trellis as tr
from tests.mesh.told import told
from trellis import bf16, f32
from trellis.collectives import Ring, RingError, feed_forward, gather_matmul, matmul_reduce, matmul_scatter
from trellis.notation import struct_shapes

SIZES = {"batch": 8, "pos": 16, "embed": 32, "mlp": 16, "heads": 4}
RINGS = [
    Ring(axis="y"),
    Ring(axis="y", both_ways=True),
    Ring(axis="y", chunks=2),
    Ring(axis="y", both_ways=True, chunks=2),
]
# verb, x, weight, result: over features, as published, and over positions, as sequence parallelism has it.
PRODUCTS = {
    "gather": (gather_matmul, "batch/x embed/y", "embed mlp/y", "batch/x mlp/y"),
    "gather positions": (gather_matmul, "batch/x pos/y embed", "embed mlp/y", "batch/x pos mlp/y"),
    "scatter": (matmul_scatter, "batch/x mlp/y", "mlp/y embed", "batch/x embed/y"),
    "scatter positions": (matmul_scatter, "batch/x pos mlp/y", "mlp/y embed", "batch/x pos/y embed"),
    "reduce": (matmul_reduce, "batch/x mlp/y", "mlp/y embed", "batch/x embed"),
    "reduce by heads": (matmul_reduce, "heads batch/x mlp/y", "heads mlp/y embed", "heads batch/x embed"),
    "gather a part": (gather_matmul, "batch embed/y pos/x", "pos/x embed mlp/y", "batch mlp/y +x"),
    "scatter a part": (matmul_scatter, "batch pos mlp/y/x", "mlp/y/x embed", "batch pos/y embed +x"),
    "reduce a part": (matmul_reduce, "batch mlp/x/y", "mlp/x/y embed", "batch embed +x"),
}


@pytest.fixture(scope="module")
def mesh():
    mesh = tr.make_mesh(x=2, y=4)
    with jax.set_mesh(mesh):
        yield mesh


def coded(mesh, text, scale=1.0):
    """Numbers that say which row and column they are, so that a slice in the wrong place is a wrong sum."""
    like = struct_shapes(f32[text], SIZES, mesh)
    rows = jnp.arange(like.size, dtype=jnp.float32).reshape(like.shape)
    return jax.device_put(scale * (jnp.sin(rows) + rows % 7), like.sharding)


def program(verb, x, weight, result, ring):
    settled = result.removesuffix(" +x")

    def product(a: f32[x], b: f32[weight]) -> f32[settled]:
        return tr.reshard(f"{result} -> {settled}", verb(f"{x}, {weight} -> {result}", a, b, ring=ring))

    return tr.shard_map(product)


def plain(x, weight, result):
    letters = {name: name[0] for name in SIZES}
    names = lambda text: "".join(letters[word.split("/")[0]] for word in text.split() if word[0] != "+")
    return lambda a, b: jnp.einsum(f"{names(x)},{names(weight)}->{names(result)}", a, b)


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-3), got, wanted)


def check(mesh, which, ring):
    verb, *types = PRODUCTS[which]
    a, b = coded(mesh, types[0]), coded(mesh, types[1], 0.5)
    weights = coded(mesh, types[2].removesuffix(" +x"))

    def total(product, weights):
        return lambda a, b: jnp.sum(product(a, b) * weights)

    ours = program(verb, *types, ring)
    value, gradients = jax.jit(lambda a, b: (ours(a, b), jax.grad(total(ours, weights), (0, 1))(a, b)))(a, b)
    assert jax.tree.map(tr.typeof, gradients) == tuple(map(tr.typeof, (a, b)))
    a, b, weights = map(jnp.asarray, jax.device_get((a, b, weights)))
    want = plain(*types)
    close(value, want(a, b))
    close(gradients, jax.grad(total(want, weights), (0, 1))(a, b))


@pytest.mark.slow
@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("which", PRODUCTS)
def test_values_and_gradients_are_the_plain_products(mesh, which, ring):
    check(mesh, which, ring)


@pytest.mark.slow
@pytest.mark.parametrize("which", PRODUCTS)
def test_forward_mode_and_second_derivatives(mesh, which):
    verb, *types = PRODUCTS[which]
    ours, want = program(verb, *types, RINGS[3]), plain(*types)
    operands, changes = ((coded(mesh, types[0], s), coded(mesh, types[1], s / 2)) for s in (1.0, 0.3))
    weights = coded(mesh, types[2].removesuffix(" +x"), 0.1)

    def both(product):
        slope = lambda weights: jax.grad(lambda a, b: jnp.sum(jnp.sin(product(a, b) / 100) * weights), (0, 1))
        along = lambda weights, operands, changes: (
            jax.jvp(product, operands, changes),
            jax.jvp(slope(weights), operands, changes),
        )
        return along

    got = jax.jit(both(ours))(weights, operands, changes)
    wanted = both(want)(*jax.tree.map(jnp.asarray, jax.device_get((weights, operands, changes))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * abs(b).max()), got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 8), (8, 1)], ids=str)
@pytest.mark.parametrize("which", PRODUCTS)
def test_on_a_long_ring_and_on_none(sizes, which):
    mesh = tr.make_mesh(x=sizes[0], y=sizes[1])
    with jax.set_mesh(mesh):
        check(mesh, which, Ring(axis="y", both_ways=sizes[1] > 1))


@tr.struct
class Weights:
    gate: f32["embed/x mlp/y"]
    up: f32["embed/x mlp/y"]
    down: f32["mlp/y embed/x"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["batch/x pos/y embed", "batch/x pos embed/y"])
def test_a_feed_forward_block_with_gathered_weights(mesh, where):
    def ours(x: f32[where], w: Weights) -> f32[where]:
        gate, up = (tr.all_gather("embed/x mlp/y -> embed mlp/y ~x", v) for v in (w.gate, w.up))
        down = tr.all_gather("mlp/y embed/x -> mlp/y embed ~x", w.down)
        text = f"{where}, embed mlp/y ~x, mlp/y embed ~x"
        rings = Ring(axis="y", both_ways=True), Ring(axis="y", both_ways=True, chunks=2)
        return feed_forward(text, x, [gate, up], down, lambda a, b: jax.nn.silu(a) * b, ring=rings)

    x = coded(mesh, where, 0.01)
    w = Weights(*(coded(mesh, t, 0.1) for t in ("embed/x mlp/y", "embed/x mlp/y", "mlp/y embed/x")))
    block = tr.shard_map(ours)
    text = lambda fn: lambda x, w: jnp.sum(jnp.sin(fn(x, w)))
    value, gradients = jax.jit(jax.value_and_grad(text(block), (0, 1)))(x, w)
    want = lambda x, w: (jax.nn.silu(x @ w.gate) * (x @ w.up)) @ w.down
    x, w = jax.tree.map(jnp.asarray, jax.device_get((x, w)))
    wanted, by = jax.value_and_grad(text(want), (0, 1))(x, w)
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * jnp.abs(b).max()), gradients, by)


def test_only_slices_travel_and_the_gathered_operand_is_never_whole(mesh):
    verb, *types = PRODUCTS["gather"]
    ours = program(verb, *types, RINGS[1])
    a, b = coded(mesh, types[0]), coded(mesh, types[1])
    rows = tr.ledger(jax.value_and_grad(lambda a, b: jnp.sum(ours(a, b)), (0, 1)), a, b)
    size = SIZES["batch"] * SIZES["embed"] * 4 // 8
    # Forward each slice goes to three devices. Backward the same slices again for the weight's gradient, and the
    # partial sums of the gradient of `x`.
    sent = {d: sum(r.total for r in rows if r.direction == d and r.kind == "permute") for d in ("forward", "backward")}
    assert sent == {"forward": 3 * size, "backward": 6 * size}
    assert {r.what for r in rows if r.kind == "permute"} == {"batch/x embed/y -> batch/x embed/y"}
    assert all(r.source.startswith("test_matmuls.py") for r in rows)
    # The weight is the same along x: its gradient is summed there.
    assert [(r.kind, r.axes) for r in rows if r.kind != "permute" and r.payload > 4] == [("all-reduce", ("x",))]


@pytest.mark.slow
def test_sums_are_in_float32_where_slices_travel_in_bfloat16(mesh):
    def ours(a: bf16["batch/x embed/y"], b: bf16["embed mlp/y"]) -> bf16["batch/x mlp/y"]:
        return gather_matmul("batch/x embed/y, embed mlp/y -> batch/x mlp/y", a, b, ring=RINGS[0])

    a, b = (jnp.round(coded(mesh, t)).astype(jnp.bfloat16) for t in ("batch/x embed/y", "embed mlp/y"))
    got = tr.shard_map(ours)(a, b)
    a, b = (np.asarray(jax.device_get(v), np.float32) for v in (a, b))
    np.testing.assert_array_equal(np.asarray(got), (a @ b).astype(got.dtype))


GATHER, SCATTER = PRODUCTS["gather"], PRODUCTS["scatter"]
BAD = [
    (
        (gather_matmul, "batch/x embed/y", "embed mlp/y", "batch/x mlp/y"),
        Ring(axis="z"),
        "a ring must run along an axis of the mesh, got 'z' where the mesh has x, y, in gather_matmul('batch/x "
        "embed/y, embed mlp/y -> batch/x mlp/y', ring=Ring('z')): use one of these, or add 'z' to the mesh (size 1 "
        "will do)",
    ),
    (
        GATHER,
        Ring(axis="y", chunks=16),
        "a slice needs at least one row for each chunk, got embed=8 on a device and chunks=16, in "
        "gather_matmul('batch/x embed/y, embed mlp/y -> batch/x mlp/y', ring=Ring('y')): use 8 chunks or fewer",
    ),
    (
        GATHER,
        Ring(axis="y", chunks=3),
        "a slice must split into equal chunks, got embed=8 on a device and chunks=3, in gather_matmul('batch/x "
        "embed/y, embed mlp/y -> batch/x mlp/y', ring=Ring('y')): use 2 chunks, or a multiple of 3 rows",
    ),
    (
        (matmul_scatter, "batch/x mlp/y", "mlp/y odd", "batch/x odd/y"),
        Ring(axis="y"),
        "'odd' must be divisible by the number of devices in the ring, got odd=6 on y=4 devices, in "
        "matmul_scatter('batch/x mlp/y, mlp/y odd -> batch/x odd/y', ring=Ring('y')): use a multiple of 4",
    ),
    (
        (matmul_reduce, "batch/x mlp/y", "mlp/y odd", "batch/x odd"),
        Ring(axis="y"),
        "a dimension of the result must be divisible by the number of devices in the ring, got odd=6 on y=4 devices, "
        "in matmul_reduce('batch/x mlp/y, mlp/y odd -> batch/x odd', ring=Ring('y')): use a multiple of 4",
    ),
    (
        (matmul_reduce, "heads mlp/y", "heads mlp/y embed", "heads embed"),
        Ring(axis="y", chunks=2),
        "chunks are rows of a name that only the first operand and the result have, got 'heads mlp/y', 'heads mlp/y "
        "embed' and 'heads embed' with chunks=2, in matmul_reduce('heads mlp/y, heads mlp/y embed -> heads embed', "
        "ring=Ring('y')): use 1 chunk, or write 'batch in, in out -> batch out'",
    ),
    (
        (gather_matmul, "batch/x embed", "embed mlp/y", "batch/x mlp/y"),
        Ring(axis="y"),
        "the ring's axis must slice a name of the first operand, got 'batch/x embed', which 'y' does not slice, in "
        "gather_matmul('batch/x embed, embed mlp/y -> batch/x mlp/y', ring=Ring('y')): write which name it slices",
    ),
    (
        (matmul_scatter, "batch/x mlp", "mlp embed", "batch/x embed/y"),
        Ring(axis="y"),
        "'y' must slice the summed name in the same way in both operands, got 'batch/x mlp' and 'mlp embed', in "
        "matmul_scatter('batch/x mlp, mlp embed -> batch/x embed/y', ring=Ring('y')): write 'batch/x in/y, in/y out "
        "-> ...', so that each device has a partial sum",
    ),
    (
        (matmul_scatter, "batch mlp/y/x", "mlp/y/x embed", "batch embed/y"),
        Ring(axis="y"),
        "a sum over a sliced name must be marked as pending, got 'mlp/x' summed and no '+x' in the result, in "
        "matmul_scatter('batch mlp/y/x, mlp/y/x embed -> batch embed/y', ring=Ring('y')): write '-> batch embed/y +x', "
        'and settle it with reshard("batch embed/y +x -> batch embed/y", ...)',
    ),
    (
        (matmul_scatter, "batch/x mlp/y", "mlp/y embed/x", "batch/x embed/y"),
        Ring(axis="y"),
        "a mesh axis can slice only one name in a product, got 'x' on 'batch' and on 'embed', where each device would "
        "multiply blocks that do not match, in matmul_scatter('batch/x mlp/y, mlp/y embed/x -> batch/x embed/y', "
        """ring=Ring('y')): gather one, as in reshard("mlp/y embed/x -> mlp/y embed ~x", ...)""",
    ),
    (
        (gather_matmul, "batch/x pos/y embed", "embed mlp", "batch/x pos mlp"),
        Ring(axis="y"),
        "the ring's axis must slice the result, or all devices would compute the same, got 'batch/x pos mlp', in "
        "gather_matmul('batch/x pos/y embed, embed mlp -> batch/x pos mlp', ring=Ring('y')): slice the second operand "
        "over 'y', or gather the first with all_gather",
    ),
]


@pytest.mark.parametrize(("product", "ring", "message"), BAD, ids=[b[2][:40] for b in BAD])
def test_refused_before_anything_is_compiled(mesh, product, ring, message):
    sizes = SIZES | {"odd": 6}
    verb, x, weight, result = product
    if "odd/y" in result:  # the result's own annotation would be refused first
        result_type = f32["batch/x odd"]
    else:
        result_type = f32[result]

    def ours(a: f32[x], b: f32[weight]) -> None:
        return verb(f"{x}, {weight} -> {result}", a, b, ring=ring)

    ours.__annotations__["return"] = result_type
    a, b = (struct_shapes(f32[t], sizes, mesh) for t in (x, weight))
    with pytest.raises(tr.NotationError) as caught:
        jax.eval_shape(tr.shard_map(ours), a, b)
    assert message in told(caught, by_line=True)


def test_a_ring_has_at_least_one_chunk():
    for chunks in (0, 1.5):
        message = f"a slice must travel in at least one chunk, got chunks={chunks}, in Ring('y'): pass 1 or more"
        with pytest.raises(RingError, match=re.escape(message)):
            Ring(axis="y", chunks=chunks)


def test_a_product_has_a_weight(mesh):
    text = "batch/x embed/y, embed mlp/y, mlp/y embed"
    x, down = (struct_shapes(f32[t], SIZES, mesh) for t in ("batch/x embed/y", "mlp/y embed"))
    none = lambda x, down: feed_forward(text, x, [], down, lambda *given: given, ring=Ring(axis="y"))
    manual = jax.shard_map(none, mesh=mesh, in_specs=(P("x", "y"), P("y")), out_specs=P("x", "y"))
    with pytest.raises(tr.NotationError, match="a product in a ring needs a weight, got none, in gather_matmul"):
        jax.eval_shape(manual, x, down)


def test_what_a_reduced_product_gathers_is_named(mesh):
    """Also where another mesh axis slices the name that the ring gathers."""
    mesh = tr.make_mesh(x=2, y=2, z=2)

    @tr.shard_map
    def ours(a: f32["batch/x embed/y"], b: f32["embed/y mlp/z"]) -> f32["batch/x mlp/z"]:
        return matmul_reduce("batch/x embed/y, embed/y mlp/z -> batch/x mlp/z", a, b, ring=Ring(axis="y"))

    with jax.set_mesh(mesh):
        rows = tr.ledger(ours, *(struct_shapes(f32[t], SIZES, mesh) for t in ("batch/x embed/y", "embed/y mlp/z")))
    gathers = [row.what for row in rows if row.kind == "all-gather"]
    assert gathers == ["batch/x mlp/z/y -> batch/x mlp/z"]


def test_outside_of_manual_mode(mesh):
    message = "a ring must run in manual mode over all mesh axes, got another mode"
    with pytest.raises(RingError, match=message):
        gather_matmul("a/y b, b c -> a c", jnp.ones((4, 2)), jnp.ones((2, 2)), ring=Ring(axis="y"))


def test_in_manual_mode_over_some_axes(mesh):
    def some(x: f32["a/y b"], w: f32["b c"]) -> f32["a c"]:
        return gather_matmul("a/y b, b c -> a c", x, w, ring=Ring(axis="y"))

    types = (struct_shapes(f32[t], dict(a=4, b=2, c=2), mesh) for t in ("a/y b", "b c"))
    with pytest.raises(RingError) as caught:
        jax.eval_shape(tr.shard_map(some, axes={"y"}), *types)
    assert "got a shard_map with axes={'y'}, in" in str(caught.value) and ": leave out its axes" in str(caught.value)


def test_a_block_has_three_types(mesh):
    message = "a feed-forward block needs three types, of x, of the weights into it and of the weight out of it, got 1"
    with pytest.raises(RingError, match=message):
        feed_forward("batch embed", None, [], None, None, ring=Ring(axis="y"))


def test_a_block_leaves_no_sum_pending(mesh):
    def block(x: f32["batch embed/y"], w: f32["embed mlp/y/x"], out: f32["mlp/y/x embed"]) -> f32["batch embed/y"]:
        return feed_forward("batch embed/y, embed mlp/y/x, mlp/y/x embed", x, [w], out, jnp.tanh, ring=Ring(axis="y"))

    types = (struct_shapes(f32[t], SIZES, mesh) for t in ("batch embed/y", "embed mlp/y/x", "mlp/y/x embed"))
    with pytest.raises(RingError) as caught:
        jax.eval_shape(tr.shard_map(block), *types)
    assert "a feed-forward block sums over names that its ring's axis alone slices, got 'mlp/y/x', in" in told(caught)
