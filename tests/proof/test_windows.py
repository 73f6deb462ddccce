"""Sums of windows, scans, what a pooling gives back, and long sorts, against JAX on this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trellis._compat import full_text
from trellis.proof.interpreter import Interpreter


def executed(function, *given):
    """What the interpreter makes of a program before any compiler, and what JAX does."""
    lowered = jax.jit(function).lower(*given)
    found = Interpreter(full_text(lowered))([np.asarray(x)[None] for x in given])
    return [x[0] for x in found], jax.tree.leaves(jax.jit(function)(*given))


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("size", "stride", "padding", "gaps", "spread"),
    [
        ((1, 3), (1, 2), [(0, 0), (1, 2)], (1, 1), (1, 1)),
        ((2, 5), (1, 1), [(0, 1), (4, 0)], (1, 1), (1, 1)),
        ((1, 4), (1, 3), [(0, 0), (6, 9)], (1, 2), (1, 3)),
        ((3, 1), (2, 2), [(-1, 2), (-2, -1)], (2, 1), (1, 1)),
    ],
)
def test_sums_of_windows(size, stride, padding, gaps, spread):
    def both(x):
        how = dict(window_dimensions=size, window_strides=stride, padding=padding, base_dilation=gaps)
        how |= dict(window_dilation=spread)
        sums = jax.lax.reduce_window(x, 0.0, jax.lax.add, **how)
        return sums, jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, **how)

    found, wanted = executed(both, numbers(6, 11))
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_reduction_whose_function_calls_another():
    """Of pairs, by `jnp.where`, which is a call in the program before any compiler."""

    def largest(x, y):
        def greater(one, other):
            (a, b), (c, d) = one, other
            return jnp.where(a >= c, a, c), jnp.where(a >= c, b, d)

        return jax.lax.reduce((x, y), (jnp.float32(-jnp.inf), jnp.float32(0)), greater, (1,))

    x, y = numbers(2, 6, 11)
    found, wanted = executed(largest, x, y)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_sum_of_all_before_takes_little_memory():
    """A window over all of 40,000 numbers, of which there are 40,000, is not written out."""
    text = """HloModule m
add (a: f32[], b: f32[]) -> f32[] {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(%a, %b)
}
ENTRY main () -> f32[2,40000] {
  x = f32[2,40000]{1,0} parameter(0)
  zero = f32[] constant(0)
  ROOT sums = f32[2,40000]{1,0} reduce-window(%x, %zero), window={size=1x40000 pad=0_0x39999_0}, to_apply=%add
}
"""
    x = numbers(2, 40000)
    (found,) = Interpreter(text)([x[None]])
    np.testing.assert_allclose(found[0], np.cumsum(x.astype(np.float64), 1), rtol=1e-5, atol=1e-4)


def scan(body: str, reverse: bool) -> str:
    """A program that is one scan along its second dimension, as JAX 0.11 writes it for GPUs."""
    return f"""HloModule m
step (x: f32[3], carry: f32[3]) -> (f32[3], f32[3]) {{
  x = f32[3]{{0}} parameter(0)
  carry = f32[3]{{0}} parameter(1)
  {body}
}}
ENTRY main () -> (f32[3,5], f32[3]) {{
  given = f32[3,5]{{1,0}} parameter(0)
  start = f32[3]{{0}} parameter(1)
  ROOT both = (f32[3,5]{{1,0}}, f32[3]{{0}}) scan(%given, %start), dimensions={{1}},{" is_reverse=true," * reverse} num_carries=1, to_apply=%step
}}
"""  # noqa: E501


SUM = """sum = f32[3]{0} add(%x, %carry)
  ROOT both = (f32[3]{0}, f32[3]{0}) tuple(%sum, %sum)"""
DECAY = """shrunk = f32[3]{0} multiply(%carry, %carry)
  next = f32[3]{0} subtract(%shrunk, %x)
  ROOT both = (f32[3]{0}, f32[3]{0}) tuple(%carry, %next)"""


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("body", "step"), [(SUM, lambda x, c: (x + c,) * 2), (DECAY, lambda x, c: (c, c * c - x))])
def test_a_scan(body, step, reverse):
    x, carry = 0.3 * numbers(3, 5), numbers(3) / 2
    found, last = Interpreter(scan(body, reverse))([x[None], carry[None]])
    wanted = np.empty_like(x)
    for i in reversed(range(5)) if reverse else range(5):
        wanted[:, i], carry = step(x[:, i], carry)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last[0], carry, rtol=1e-5, atol=1e-6)


def test_what_a_pooling_gives_back():
    """Windows that overlap and reach into padding; of equals the first is chosen."""
    x = np.round(numbers(2, 7, 6), 1)

    def pooled(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 2), (1, 2, 1), [(0, 0), (1, 1), (0, 1)])

    (found,), (wanted,) = executed(jax.grad(lambda x: jnp.sum(pooled(x) ** 2)), x)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_long_sort_takes_little_memory():
    """Of 40,000 numbers and their places; what compares alike keeps its order."""
    (found, order), _ = executed(lambda x: jax.lax.sort_key_val(x, jnp.arange(40000)), np.round(numbers(40000), 2))
    np.testing.assert_array_equal(order, np.argsort(np.round(numbers(40000), 2), kind="stable"))
    assert (np.diff(found) >= 0).all()


def test_what_is_written_over_many_times():
    """The last of 40,000 numbers that go to one place stays."""
    where = np.repeat(np.int32([1, 0]), 20000)
    (found,), _ = executed(lambda x, i: jnp.zeros(3).at[i].set(x), np.arange(40000, dtype=np.float32), where)
    np.testing.assert_array_equal(found, [39999, 19999, 0])
