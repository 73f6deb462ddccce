"""What authors say of kernels and loops in name scopes, and how it is counted."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.inspect.ledger import ledger_of
from trellis.inspect.work import work
from trellis.nn.attention.pattern import Pattern
from trellis.nn.moe import grouped_matmul
from trellis.nn.moe.blocks import BLOCKS
from trellis.nn.moe.grouped import grouped_products, grouped_sums
from trellis.nn.moe.rows import Taken
from trellis.plan.prepared import prepare
from trellis.plan.quick import quick_plan
from trellis.program import trace
from trellis.program.said import filled_rows, kernel_work, loop_turns
from trellis.recipes import load_run


def doubled(x, **options):
    def kernel(x, out):
        out[...] = 2 * x[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), **options)(x)


def test_a_kernel_says_its_work_or_estimates_it():
    x = jnp.ones((8, 128))

    def said(x):
        with kernel_work("product", 1234.0):
            return doubled(x)

    estimate = pl.CostEstimate(flops=77, bytes_accessed=1, transcendentals=0)
    for fn, kind, flops in (
        (said, "product", 1234.0),
        (lambda x: doubled(x, cost_estimate=estimate), "kernel", 77.0),
        (doubled, "kernel", 0.0),
    ):
        (piece,) = work(trace(fn, x))
        assert (piece.kind, piece.flops, piece.num_bytes) == (kind, flops, 2 * x.nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["v5e:2x2", "4xH100"])
def test_attention_kernels_say_theirs(on):
    where = target(on)
    run = load_run("llama_8b", {"model.layers": "2", "batch_size": "8", "microbatches": "1", "remat.policy": "none"})
    pieces = work(prepare(run, where, described_devices(where)).traced())
    found = {way: sum(p.flops * p.times for p in pieces if p.kind == "attention" and p.direction == way)
             for way in ("forward", "backward")}  # fmt: skip
    model, length = run.model, run.data.sequence_length
    pairs = length * (length + 1) / 2
    causal = 4 * 2 * model.layers * model.heads * model.head_dim * pairs  # two sequences on each device
    assert found == {"forward": causal, "backward": 2.5 * causal}


def test_pairs_of_patterns():
    def exact(pattern, length):
        places = jnp.arange(length)
        seen = pattern.visible(places, places)
        return length * length if seen is None else int(seen.sum())

    for pattern in (Pattern(), Pattern(causal=False), Pattern(window=16), Pattern(causal=False, window=16)):
        assert pattern.pairs(512, 512) == pytest.approx(exact(pattern, 512), rel=0.02)
    assert Pattern().pairs(128, 512) == Pattern().pairs(512, 512) / 4  # a slice of the queries


def test_loops_run_as_often_as_they_say():
    def rounds(x, n):
        def product(w):
            with loop_turns(1000, 300, before=1, by_load=True):
                return lax.fori_loop(1, n, lambda i, w: w @ x, w)

        return product(x)

    program = trace(rounds, jnp.ones((4, 4)), jnp.int32(3))
    times = lambda load: [piece.times for piece in work(program, load) if piece.kind == "product"]
    assert (times(1.0), times(1.3), times(0.25)) == ([3], [4], [])


def test_a_loop_within_a_loop_has_its_own_number():
    def inner(x):
        return lax.fori_loop(0, x.shape[0] + jnp.int32(0) * jnp.int32(x[0, 0]), lambda i, y: y @ x, x)

    def outer(x, n):
        with loop_turns(100, 10):
            return lax.fori_loop(0, n, lambda i, y: inner(y), x)

    program = trace(outer, jnp.ones((4, 4)), jnp.int32(3))
    assert [piece.times for piece in work(program) if piece.kind == "product"] == [10]


def grouped_flops(even: int, rows: int, groups: int, load: float, mesh=None) -> list[float]:
    """FLOPs of both gradients of grouped products over a buffer that an even load fills in part."""

    def loss(x, w, sizes):
        with filled_rows(even, rows):
            return jnp.sum(grouped_matmul(x, w, sizes))

    x, w, sizes = jnp.ones((rows, 16)), jnp.ones((groups, 16, 8)), jnp.array([even // groups] * groups)
    gradient = jax.grad(loss, argnums=(0, 1))
    if mesh is None:
        program = trace(gradient, x, w, sizes)
    else:
        with jax.set_mesh(mesh):
            program = trace(jax.shard_map(gradient, in_specs=P(), out_specs=P()), x, w, sizes)
    return [p.flops * p.times for p in work(program, load) if p.kind in ("product", "grouped")]


@pytest.mark.slow
def test_grouped_products_count_the_rows_that_are_filled():
    least = BLOCKS[-1]
    rows, even = 40 * least, 30 * least
    for load, filled in ((1.0, even), (31 / 30, 31 * least + least), (4.0, rows)):  # whole blocks of each group
        # Of both operands; nobody reads the result. By the weights a group's first block is counted as whole.
        by_rows, *by_weights = grouped_flops(even, rows, 2, load)
        assert by_rows == 2 * filled * 16 * 8
        assert len(by_weights) == 2 and by_rows <= sum(by_weights) <= 2 * rows * 16 * 8
    few, even = 8 * least, 6 * least  # which have no such block
    for load, filled in ((1.0, even), (7 / 6, 7 * least + least), (4.0, few)):
        assert grouped_flops(even, few, 2, load) == [2 * filled * 16 * 8] * 2


@pytest.mark.parametrize("on", ["v5e:2x2", "4xH100"])
def test_kernels_for_grouped_products_say_their_work(on):
    """The rows that are filled, and what completes the last tile of each group."""
    mesh = jax.sharding.Mesh(described_devices(target(on))[:1], "x", axis_types=(jax.sharding.AxisType.Explicit,))
    even, rows, groups, tile = 6 * 4096, 8 * 4096, 4, 512
    for load in (1.0, 1.2, 4.0):
        filled = min(load * even, rows)
        for counted in grouped_flops(even, rows, groups, load, mesh):
            assert -1 <= counted / (2 * 16 * 8) - filled <= groups * tile  # rows are whole


@pytest.mark.slow
def test_rows_that_kernels_gather_are_read_as_often_as_they_are_taken():
    """And nothing else of their array is: what is counted of each kernel is what it would be of sorted rows, and which
    rows they are."""
    mesh = jax.sharding.Mesh(described_devices(target("4xH100"))[:1], "x", axis_types=(jax.sharding.AxisType.Explicit,))
    rows, given = 4096, [jnp.ones(s, jnp.bfloat16) for s in ((512, 16), (4, 16, 8), (4, 8, 16))]
    taken = Taken(jnp.zeros(rows, jnp.int32), jnp.zeros((512, 8), jnp.int32))

    def counted(gathered: bool) -> list[tuple[float, ...]]:
        def loss(x, into, out):
            sizes = jnp.full(4, rows // 8, jnp.int32)
            with filled_rows(rows // 2, rows):
                (made,) = grouped_products(
                    x if gathered else taken.of(x), (into,), sizes, (), taken if gathered else None
                )
                if gathered:
                    return jnp.sum(grouped_sums(jnp.tanh(made), out, sizes, taken))
                return jnp.sum(taken.summed(grouped_products(jnp.tanh(made), (out,), sizes)[0]))

        with jax.set_mesh(mesh):
            step = jax.shard_map(jax.grad(loss, argnums=(0, 1, 2)), in_specs=P(), out_specs=P())
            pieces = [p for p in work(trace(step, *given)) if p.kind == "grouped"]
        return sorted((p.direction, p.dims, p.flops, p.num_bytes) for p in pieces)

    gathered, sorted_ = counted(True), counted(False)
    assert [piece[:3] for piece in gathered] == [piece[:3] for piece in sorted_]
    more = [ours[3] - theirs[3] for ours, theirs in zip(gathered, sorted_, strict=True)]
    assert sorted(more) == [0, *[taken.index.nbytes] * 4]  # of the first product's rows the gradient is sorted


@pytest.mark.slow
def test_further_rounds_of_an_exchange_run_where_the_load_is_uneven():
    options = {
        "model.experts": "8", "model.layers": "2", "model.embed": "256", "model.mlp": "512", "model.heads": "4",
        "model.kv_heads": "2", "model.vocab": "1024", "data.sequence_length": "256", "batch_size": "32",
        "model.head_dim": "64", "mesh.data": "1", "mesh.expert": "4", "microbatches": "1",
    }  # fmt: skip
    run, where = load_run("mixtral_8x7b", options), target("v5e:2x2")
    even, slack, more = (quick_plan(run, where, load=load) for load in (1.0, 1.5, 1.6))
    exchanged = lambda plan: plan.ledger.count(kind="all-to-all", axis="expert")
    assert exchanged(even) == exchanged(slack) < exchanged(more)
    assert even.seconds < slack.seconds < more.seconds
    assert even.memory.peak == more.memory.peak and even.model_flops == more.model_flops
    once = ledger_of(prepare(run, where, described_devices(where)).traced())
    assert once.count(kind="all-to-all") > exchanged(even)
    assert any(row.note.endswith("once a turn of a while loop") for row in once)
