"""Factors of matrices, a generator's bits and selections, as kernels and calls of libraries, against numpy and JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.sharding import NamedSharding, PartitionSpec

import trellis as tr
from tests.proof.test_windows import numbers
from trellis._compat import full_text
from trellis.mesh import make_mesh
from trellis.proof.interpreter import Interpreter, NotInterpreted
from trellis.proof.interpreter.drawing import philox


def run(function, platform, *given):
    """What the program before a compiler computes."""
    lowered = jax.jit(function).trace(*given).lower(lowering_platforms=(platform,))
    machine = Interpreter(full_text(lowered))
    return [y[0] for y in machine([x[None] for x in given])], machine


def near(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("shape", [(5, 5), (2, 6, 4), (2, 4, 6)])
def test_triangular_factors(platform, shape):
    x = numbers(*shape)
    (both, pivots, order), machine = run(lambda x: jax.lax.linalg.lu(x), platform, x)
    count = min(shape[-2:])
    lower = np.tril(both[..., :count], -1) + np.eye(shape[-2], count)
    near(lower @ np.triu(both[..., :count, :]), np.take_along_axis(x, order[..., None], -2))
    for mine, at, matrix in zip(both.reshape(-1, *shape[-2:]), pivots.reshape(-1, count), x.reshape(-1, *shape[-2:])):
        wanted, exchanged = scipy.linalg.lu_factor(matrix)
        near(mine, wanted)
        np.testing.assert_array_equal(at, exchanged)
    assert machine.opaque


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("shape", [(5, 5), (2, 6, 4), (2, 4, 6)])
def test_orthogonal_factors(platform, shape):
    x = numbers(*shape)
    (q, r), _ = run(lambda x: tuple(jnp.linalg.qr(x)), platform, x)
    near(q @ r, x)
    near(q.swapaxes(-1, -2) @ q, np.broadcast_to(np.eye(q.shape[-1]), (*q.shape[:-2], *[q.shape[-1]] * 2)))
    near(r, np.triu(r))


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_eigenvectors(platform, lower):
    x = numbers(2, 5, 5)
    x = x + x.swapaxes(-1, -2)
    given = np.tril(x) if lower else np.triu(x)  # the other half is not read
    how = dict(lower=lower, symmetrize_input=False)
    (vectors, of), _ = run(lambda x: tuple(jax.lax.linalg.eigh(x, **how)), platform, given)
    near(of, np.linalg.eigvalsh(x))
    near(x @ vectors, vectors * of[..., None, :])


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_singular_vectors(full, shape):
    x = numbers(*shape)
    (u, s, v), _ = run(lambda x: tuple(jnp.linalg.svd(x, full_matrices=full)), "cuda", x)
    near(s, np.linalg.svd(x, compute_uv=False))
    near((u[:, :4] * s) @ v[:4], x)
    assert u.shape == (shape[0], shape[0] if full else 4)


KERNELS = """HloModule m
ENTRY main () -> f32[4,4] {
  y = f32[4,4] parameter(0)
  scaled = f32[4,4] parameter(1)
  a = f32[2,2] parameter(2)
  b = f32[2,2] parameter(3)
  c = f32[2,2] parameter(4)
  d = f32[2,2] parameter(5)
  upper = f32[4,4] custom-call(%y), custom_call_target="InvertDiagBlocksUpperTriangular"
  compact = f32[4,4] custom-call(%scaled), custom_call_target="CompactWyHelper"
  eigen = (f32[2], f32[2], f32[2,2], f32[2,2], f32[2,2], f32[2,2]) custom-call(%a, %b, %c, %d), custom_call_target="EighTpu"
  ROOT all = (f32[4,4], f32[4,4], (f32[2], f32[2], f32[2,2], f32[2,2], f32[2,2], f32[2,2])) tuple(%upper, %compact, %eigen)
}
"""  # noqa: E501


def test_what_libtpu_makes_of_them():
    y, scales = np.tril(numbers(4, 4), -1) + np.eye(4, dtype=np.float32), numbers(4)
    scaled = (np.triu(y.T @ y, 1) + np.eye(4)) * -scales
    x = numbers(4, 4)
    x = x + x.T
    parts = x[:2, :2], x[:2, 2:], x[2:, :2], x[2:, 2:]
    upper, compact, (low, high, *quarters) = Interpreter(KERNELS)([v[None].astype(np.float32) for v in
                                                                   (y.T, scaled, *parts)])  # fmt: skip
    near(upper[0] @ y.T, np.eye(4))
    product = np.eye(4)
    for scale, vector in zip(scales, y.T):
        product = product @ (np.eye(4) - scale * np.outer(vector, vector))
    near(np.eye(4) + y @ compact[0] @ y.T, product)
    vectors, of = np.block([[quarters[0][0], quarters[1][0]], [quarters[2][0], quarters[3][0]]]), np.r_[low[0], high[0]]
    near(vectors @ x, of[:, None] * vectors)
    near(of, np.linalg.eigvalsh(x))


@pytest.mark.parametrize("state", [(1, 2, 3, 4), (0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_a_generators_bits_are_those_of_xla_on_a_cpu(state, dtype):
    words = np.array(state, np.uint32)
    wanted = jax.lax.rng_bit_generator(words, (3, 5), dtype=dtype)[1]
    np.testing.assert_array_equal(philox(words.view(np.uint64), 15, np.dtype(dtype)).reshape(3, 5), wanted)
    (found,), machine = run(lambda words: jax.lax.rng_bit_generator(words, (3, 5), dtype=dtype)[1], "tpu", words)
    np.testing.assert_array_equal(found, wanted)
    assert machine.opaque == {"rng-bit-generator"}


def test_what_a_generator_leaves_may_not_be_read():
    with pytest.raises(NotInterpreted, match="what a chip's own generator of random bits leaves"):
        run(lambda words: jax.lax.rng_bit_generator(words, (3,)), "tpu", np.arange(4, dtype=np.uint32))
    with pytest.raises(NotInterpreted, match="rng_three_fry from a state"):
        fry = jax.lax.RandomAlgorithm.RNG_THREE_FRY
        run(
            lambda words: jax.lax.rng_bit_generator(words, (3,), algorithm=fry)[1], "tpu", np.arange(4, dtype=np.uint32)
        )


@pytest.mark.parametrize("select", [jax.lax.approx_max_k, jax.lax.approx_min_k])
@pytest.mark.parametrize("axis", [0, 1])
def test_most_of_the_largest_entries(select, axis):
    x = numbers(2048, 2) if axis == 0 else numbers(2, 2048)
    (values, places), machine = run(lambda x: tuple(select(x, 4, reduction_dimension=axis)), "tpu", x)
    order = x if select is jax.lax.approx_min_k else -x
    wanted = np.argsort(order, axis).take(range(4), axis)
    np.testing.assert_array_equal(places, wanted)
    near(values, np.take_along_axis(x, wanted, axis))
    assert machine.opaque == {"PartialReduce"}


@pytest.mark.slow
def test_programs_with_them_are_proven():
    mesh = make_mesh(jax.devices()[:4], data=4)
    x = jax.ShapeDtypeStruct((8, 6, 6), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    whole = jax.ShapeDtypeStruct((12, 12), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))

    def determinant(x):
        return jax.grad(lambda x: jnp.linalg.slogdet(x @ x.mT + jnp.eye(6)[None])[1].sum())(x)

    def logarithm(x):
        of, vectors = jnp.linalg.eigh(x @ x.mT + jnp.eye(6)[None])
        return (vectors * jnp.log(of)[..., None, :]) @ vectors.mT

    def noisy(x):
        return x + jax.random.normal(jax.random.key(jnp.sum(x > 0).astype("uint32"), impl="rbg"), x.shape)

    def rest(x):
        return (*jnp.linalg.qr(x), jnp.linalg.pinv(x), jnp.linalg.inv(x), jnp.linalg.svd(x)[1])

    for function, given in ((determinant, x), (logarithm, x), (noisy, x), (rest, whole)):
        proof = tr.prove(function, given, on="v5e:2x2")
        assert proof.proven and proof.kernels, str(proof)
