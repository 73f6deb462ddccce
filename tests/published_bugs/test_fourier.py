"""45 of docs/published-bugs.md: Fourier transforms of slices."""

import functools
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.inspect import structure_of

X = np.random.default_rng(0).standard_normal((8, 8, 8)).astype(np.float32)
NAMES = "batch pos embed"
fft, of_slices = tr.lift_along(jnp.fft.fft), tr.lift_along(jnp.fft.fft, gather=False)
mixed = lambda x: tr.real(fft(fft(x.astype("complex64"), "embed"), "pos"))
FOUND = {
    "one": lambda x: tr.real(fft(x.astype("complex64"), "embed")).array,
    "mixed, as FNet has it": lambda x: mixed(x).array,
    "not gathered": lambda x: tr.real(of_slices(x.astype("complex64"), "pos")).array,
    "a plain array": lambda x: jnp.fft.fft(x.array, axis=1).real,
    "two dimensions": lambda x: jnp.fft.fft2(x.array).real,
    "the way back": lambda x: jnp.fft.irfft(jnp.fft.rfft(x.array, axis=0) * 2, axis=0),
    "in a loop": lambda x: jax.lax.scan(lambda x, _: (x + 0.05 * mixed(x) * x, None), x, None, length=2)[0].array,
    "of each row": lambda x: tr.vmap(lambda x: tr.real(fft(x.astype("complex64"), "embed")), "batch")(x).array,
}
LAYOUTS = {
    "batch": (dict(a=8), "explicit", {"batch": "a"}),
    "pos": (dict(a=8), "explicit", {"pos": "a"}),
    "embed": (dict(a=8), "explicit", {"embed": "a"}),
    "pos and embed": (dict(a=4, b=2), "explicit", {"pos": "a", "embed": "b"}),
    "pos, by the compiler": (dict(a=8), "auto", {"pos": "a"}),
    "pos and embed, by the compiler": (dict(a=4, b=2), "auto", {"pos": "a", "embed": "b"}),
}


def layout(name):
    sizes, kind, compute = LAYOUTS[name]
    return tr.Layout(tr.make_mesh(**sizes, axis_type=kind), compute=compute)


@functools.cache
def alone(name):
    """The value and the gradient on one device."""
    return both(FOUND[name])(tr.named(X, NAMES))


def both(fn):
    weight = np.arange(512, dtype=np.float32).reshape(8, 8, 8) / 512
    return jax.value_and_grad(lambda x: (jnp.tanh(fn(x)) * weight).sum())


BY_ITSELF = """
import jax, numpy
jax.config.update("jax_num_cpu_devices", 8)
sliced = jax.NamedSharding(jax.make_mesh((8,), ("a",)), jax.P(None, None, "a"))
jax.jit(jax.numpy.fft.fft)(jax.device_put(numpy.ones((8, 8, 8), "complex64"), sliced))
"""


@pytest.mark.slow
def test_what_xla_makes_of_them():
    """With JAX 0.10.2 it ends the process. Where that fails, XLA is right: `trellis.named.fourier` may go. With 0.12 it
    does not, and gathers the whole array."""
    alone = subprocess.run([sys.executable, "-c", BY_ITSELF], capture_output=True, text=True)
    if jax.__version_info__ < (0, 12):
        assert alone.returncode == -signal.SIGABRT and "size_per_partition % num_partitions" in alone.stderr
    else:
        assert alone.returncode == 0, alone.stderr


@pytest.mark.parametrize("what", FOUND)
@pytest.mark.parametrize("where", LAYOUTS)
def test_each_device_transforms_rows_of_its_own(where, what):
    if what == "the way back" and where == "batch":
        return  # five numbers of eight on eight devices: JAX refuses them
    with layout(where):
        x = tr.shard(tr.named(X, NAMES), "compute")
        value, gradient = tr.named_jit(both(FOUND[what]))(x)
    np.testing.assert_allclose(value, alone(what)[0], rtol=1e-4)
    np.testing.assert_allclose(np.asarray(gradient), np.asarray(alone(what)[1]), atol=1e-4)


@pytest.mark.parametrize(("axis", "moved"), [(0, 0), (1, 3 * 8 * 8 * 8 * 8 // (4 * 2)), (2, 8 * 8 * 8 * 8 // (4 * 2))])
def test_rows_are_gathered_and_nothing_else(axis, moved):
    with layout("pos and embed") as here:
        x = tr.shard(tr.named(X, NAMES), "compute")
        transform = lambda x: jnp.fft.fft(x.array, axis=axis)
        ledger, compiled = tr.ledger(transform, x), jax.jit(transform).lower(x).compile()
        assert sum(row.wire for row in ledger.rows) == moved
        assert structure_of(ledger, compiled, here.mesh).right


ROWS = np.random.default_rng(1).standard_normal((8, 24, 24)).astype(np.float32)


def in_loop(turn, x):
    """Twice what a turn adds; summed up after a bend, so that its gradient needs all of them."""
    x = jax.lax.scan(lambda x, _: (x + 0.05 * turn(x), None), x, None, length=2)[0]
    return x * x


@pytest.mark.slow
def test_what_is_gathered_between_transforms_is_laid_out_anew():
    """XLA lays the first transform out as the gather would like it, which its kernel does not take."""
    scale = tr.from_numpy(ROWS[0, 0], "embed")
    gradient = tr.grad(lambda x: in_loop(lambda x: mixed(x) * scale, x).sum())
    wanted = gradient(tr.named(ROWS, NAMES))
    with tr.Layout(tr.make_mesh(a=2, b=4), compute={"batch": "a", "pos": "b"}):
        found = tr.named_jit(gradient)(tr.from_numpy(ROWS, NAMES))
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-4, atol=1e-3)


def test_a_manual_program_transforms_what_it_gathered():
    rows = lambda x, dim: jnp.fft.fft(x.astype("complex64"), axis=dim)

    @tr.shard_map
    def manual(x: tr.f32["batch/a pos/b embed"]) -> tr.f32["batch/a pos/b embed"]:
        first, size = jax.lax.axis_index("b") * x.shape[1], x.shape[1]

        def turn(x):
            whole = rows(jax.lax.all_gather(rows(x, 2), "b", axis=1, tiled=True), 1)
            return jax.lax.dynamic_slice_in_dim(whole, first, size, axis=1).real * x

        return in_loop(turn, x)

    gradient = lambda fn: jax.jit(jax.grad(lambda x: fn(x).sum()))
    wanted = gradient(lambda x: in_loop(lambda x: rows(rows(x, 2), 1).real * x, x))(ROWS)
    with tr.Layout(tr.make_mesh(a=2, b=4)):
        found = gradient(manual)(ROWS)
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-4, atol=1e-3)
