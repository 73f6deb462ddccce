"""The product under `einsum` and `dot`, as a CPU is fast at it, forward and backward."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.platform import platform_of
from trellis.notation import spec_of
from trellis.notation.state import state_of

Dims = tuple[tuple[int, ...], tuple[int, ...]]


def product(a: jax.Array, b: jax.Array, numbers, *, preferred_element_type=None, out_sharding=None) -> jax.Array:
    """`jax.lax.dot_general`; on a CPU, products without batch dimensions are `cpu_dot` and get another gradient.

    The gradient of `x @ w` with respect to `w` sums over the long dimension. As JAX writes it, it is `(d^T x)^T`,
    which XLA's CPU compiler turns into a transposed copy of `d`, made by running whatever elementwise program computes
    `d` (a GELU's derivative, say) once per element in strided order: as slow as the product itself. Here `d` is settled
    first, the narrower of `x` and `d` is copied transposed, and the product is an ordinary one.

    Args:
        a, b: plain arrays.
        numbers: dimension numbers as `dot_general` takes them.
        preferred_element_type, out_sharding: likewise.
    """
    summed, batch = numbers
    plain = partial(
        lax.dot_general,
        dimension_numbers=numbers,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    one_type = a.dtype == b.dtype and preferred_element_type in (None, a.dtype)
    if any(batch) or not one_type or not jnp.issubdtype(a.dtype, jnp.floating) or platform_of(a) != "cpu":
        return plain(a, b)
    if state_of(a).mode not in ("none", "explicit"):
        return plain(a, b)
    summed = tuple(tuple(int(i) for i in dims) for dims in summed)
    return _cpu_product(a, b, summed, out_sharding)


def cpu_dot(a: jax.Array, b: jax.Array, numbers, *, out_sharding=None) -> jax.Array:
    """A product in the type of its operands that sums in float32.

    Of a bfloat16 result XLA's CPU compiler makes a float32 product of operands that it converts first; only a float32
    result reaches the processor's bfloat16 instructions, at twice the speed. So the result is made in float32 and
    rounded afterwards, which is the same number.

    Args:
        a, b: plain arrays of one type.
        numbers, out_sharding: as `dot_general` takes them.
    """
    wide = jnp.float32 if a.dtype == jnp.bfloat16 else None
    return lax.dot_general(a, b, numbers, preferred_element_type=wide, out_sharding=out_sharding).astype(a.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cpu_product(a, b, summed: Dims, spec):
    return cpu_dot(a, b, (summed, ((), ())), out_sharding=spec)


def _forward(a, b, summed: Dims, spec):
    # Written out, so that checkpoint policies for products see it.
    return cpu_dot(a, b, (summed, ((), ())), out_sharding=spec), (a, b)


def _backward(summed: Dims, spec, operands, d):
    a, b = operands
    a_free, b_free = (
        tuple(i for i in range(x.ndim) if i not in dims) for x, dims in zip(operands, summed, strict=True)
    )
    rows, columns = tuple(range(len(a_free))), tuple(range(len(a_free), d.ndim))
    to_a, to_b = dict(zip(*summed[::-1], strict=True)), dict(zip(*summed, strict=True))
    d = lax.optimization_barrier(d)

    d_a = _dot(d, b, columns, b_free, like=a, made=a_free + tuple(to_a[i] for i in sorted(summed[1])))
    if _size(a, summed[0]) <= _size(d, columns):
        turned = lax.optimization_barrier(jnp.transpose(a, summed[0] + a_free))
        d_b = _dot(turned, d, _last(turned, rows), rows, like=b, made=summed[1] + b_free)
    else:
        turned = lax.optimization_barrier(jnp.transpose(d, columns + rows))
        made = b_free + tuple(to_b[i] for i in sorted(summed[0]))
        d_b = _dot(turned, a, _last(turned, rows), a_free, like=b, made=made)
    return d_a, d_b


_cpu_product.defvjp(_forward, _backward)


def _last(x, dims) -> tuple[int, ...]:
    return tuple(range(x.ndim - len(dims), x.ndim))


def _size(x, dims) -> int:
    return math.prod(x.shape[i] for i in dims)


def _dot(x, y, x_dims, y_dims, *, like, made: tuple[int, ...]):
    """A product in the type that the gradient of `like` has; `made` says which of its dimensions come out, in order."""
    numbers = ((tuple(x_dims), tuple(y_dims)), ((), ()))
    state = state_of(like)
    order = [made.index(i) for i in range(like.ndim)]
    if state.mode != "explicit":
        return jnp.transpose(cpu_dot(x, y, numbers), order)
    # What was copied (`~`) gets its gradient as a pending sum, and the other way round.
    spec = spec_of([state.axes[i] for i in made], state.copied, state.pending)
    return jnp.transpose(cpu_dot(x, y, numbers, out_sharding=spec), order)
