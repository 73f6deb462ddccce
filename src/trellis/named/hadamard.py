"""The random Hadamard transform of blocks of 16 numbers, which spreads a large one over its whole block.

Two factors that are transformed along the summed dimension keep their product: the matrix is orthogonal. The signs are
drawn once and for all. NVIDIA (2025, arXiv:2509.25149) does so with the factors of weights' gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIDE = 16
_SIGNS = np.array([1, 1, -1, 1, -1, -1, 1, -1, 1, -1, -1, -1, 1, 1, 1, -1], np.float32)


def matrix() -> np.ndarray:
    """`f32[16 16]`, orthogonal: Sylvester's, its rows multiplied by the signs.

    >>> bool((matrix() @ matrix().T == np.eye(16)).all())
    True
    """
    step = np.array([[1, 1], [1, -1]], np.float32)
    return _SIGNS[:, None] * np.kron(np.kron(step, step), np.kron(step, step)) / 4


def transformed(blocks: jax.Array, dim: int) -> jax.Array:
    """A plain array, transformed along a dimension of 16, in float32."""
    exact = jnp.asarray(matrix(), blocks.dtype)  # quarters
    out = lax.dot_general(blocks, exact, (((dim,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return jnp.moveaxis(out, -1, dim)
