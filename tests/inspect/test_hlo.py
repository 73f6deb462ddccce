"""The reader of compiled programs' text, on what CPU, GPU and TPU compilers print."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh

import trellis as tr
from trellis.inspect import collectives, compiled_memory, flops, products, scheduled_cycles
from trellis.inspect.compiled import gathered_bytes
from trellis.inspect.hlo import parse_program, replica_groups
from trellis.mesh.topology import slice_devices
from trellis.program.said import loop_turns
from trellis.program.scopes import sometimes

MESH = AbstractMesh((4, 2), ("data", "model"))
COLUMNS = [(0, 2, 4, 6), (1, 3, 5, 7)]  # along the first of two axes
ROWS = [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", COLUMNS),
        ("[4,2]<=[8]", ROWS),
        ("[2,4]<=[4,2]T(1,0)", COLUMNS),
        ("[4,2]<=[2,2,2]T(0,2,1)", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", COLUMNS),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ROWS),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}", COLUMNS),
        ("mesh['axis_0'=2,'axis_1'=2], device_ids=(3,1,2,0) {'axis_1'}", [(3, 1), (2, 0)]),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['axis_0'=8] {'axis_0':(2)4}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ],
)
def test_replica_groups(text, groups):
    assert replica_groups(text) == groups


def test_replica_groups_in_a_new_form_are_refused():
    with pytest.raises(ValueError, match=r"replica groups in an unknown form: \[x\]"):
        replica_groups("[x]")


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="must have an ENTRY computation, and this text has none: pass as_text()"):
        parse_program("HloModule nothing")


# Lines as the compilers print them, with the parts that say nothing here left out.
GPU = (Path(__file__).parent / "gpu.hlo").read_text()


def test_a_gpu_program():
    rows = collectives(GPU, MESH).rows
    assert [(r.kind, r.axis, r.payload, r.wire, r.direction, r.note) for r in rows] == [
        ("all-gather", "data", 2**21, 3 * 2**19, "forward", ""),
        ("all-reduce", "model", 2**18, 2**18, "backward", "asynchronous"),
        ("reduce-scatter", "data", 2**21, 3 * 2**19, "", ""),
    ]
    assert rows[0].source == "train.py:18 (loss)"
    assert flops(GPU) == 2 * 128 * 1024 * 1024
    assert scheduled_cycles(GPU) == 0


# A TPU repeats an asynchronous collective in each fusion that it runs beside, and slices a sum inside its fusion.
TPU = (Path(__file__).parent / "tpu.hlo").read_text()


def test_a_tpu_program():
    rows = collectives(TPU, MESH).rows
    assert [(r.kind, r.axis, r.payload, r.times, r.direction, r.note) for r in rows] == [
        ("all-gather", "data", 2**17, 3, "", "asynchronous"),
        ("permute", "model", 2**18, 3, "", "asynchronous"),
        ("reduce-scatter", "data", 3 * 2**17, 1, "backward", ""),
    ]
    assert scheduled_cycles(TPU) == 3 * 5170
    assert flops(TPU) == 3 * 2 * 512 * 256 * 256


@pytest.mark.parametrize(
    ("start", "step", "times"),
    [(0, 1, 10), (0, 3, 4), (2, 4, 2), (12, 1, 0), ("n", 1, 1), (0, "n", 1), (0, "n + 1", 1)],
)
def test_a_loop_counts_from_where_it_starts_by_its_step_or_not_at_all(start, step, times):
    """Where either is computed nobody knows the turns: it counts once, where the bound was told before."""
    mesh = tr.make_mesh(x=8)

    def program(a, n):
        value = lambda number: {"n": n, "n + 1": n + 1}.get(number, number)
        body = lambda state: (state[0] + value(step), jnp.sin(jax.lax.psum(state[1], "x")))
        return jax.lax.while_loop(lambda state: state[0] < 10, body, (jnp.int32(value(start)), a))[1]

    a = jax.device_put(jnp.ones(64), jax.NamedSharding(mesh, jax.P("x")))
    split = jax.shard_map(program, mesh=mesh, in_specs=(jax.P("x"), jax.P()), out_specs=jax.P("x"), check_vma=False)
    compiled = jax.jit(split).lower(a, jnp.int32(3)).compile()
    assert sum(row.times for row in collectives(compiled, mesh) if row.kind == "all-reduce") == times


def test_a_loop_counted_in_its_backend_config_or_not_at_all():
    marked = TPU.replace(
        "condition=%condition, body=%body",
        'condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}',
    )
    assert {row.times for row in collectives(marked, MESH) if row.kind == "permute"} == {7}
    unknown = TPU.replace("s32[] constant(3)", "s32[] get-tuple-element(%state.1), index=0")
    assert {row.times for row in collectives(unknown, MESH) if row.kind == "permute"} == {1}


@pytest.mark.parametrize(
    ("more", "step", "times"),
    [
        (lambda i, x: (x * x).sum() < 1e6, 1, 1),  # a sum begins with 0, which is no bound
        (lambda i, x: x[0, 0] < 9.0, 1, 1),
        (lambda i, x: i.astype(jnp.float32) < 9.0, 1, 1),
        (lambda i, x: i <= 9, 1, 10),
        (lambda i, x: i < 9, 3, 3),
        (lambda i, x: i < 9, lambda i: 2 * i, 1),
    ],
)
def test_a_loop_counts_by_an_integer_up_to_a_constant_alone(more, step, times):
    def loop(x):
        count = step if callable(step) else lambda i: i + step
        return lax.while_loop(lambda c: more(*c), lambda c: (count(c[0]), jnp.tanh(c[1] @ c[1])), (jnp.int32(0), x))[1]

    assert flops(compiled(loop, (32, 32))) == times * 2 * 32**3


WRAPPED = """HloModule jit_f, num_partitions=8

