"""Grouped products by every platform's way: interpreted here, and compiled for machines that are not here."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.mesh.topology import target_devices
from trellis.nn.moe import blocks, grouped_matmul, mosaic, tiles, triton

ROWS, INNER, COLUMNS = 300, 40, 24
# Even, with empty groups, one that has all, rows left over, more rows than a tile and fewer, nothing at all.
LOADS = [(75, 75, 75, 75), (5, 0, 130, 9), (0, 0, 300, 0), (0, 0, 0, 299), (128, 0, 0, 128), (1, 2, 3, 4), (0, 0, 0, 0)]
PRODUCTS = {
    "blocks": blocks.multiply,
    "triton": functools.partial(triton.multiply, interpret=True),
    "mosaic": mosaic.multiply,
}
ROWS_GRADIENTS = {
    "blocks": blocks.rows_gradient,
    "triton": functools.partial(triton.rows_gradient, interpret=True),
    "mosaic": functools.partial(mosaic.rows_gradient, interpret=True),
}
GRADIENTS = {
    "blocks": blocks.weights_gradient,
    "triton": functools.partial(triton.weights_gradient, interpret=True),
    "mosaic": functools.partial(mosaic.weights_gradient, interpret=True),
}


def drawn(sizes, count=ROWS):
    """Rows, gradients and weights; no numbers past the last group, which nobody may read."""
    shapes = (count, INNER), (count, COLUMNS), (len(sizes), INNER, COLUMNS)
    random = np.random.default_rng(0)
    rows, d, weights = (random.standard_normal(shape, np.float32) for shape in shapes)
    rows[sum(sizes) :] = d[sum(sizes) :] = np.nan
    return rows, d, weights


def parts(sizes):
    return enumerate(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))


@pytest.mark.slow
@pytest.mark.parametrize("platform", PRODUCTS)
def test_products_are_those_of_each_group(platform):
    multiply, back = jax.jit(PRODUCTS[platform]), jax.jit(ROWS_GRADIENTS[platform])
    for sizes in LOADS:
        rows, d, weights = drawn(sizes)
        other, more = 2 * d[:, :16], weights[:, :, :16] + 1  # of a second product, which is narrower
        made = np.asarray(multiply(rows, weights, jnp.array(sizes)))
        alone = np.asarray(back((d,), (weights,), jnp.array(sizes)))
        both = np.asarray(back((d, other), (weights, more), jnp.array(sizes)))
        for group, mine in parts(sizes):
            first, second = d[mine] @ weights[group].T, other[mine] @ more[group].T
            np.testing.assert_allclose(made[mine], rows[mine] @ weights[group], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(alone[mine], first, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(both[mine], first + second, rtol=1e-4, atol=2e-4)


@pytest.mark.slow
def test_a_sum_in_parts(monkeypatch):
    monkeypatch.setattr(mosaic, "SUMMED", 256)
    monkeypatch.setattr(mosaic, "ACROSS", 128)
    sizes = (5, 0, 130, 9)
    random = np.random.default_rng(0)
    shapes = (160, 384), (4, 200, 384), (160, 256), (4, 200, 256)  # in three parts, and in two
    d, weights, other, more = (random.standard_normal(shape, np.float32) for shape in shapes)
    made = np.asarray(mosaic.rows_gradient((d, other), (weights, more), jnp.array(sizes), interpret=True))
    for group, mine in parts(sizes):
        wanted = d[mine] @ weights[group].T + other[mine] @ more[group].T
        np.testing.assert_allclose(made[mine], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("columns", "num_bytes", "across"),
    [
        (7168, 2 * 2 * 2048, 1024),
        (4096, 2 * 4 * 2048, 512),
        (2880, 2 * 2 * 2880, 1024),
        (5000, 2 * 2 * 5000, 256),
        (1000, 2 * 2 * 5000, 384),
    ],
)
def test_tiles_of_all_operands_fit_into_vector_memory(columns, num_bytes, across):
    assert mosaic._across(columns, 512, num_bytes) == across


@pytest.mark.slow
@pytest.mark.parametrize("platform", GRADIENTS)
def test_gradients_are_those_of_each_group(platform):
    gradient = jax.jit(GRADIENTS[platform], static_argnums=3)
    for sizes in LOADS:
        rows, d, _ = drawn(sizes)
        made = np.asarray(gradient(rows, d, jnp.array(sizes), jnp.float32))
        for group, mine in parts(sizes):
            np.testing.assert_allclose(made[group], rows[mine].T @ d[mine], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_gradient_with_room_for_more_rows():
    sizes = (5, 0, 130, 9)
    rows, d, _ = drawn(sizes)
    how = dict(dtype=jnp.float32, interpret=True)
    made, longer = (
        np.asarray(mosaic.weights_gradient(rows, d, jnp.array(sizes), **how, down_to=more))
        for more in (None, INNER + 24)
    )
    assert longer.shape == (len(sizes), INNER + 24, COLUMNS)
    np.testing.assert_array_equal(longer[:, :INNER], made)


@pytest.mark.slow
@pytest.mark.parametrize("outer", [1, 2])
def test_weights_are_read_and_written_as_they_lie(outer):
    sizes = (5, 0, 130, 9)
    rows, d, weights = drawn(sizes)
    further = np.random.default_rng(1).standard_normal(weights.shape, np.float32)
    made = triton.multiply(rows, weights, jnp.array(sizes), outer=outer, interpret=True)
    summed = triton.rows_gradient((d, d), (weights, further), jnp.array(sizes), outer=(outer, 0), interpret=True)
    gradient = triton.weights_gradient(rows, d, jnp.array(sizes), jnp.float32, outer=outer, interpret=True)
    assert gradient.shape == weights.shape
    made, summed, gradient = map(np.asarray, (made, summed, gradient))
    for group, mine in parts(sizes):
        np.testing.assert_allclose(made[mine], rows[mine] @ weights[group], rtol=1e-4, atol=1e-4)
        wanted = d[mine] @ (weights[group] + further[group]).T
        np.testing.assert_allclose(summed[mine], wanted, rtol=1e-4, atol=2e-4)
        np.testing.assert_allclose(gradient[group], rows[mine].T @ d[mine], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, outer", [("float32", 0), ("bfloat16", 1), ("float32", 2)])
def test_rows_are_gathered_in_the_kernels(dtype, outer):
    """Those of tokens that several rows are of, and one that is nobody's; where rows of nobody are from is anything.
    And written elsewhere, each to a place of its own."""
    how = dict(outer=outer, interpret=True)
    product = jax.jit(functools.partial(triton.multiply, **how))
    back = jax.jit(functools.partial(triton.rows_gradient, outer=(outer,), interpret=True))
    gradient = jax.jit(functools.partial(triton.weights_gradient, dtype=jnp.float32, **how))
    random, few, rounded = np.random.default_rng(1), 70, 1e-6 if dtype == "float32" else 2**-8
    as_held = lambda x: np.array(jnp.array(x, dtype), np.float32)

    def held(found, x, y):
        """A product of numbers that the dtype holds, summed in float32 and rounded once."""
        assert (np.abs(as_held(found) - x @ y) <= rounded * (np.abs(x) @ np.abs(y))).all()

    for sizes in LOADS:
        rows, d, weights = map(as_held, drawn(sizes))
        tokens, of_tokens = (as_held(x[:few]) for x in drawn(LOADS[0])[:2])
        tokens[-1] = of_tokens[-1] = np.nan
        sources = random.integers(0, few - 1, ROWS).astype(np.int32)
        sources[sum(sizes) :] = 2**30
        targets = random.permutation(ROWS).astype(np.int32)
        x, d_x, sorted_x, sorted_d, w = (jnp.array(a, dtype) for a in (tokens, of_tokens, rows, d, weights))
        made = product(x, w, jnp.array(sizes), sources=sources)
        placed = product(sorted_x, w, jnp.array(sizes), targets=targets)
        returned = back((d_x,), (w,), jnp.array(sizes), sources=sources, targets=targets)
        first = gradient(x, sorted_d, jnp.array(sizes), sources=sources)
        last = gradient(sorted_x, d_x, jnp.array(sizes), d_sources=sources)
        for group, mine in parts(sizes):
            taken, d_taken = tokens[sources[mine]], of_tokens[sources[mine]]
            held(made[mine], taken, weights[group])
            held(placed[targets[mine]], rows[mine], weights[group])
            held(returned[targets[mine]], d_taken, weights[group].T)
            held(first[group], taken.T, d[mine])
            held(last[group], rows[mine].T, d_taken)


def test_blocks_are_traced_once_for_each_type(monkeypatch):
    in_blocks, traced = blocks._in_blocks, []
    monkeypatch.setattr(blocks, "_in_blocks", lambda *given: traced.append(1) or in_blocks(*given))
    rows, weights, sizes = jnp.ones((37, 5)), jnp.ones((3, 5, 5)), jnp.array([9, 0, 28])

    def both(rows):
        made = blocks.multiply(rows, weights, sizes)
        return made, blocks.weights_gradient(rows, made, sizes, jnp.float32)

    jax.make_jaxpr(both)(rows)
    first = len(traced)
    jax.make_jaxpr(lambda rows: both(both(rows)[0]))(rows)
    assert 0 < first == len(traced)


@pytest.mark.slow
def test_blocks_multiply_the_rows_and_few_besides(monkeypatch):
    """Of groups that nearly fill a large block, take several, or are empty; loops run in Python, and are counted."""
    sizes, multiplied, product = (481, 700, 0, 96), [], jax.lax.dot_general

    def counted(x, y, numbers, **options):
        multiplied.append((*x.shape, *y.shape))
        return product(x, y, numbers, **options)

    monkeypatch.setattr(jax.lax, "dot_general", counted)
    rows, d, weights = drawn(sizes, 1300)
    with jax.disable_jit():
        made = blocks.multiply(rows, weights, jnp.array(sizes))
        forward = sum(x[0] for x in multiplied)
        back = blocks.multiply(d, weights, jnp.array(sizes), swapped=True)
        backward = sum(x[0] for x in multiplied) - forward
        before = len(multiplied)
        gradient = blocks.weights_gradient(rows, d, jnp.array(sizes), jnp.float32)
        summed = sum(x[1] for x in multiplied[before:])
    for count in (forward, backward, summed):
        assert sum(sizes) <= count <= sum(sizes) + len(sizes) * blocks.VACANT
    for group, mine in parts(sizes):
        np.testing.assert_allclose(made[mine], rows[mine] @ weights[group], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(back[mine], d[mine] @ weights[group].T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gradient[group], rows[mine].T @ d[mine], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_tiles_hold_the_rows_and_no_more_than_completes_them():
    for sizes in LOADS:
        count = int(jax.jit(lambda sizes: tiles.tiles_of(sizes, 16).count)(jnp.array(sizes)))

        @jax.jit
        def placed(sizes, count=count):
            found = tiles.tiles_of(sizes, 16)
            return found.group(jnp.arange(count)), found.first(jnp.arange(count)), found.ends

        group, first, ends = (x.tolist() for x in placed(jnp.array(sizes)))
        seen = [(g, r) for g, f in zip(group, first, strict=True) for r in range(f, min(f + 16, ends[g]))]
        assert seen == [(g, r) for g, mine in parts(sizes) for r in mine]
        assert count * 16 <= sum(sizes) + 16 * len(sizes)


def compiled(name, rows=4096, inner=256, columns=512, groups=4):
    """The text of the products and both gradients for one device of a target, and bytes of temporaries."""
    mesh = jax.sharding.Mesh(target_devices(name)[:1], "x", axis_types=(AxisType.Explicit,))
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
        for shape, dtype in (
            ((rows, inner), jnp.bfloat16),
            ((groups, inner, columns), jnp.bfloat16),
            ((groups,), jnp.int32),
            ((rows, columns), jnp.bfloat16),
        )
    ]

    def both(rows, weights, sizes, d):
        made, pull = jax.vjp(lambda *a: grouped_matmul(*a, sizes), rows, weights)
        return made, pull(d)

    sliced = jax.shard_map(both, in_specs=P(), out_specs=P())
    with jax.set_mesh(mesh):
        done = jax.jit(sliced).lower(*given).compile()
    return done.as_text(), done.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_tpus_have_kernels_and_no_dense_product(name):
    text, temporaries = compiled(name)
    for kernel in ("ragged-dot-none", "grouped_rows_gradient", "grouped_gradient"):
        assert len(re.findall(rf"%{kernel}[\w.]* = ", text)) == 1
    assert not re.search(r"= \S+ (dot|convolution)\(", text)
    assert not re.search(r"bf16\[4,(256,512|512,256)\]\S+ (copy|transpose)\(", text)  # nobody turns weights
    assert temporaries < 2 * 2**20  # tables of tiles, and what JAX 0.12 copies of the rows


def test_gpu_kernels_ask_for_no_signs():
    """Pallas reads a sign, as of `//`, in the mesh around: inside of a pipeline's stage the kernel's is another."""
    rows, weights, d, sizes = jnp.ones((300, 32)), jnp.ones((4, 32, 64)), jnp.ones((300, 64)), jnp.ones(4, jnp.int32)
    all_three = lambda: (
        triton.multiply(rows, weights, sizes, sources=jnp.arange(300)),
        triton.rows_gradient((d,), (weights,), sizes),
        triton.weights_gradient(rows, d, sizes, jnp.float32),
    )
    kernels = [e.params["jaxpr"] for e in jax.make_jaxpr(all_three)().eqns if e.primitive.name == "pallas_call"]
    assert len(kernels) == 3 and not any("= sign " in str(kernel) for kernel in kernels)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # in JAX 0.12
@pytest.mark.parametrize("name, node, outer", [("h100:1", "8xH100", 0), ("b200:1", "8xB200", 1)])
def test_gpus_have_kernels_and_no_dense_product(name, node, outer):
    """Compiled where JAX's CUDA plugin is; lowered, which makes the kernels' own programs, where it is not."""
    if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13"):
        text, temporaries = compiled(name)
        assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
        assert not re.search(r"= \S+ dot\(", text)
        assert temporaries < 2**20
    given = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 256), (4, 256, 512), (4096, 512))]
    sizes, sources = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (4, 16_384))
    all_three = lambda rows, weights, d, sizes, sources: (
        triton.multiply(rows, weights, sizes, outer=outer),
        triton.rows_gradient((d, d), (weights, weights), sizes, outer=(outer, 0)),  # one kernel sums both
        triton.weights_gradient(rows, d, sizes, jnp.bfloat16, outer=outer),
        triton.multiply(rows, weights, sizes, sources=sources, outer=outer),
        triton.rows_gradient((d,), (weights,), sizes, sources=sources, targets=sources),
        triton.weights_gradient(rows, d, sizes, jnp.bfloat16, sources=sources, d_sources=sources, outer=outer),
    )
    mesh = jax.sharding.Mesh(described_devices(target(node))[:1], "x", axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(all_three).trace(*given, sizes, sources).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@__gpu$xla.gpu.triton") == 6 and "stablehlo.dot_general" not in lowered
