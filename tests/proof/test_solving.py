"""Complex numbers, Fourier transforms, Cholesky factors and triangular systems, against JAX on this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.proof.test_windows import executed, numbers
from trellis._compat import full_text
from trellis.mesh import make_mesh
from trellis.proof.comparing import compare
from trellis.proof.interpreter import Interpreter


def agree(function, *given):
    for mine, theirs in zip(*executed(function, *given), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
        assert mine.dtype == theirs.dtype


def test_complex_numbers():
    def turned(x):
        z = jax.lax.complex(x[:, ::2], x[:, 1::2])
        z = z * jnp.exp(np.complex64(1j) * z) / np.complex64(2 - 1j) + np.full((4, 3), 1 - 2j, np.complex64)
        return z, jnp.abs(z), jnp.real(z * jnp.conj(z)), jnp.imag(z @ z.T), z.sum(), z * np.complex64([[1, 1j, 2 - 1j]])

    agree(turned, numbers(4, 6))


def test_fourier_transforms():
    def transformed(x):
        half, whole = jnp.fft.rfft(x, axis=1), jnp.fft.fft2(x)
        return half, whole, jnp.fft.irfft(half, n=7), jnp.fft.ifft(whole, axis=0)

    agree(transformed, numbers(5, 7))


def test_what_is_less_common_of_single_elements():
    x = np.tanh(numbers(3, 4))
    agree(lambda x: (jnp.arcsin(x), jnp.arccos(x), jnp.arctanh(x), jnp.sinh(x), jnp.cosh(x), jnp.arcsinh(x)), x)
    agree(lambda n: jax.lax.clz(n), np.int32([0, 1, 255, -1, 1 << 30]))


@pytest.mark.parametrize("lower", [True, False])
def test_cholesky_factors_and_triangular_systems(lower):
    def solved(x, b):
        a = x @ x.swapaxes(-1, -2) + 4 * jnp.eye(4)[None]
        factor = jax.lax.linalg.cholesky(a)
        triangle = factor if lower else factor.swapaxes(-1, -2)
        how = dict(lower=lower)
        left = jax.lax.linalg.triangular_solve(triangle, b, left_side=True, transpose_a=True, **how)
        right = jax.lax.linalg.triangular_solve(triangle, b.swapaxes(-1, -2), unit_diagonal=True, **how)
        return factor, left, right

    x, b = numbers(2, 4, 4), numbers(2, 4, 3)
    program = full_text(jax.jit(solved).trace(x, b).lower(lowering_platforms=("tpu",)))
    found = [y[0] for y in Interpreter(program)([x[None], b[None]])]
    a = x @ x.swapaxes(-1, -2) + 4 * np.eye(4, dtype=np.float32)
    factor = np.linalg.cholesky(a)
    triangle = factor if lower else factor.swapaxes(-1, -2)
    np.testing.assert_allclose(found[0], factor, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(triangle.swapaxes(-1, -2) @ found[1], b, rtol=1e-3, atol=1e-4)
    ones = triangle - triangle * np.eye(4) + np.eye(4)
    np.testing.assert_allclose(found[2] @ ones, b.swapaxes(-1, -2), rtol=1e-3, atol=1e-4)


def test_factors_and_systems_of_libraries():
    x, b = np.tril(numbers(4, 4)) + 4 * np.eye(4, dtype=np.float32), numbers(4, 3)
    text = """HloModule m
ENTRY main () -> f32[4,4] {
  x = f32[4,4] parameter(0)
  a = f32[4,4] parameter(1)
  b = f32[4,3] parameter(2)
  factor = (f32[4,4], s32[]) custom-call(%a), custom_call_target="cusolver_potrf_ffi", backend_config={lower = true}
  same = f32[4,4] custom-call(%a), custom_call_target="Cholesky"
  solved = (f32[4,3], s8[0]) custom-call(%x, %b), custom_call_target="__cublas$triangularSolve", backend_config={"left_side":true,"lower":true,"unit_diagonal":false,"transpose_a":"NO_TRANSPOSE"}
  turned = f32[4,4] custom-call(%x), custom_call_target="InvertDiagBlocksLowerTriangular"
  ROOT all = ((f32[4,4], s32[]), f32[4,4], (f32[4,3], s8[0]), f32[4,4]) tuple(%factor, %same, %solved, %turned)
}
"""  # noqa: E501
    machine = Interpreter(text)
    (factor, info), same, (solved, _), turned = machine([v[None] for v in (x, x @ x.T, b)])
    for found, wanted in ((factor, x), (same, x), (x @ solved, b), (x @ turned, np.eye(4))):
        np.testing.assert_allclose(np.asarray(found).reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-4)
    assert info == 0 and "Cholesky" in machine.opaque


def test_complex_results_are_compared():
    place = jax.NamedSharding(make_mesh(jax.devices()[:2], x=2), jax.P("x"))
    want = np.complex64([1 + 1j, 2 - 4j])
    assert compare("z", want.reshape(2, 1), want, place).right
    apart = compare("z", (want + 1e-2j).reshape(2, 1), want, place)
    assert not apart.right and 1e-3 < apart.error < 1e-2
