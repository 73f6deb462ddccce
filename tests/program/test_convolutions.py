"""Convolutions and Fourier transforms: as many bytes as the compiled program moves, and as many multiplications."""

import itertools
import tracemalloc

import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from trellis.inspect import collectives, compare, flops, ledger
from trellis.inspect.work import work
from trellis.program import trace
from trellis.program.sizes import window_pairs

FLAT = tr.Layout(tr.make_mesh(d=8), compute={"batch": "d"})
PLANE = tr.Layout(tr.make_mesh(d=2, h=4), compute={"batch": "d", "height": "h"})
GUESS = "the compiler chooses"


def of_sequences(x, w):
    made = jax.lax.conv_general_dilated(x.array, w.array, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return tr.named(made, "batch pos made")


def of_each_channel(x, w):
    made = jax.lax.conv_general_dilated(
        x.array, w.array[:, :1], (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=8
    )
    return tr.named(made, "batch pos made")


def of_one_sequence(x, w):
    one = lambda x: of_sequences(tr.named(x.array[None], "batch pos channel"), w)["batch", 0]
    return tr.vmap(one, "batch")(x)


def of_pictures(x, w, **options):
    window = jnp.stack([w.array[:, :4]] * 3)
    numbers = ("NHWC", "HWIO", "NHWC")
    made = jax.lax.conv_general_dilated(x.array, window, (1, 1), "SAME", dimension_numbers=numbers, **options)
    return tr.named(made, "batch height width made")


def both(layout, fn, *axes):
    """The bytes that a gradient moves over each mesh axis, by its types and compiled; and the ledger's notes."""
    with layout:
        x, w = (tr.shard(tr.random.normal(jax.random.key(1), each), "compute") for each in axes)
        gradient = jax.jit(tr.grad(lambda x, w: tr.square(fn(x, w)).sum(), (0, 1)))
        found = ledger(gradient, x, w)
        compiled = collectives(gradient.lower(x, w).compile(), layout.mesh)
        return compare(found, compiled).axes, {row.note for row in found.rows}


SEQUENCES, WEIGHT = {"batch": 16, "pos": 32, "channel": 8}, {"tap": 3, "channel": 8, "made": 8}


@pytest.mark.parametrize(("fn", "wire"), [(of_sequences, 1344), (of_one_sequence, 1344), (of_each_channel, 168)])
def test_a_weights_gradient_is_a_sum_over_slices_of_the_batch(fn, wire):
    assert both(FLAT, fn, SEQUENCES, WEIGHT) == ({"d": (wire, wire)}, {""})


@pytest.mark.slow
def test_a_window_reaches_over_the_ends_of_a_slice():
    """Forward, and in both gradients: two rows of a picture, of which each device has eight. The weight's gradient is
    one sum over both mesh axes, which XLA makes one after the other."""
    axes, notes = both(PLANE, of_pictures, {"batch": 8, "height": 32, "width": 32, "channel": 4}, WEIGHT)
    rows, weight = 4096 + 4096 + 8192, 3 * 3 * 4 * 8 * 4
    assert axes == {"h": (rows + weight * 3 // 4, rows + 2 * weight * 3 // 4), "d": (weight, weight)}
    assert notes == {"", GUESS}


def test_a_fourier_transform_moves_no_whole_rows():
    """Each of a batch's rows is by itself: only the weight's gradient is summed."""

    def mixed(x, w):
        of_channel = lambda x, w: tr.named(jnp.fft.irfft(jnp.fft.rfft(x.array) * jnp.fft.rfft(w.array, 32)), "pos")
        return tr.vmap(tr.vmap(of_channel, "channel"), "batch")(x, w["made", 0])

    axes, notes = both(FLAT, mixed, SEQUENCES, WEIGHT)
    assert axes == {"d": (168, 168)} and notes == {""}


@pytest.mark.parametrize(
    ("stride", "out", "seen"),
    [
        (1, "out", 16 + 15 + 14),  # of each tap, the positions that are no padding
        (2, "out", 8 + 8 + 7),
        (1, "out/h", 16 + 15 + 14),
        (2, "out/h", 8 + 8 + 7),
    ],
)
def test_multiplications_of_a_convolution_and_its_gradients(stride, out, seen):
    """Of each device. The gradient of `x` sees zeros between the elements of a convolution with strides."""

    def convolve(x, w):
        sharding, numbers = tr.parse(f"batch/d pos {out}").spec, ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(x, w, (stride,), [(0, 2)], dimension_numbers=numbers, out_sharding=sharding)

    def placed(text, *shape):
        sharding = jax.sharding.NamedSharding(PLANE.mesh, tr.parse(text).spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    args = placed("batch/d pos channel", 8, 16, 4), placed(f"tap channel {out}", 3, 4, 8)
    each = 2 * (8 // 2) * 4 * (8 // 4 if "/" in out else 8) * seen
    with jax.set_mesh(PLANE.mesh):
        for fn, passes in ((convolve, 1), (jax.grad(lambda x, w: jnp.sum(convolve(x, w) ** 2), (0, 1)), 3)):
            assert sum(op.flops * op.times for op in work(trace(fn, *args))) == pytest.approx(passes * each)
            assert flops(jax.jit(fn).lower(*args).compile()) == passes * each


def test_multiplications_of_a_depthwise_convolution():
    """XLA for CPUs multiplies every channel of its weight's gradient with every other; the program does not."""
    x, w = jnp.ones((2, 16, 8)), jnp.ones((3, 8, 8))
    gradient = jax.grad(lambda w: jnp.sum(of_each_channel(tr.named(x, "b p c"), tr.named(w, "t c m")).array ** 2))
    assert sum(op.flops * op.times for op in work(trace(gradient, w))) == pytest.approx(2 * 2 * 2 * 8 * (16 + 15 + 14))
    of_its_weight = """HloModule gradient

ENTRY %main (x: f32[8,16,8], y: f32[8,16,8]) -> f32[3,1,8] {
  %x = f32[8,16,8] parameter(0)
  %y = f32[8,16,8] parameter(1)
  ROOT %w = f32[3,1,8] convolution(%x, %y), window={size=16 pad=2_0}, dim_labels=f0b_i0o->0bf, batch_group_count=8
}
"""
    assert flops(of_its_weight) == 2 * 8 * 8 * (16 + 15 + 14)


def test_what_windows_see_is_what_is_seen_of_each():
    sizes = itertools.product((0, 1, 5), (1, 4), (1, 6), (1, 2, 6), (1, 3), (1, 4, 6), (-3, 0, 2, 9))
    for steps, taps, length, stride, spread, gaps, before in sizes:
        places = [step * stride + tap * spread - before for step in range(steps) for tap in range(taps)]
        seen = sum(place % gaps == 0 and 0 <= place // gaps < length for place in places)
        given = {"stride": stride, "spread": spread, "gaps": gaps, "before": before}
        assert window_pairs(steps, taps, length, **given) == seen, (steps, taps, length, given)


def test_long_windows_are_counted_without_a_table_of_them():
    """A filter as long as its sequence, of which a table would take 32 GiB."""
    length = 1 << 16
    tracemalloc.start()
    try:
        seen = window_pairs(length, length, length, stride=1, spread=1, gaps=1, before=length - 1)
        assert seen == length * (length + 1) // 2
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