%async_computation (p: f32[8,16]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %all-to-all.1 = f32[8,16]{1,0} all-to-all(%p), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %start = ((f32[8,16]), f32[8,16]) async-start(%x), calls=%async_computation, metadata={op_name="jit(f)/swap"}
  ROOT %done = f32[8,16]{1,0} async-done(%start), calls=%async_computation
}
"""


def test_a_collective_in_an_asynchronous_wrapper_counts_once():
    (row,) = collectives(WRAPPED, MESH).rows
    assert (row.kind, row.axis, row.payload, row.note) == ("all-to-all", "data", 512, "asynchronous")
    assert row.direction == "forward"


def compiled(fn, *shapes, sharding=None):
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    return jax.jit(fn).lower(*args).compile()


SPARSE_CORE = """HloModule step, num_partitions=4

%called_computation (p: bf16[2,8], t: token[]) -> bf16[8,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[2,8]) -> bf16[8,8] {
  %x = bf16[2,8]{1,0} parameter(0)
  %start = ((bf16[2,8], token[]), bf16[8,8]) call-start(%x), async_execution_thread="sparsecore", to_apply=%called_computation
  ROOT %done = bf16[8,8]{1,0} call-done(%start)
}
"""  # noqa: E501


def test_a_collective_on_a_sparse_core_is_asynchronous():
    (row,) = collectives(SPARSE_CORE, AbstractMesh((4,), ("data",))).rows
    assert (row.kind, row.axes, row.times, row.note) == ("all-gather", ("data",), 1, "asynchronous")


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("ij,jk->ik", [(64, 128), (128, 256)], 2 * 64 * 128 * 256),
        ("bij,bjk->bik", [(4, 64, 128), (4, 128, 32)], 2 * 4 * 64 * 128 * 32),
        ("bqhd,bkhd->bhqk", [(2, 128, 4, 64), (2, 128, 4, 64)], 2 * 2 * 4 * 128 * 128 * 64),
    ],
)
def test_flops_of_products_on_tpu_and_cpu(equation, shapes, expected):
    """A TPU program has convolutions for products, batch dimensions as windows over padding."""
    device = jax.sharding.SingleDeviceSharding(slice_devices("v5e:2x4")[0])
    product = lambda x, y: jnp.einsum(equation, x, y)
    assert flops(compiled(product, *shapes, sharding=device)) == expected
    assert flops(compiled(product, *shapes)) == expected


def test_products_in_a_loop_count_as_often_as_it_runs():
    def layers(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    program = compiled(layers, (64, 32), (5, 32, 32))
    assert flops(program) == 5 * 2 * 64 * 32 * 32
    (product,) = products(program)
    assert product.times == 5
    assert product.source.startswith("test_hlo.py:")


def test_a_branch_counts_as_often_as_its_scope_says():
    """Of eight turns of a loop two take the product, which the compiled program does not know."""

    def layers(x, w):
        def body(x, turn):
            with sometimes(2, 8):
                return lax.cond(turn % 4 == 3, lambda: jnp.tanh(x @ w), lambda: x), None

        return lax.scan(body, x, jnp.arange(8))[0]

    assert flops(compiled(layers, (64, 64), (64, 64))) == 2 * 2 * 64**3


def test_loops_over_experts_rows_run_as_often_as_the_load_says():
    """Further rounds of an exchange, which an even load does not run, take no time and move nothing."""
    device = jax.sharding.SingleDeviceSharding(slice_devices("v5e:2x4")[0])

    def rounds(x, n):
        with loop_turns(1000, 1000, before=1, by_load=True):
            return lax.fori_loop(1, n, lambda i, x: jnp.tanh(x @ x), x)

    given = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=device), jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.jit(rounds).lower(*given).compile().as_text()
    turn, even, twice, thrice = (scheduled_cycles(text, load=load) for load in (None, 1.0, 2.0, 3.0))
    assert 0 <= even < twice == turn and thrice - twice == twice - even


def test_gathers_without_an_estimate_count_by_their_bytes():
    plain = 'fusion(%w, %x), kind=kOutput, calls=%beside, metadata={op_name="jit(f)/jvp()/while/body/dot_general"}'
    text = TPU.replace(plain, plain.replace("dot_general", "gather"))
    assert text != TPU and not gathered_bytes(TPU)
    assert not gathered_bytes(text)  # the schedule has it
    assert sum(gathered_bytes(text.replace("estimated_cycles", "cycles")).values()) == 3 * 2 * 2 * 512 * 256


def test_what_has_no_estimate_takes_no_cycles():
    text = TPU.replace('"estimated_cycles":"5170"', '"estimated_cycles":"9223372036854775000"')
    assert text != TPU and scheduled_cycles(text) == 0


def test_cycles_grow_with_the_work():
    device = jax.sharding.SingleDeviceSharding(slice_devices("v5e:2x4")[0])

    def layers(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    few = scheduled_cycles(compiled(layers, (256, 256), (2, 256, 256), sharding=device))
    many = scheduled_cycles(compiled(layers, (256, 256), (8, 256, 256), sharding=device))
    assert 0 < few < many


def test_memory_of_a_program():
    program = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jax.ShapeDtypeStruct((1024,), np.float32)).compile()
    found = compiled_memory(program)
    assert (found.arguments, found.outputs, found.aliased) == (4096, 4096, 4096)
    assert found.peak == 4096 + found.temporaries + found.code
    assert "arguments" in str(found) and "4.00 KiB" in str(found)


def test_elements_of_tuples_that_stand_as_operands():
    """As JAX 0.12 prints them: `%pair#1` is the second part of `%pair`."""
    text = """HloModule m
ENTRY main () -> f32[2] {
  pair = (s32[], (f32[2]{0}, f32[3]{0})) parameter(0)
  ROOT twice = f32[2]{0} add(%pair#1#0, %pair#1#0)
}
"""
    program = parse_program(text)
    made = [(i.name, i.op, i.type, i.operands) for i in program.computations["main"]]
    assert made[1:] == [
        ("pair#1", "get-tuple-element", "(f32[2]{0}, f32[3]{0})", ("pair",)),
        ("pair#1#0", "get-tuple-element", "f32[2]{0}", ("pair#1",)),
        ("twice", "add", "f32[2]{0}", ("pair#1#0", "pair#1#0")),
    ]
    assert program.by_name["pair#1#0"].attribute("index") == "0"
