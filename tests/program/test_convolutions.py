"""Convolutions and Fourier transforms in the ledger: as many bytes as the compiled program moves."""

import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from trellis.inspect import collectives, compare, ledger

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


def test_a_window_reaches_over_the_ends_of_a_slice():
    """Forward, and in both gradients: two rows of a picture, of which each device has eight. The weight's gradient is
    one sum over both mesh axes, which XLA makes one after the other."""
    axes, notes = both(PLANE, of_pictures, {"batch": 8, "height": 32, "width": 32, "channel": 4}, WEIGHT)
    rows, weight = 4096 + 4096 + 8192, 3 * 3 * 4 * 8 * 4
    assert axes == {"h": (rows + weight * 3 // 4, rows + 2 * weight * 3 // 4), "d": (weight, weight)}
    assert notes == {"", GUESS}


def test_a_fourier_transform_gathers_whole_arrays():
    """XLA transforms no slices, though each of a batch's rows is by itself; that of JAX 0.12 does."""

    def mixed(x, w):
        of_channel = lambda x, w: tr.named(jnp.fft.irfft(jnp.fft.rfft(x.array) * jnp.fft.rfft(w.array, 32)), "pos")
        return tr.vmap(tr.vmap(of_channel, "channel"), "batch")(x, w["made", 0])

    axes, notes = both(FLAT, mixed, SEQUENCES, WEIGHT)
    assert axes in ({"d": (74_088, 74_088)}, {"d": (74_088, 168)}) and notes == {"", GUESS}
