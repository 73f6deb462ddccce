"""What types say is copied to and from the stacks of loops, on TPUs held against the fusions of their compiler."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from trellis.inspect.apart import copied
from trellis.inspect.hlo import parse_program
from trellis.inspect.work import work
from trellis.mesh.topology import slice_devices
from trellis.program import trace

LAYERS, ROWS, WIDTH = 6, 8192, 2048
bf16, i32 = jnp.bfloat16, jnp.int32


def kernel(x):
    def double(read, write):
        write[...] = read[...] * 2

    return pl.pallas_call(double, out_shape=x)(x)


def kept(x, weights, ids):
    """Keeps a product, gathered rows, what a kernel makes, and what came into the turn; widths tell them apart."""

    def layer(x, weight):
        product, rows, made = x @ weight, x[:, :256][ids], kernel(x[:, :384])
        return x + product[:, :WIDTH] * made[:, :1], (product, rows, made, x)

    return lax.scan(layer, x, weights)


def read(x, weight, wide, narrow):
    """Reads one stack in a product, and the other one in a kernel."""

    def layer(x, each):
        rows, few = each
        return x + (rows @ weight) * kernel(few)[:, :1], None

    return lax.scan(layer, x, (wide, narrow))[0]


# By what the compiler calls it: a program, its arguments, and the widths of the stacks that are copied.
PROGRAMS = {
    "dynamic-update-slice": (
        kept,
        [((ROWS, WIDTH), bf16), ((LAYERS, WIDTH, 2560), bf16), ((ROWS,), i32)],
        {256, 384, WIDTH},
    ),
    "dynamic-slice": (
        read,
        [((ROWS, WIDTH), bf16), ((2560, WIDTH), bf16), ((LAYERS, ROWS, 2560), bf16), ((LAYERS, ROWS, 384), bf16)],
        {384},
    ),
}


def copies(text, op: str) -> set[int]:
    """The last sizes of stacks that fusions without a product write, or read from."""
    found = set()
    for fusion in (i for i, *_ in text.walk(fusions=False) if i.op == "fusion"):
        inside = list(text.inside(fusion))
        stacks = [text.by_name[i.operands[0]].results[0].shape for i in inside if i.op == op]
        if not any(i.op == "convolution" for i in inside):
            found |= {stack[-1] for stack in stacks if stack[0] == LAYERS}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("op", PROGRAMS)
def test_what_kernels_make_and_read_of_stacks_is_copied(op):
    program, shapes, widths = PROGRAMS[op]
    one = jax.sharding.SingleDeviceSharding(slice_devices("v5e:2x2")[0])
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=one) for shape, dtype in shapes]
    types, text = trace(program, *args), parse_program(jax.jit(program).lower(*args).compile().as_text())
    (scan,) = (o for o in types.walk() if o.name == "scan")
    assert {value.shape[-1] for value, _ in copied(scan)} == widths == copies(text, op)


def test_copies_and_gathers_are_work_where_they_are_apart():
    program, shapes, widths = PROGRAMS["dynamic-update-slice"]
    types = trace(program, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes))
    alone = [piece for piece in work(types, kind="tpu") if piece.alone]
    made = lambda word: sorted((piece.num_bytes, piece.times) for piece in alone if word in piece.what)
    assert made("copied") == [(2 * 2 * ROWS * width, LAYERS) for width in sorted(widths)]
    assert made("gathered") == [(2 * 2 * ROWS * 256, LAYERS)]
    assert not any(piece.alone for piece in work(types))


@pytest.mark.parametrize(
    ("op", "widths"), [("dynamic-update-slice", {384, WIDTH, 2560}), ("dynamic-slice", {384, 2560})]
)
def test_on_gpus_products_are_kernels_and_gathers_are_none(op, widths):
    program, shapes, _ = PROGRAMS[op]
    types = trace(program, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes))
    (scan,) = (o for o in types.walk() if o.name == "scan")
    stacked = {value.shape[-1] for value, _ in copied(scan, "gpu") if value.shape[0] == ROWS}
    assert stacked == widths
    pieces = {kind: [piece for piece in work(types, kind=kind) if piece.alone == "copied"] for kind in ("gpu", "cpu")}
    assert not pieces["cpu"]
    assert {piece.times for piece in pieces["gpu"]} == {LAYERS} and {piece.slower for piece in pieces["gpu"]} == {1.6}
