"""Names cost nothing at run time: compiled named code equals compiled plain JAX."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from tests.benchmarks.script import load


@pytest.fixture(scope="module")
def module():
    return load("trace_overhead")


@pytest.fixture(scope="module")
def compiled(module):
    """The gradient of a small Llama's loss, plain and named, as compiled programs."""
    with jax.numpy_rank_promotion("allow"):
        return [
            jax.jit(jax.value_and_grad(fn)).lower(params, batch).compile() for fn, params, batch in module.programs()
        ]


def operations(program) -> collections.Counter:
    """How often each operation stands in the compiled program."""
    return collections.Counter(re.findall(r" = \S+ ([a-z][a-z0-9-]*)\(", program.as_text()))


@pytest.mark.slow
def test_the_same_arithmetic_and_bytes(compiled):
    plain, named = (program.cost_analysis() for program in compiled)
    assert named["flops"] == pytest.approx(plain["flops"], rel=5e-3)
    # XLA makes the small tables of angles and masks anew where that is cheaper than keeping them.
    assert named["transcendentals"] == pytest.approx(plain["transcendentals"], rel=0.01)
    assert named["bytes accessed"] == pytest.approx(plain["bytes accessed"], rel=0.02)


@pytest.mark.slow
def test_the_same_operations(compiled):
    plain, named = map(operations, compiled)
    for operation in ("dot", "while", "exponential", "custom-call", "scatter", "gather", "all-reduce"):
        assert named[operation] == plain[operation], operation


@pytest.mark.slow
def test_tracing_calls_at_most_a_tenth_more_functions(module):
    with jax.numpy_rank_promotion("allow"):
        assert module.calls() <= 1.1


def test_an_attention_block_compiles_to_the_plain_program():
    q, k = (tr.named(jnp.ones((2, 8, 2, 4)), f"batch {p} heads head_dim") for p in ("pos", "key_pos"))

    def plain(q, k, v):
        scores = jnp.einsum("bphd,bkhd->bhpk", q * 0.5, k)
        mask = jnp.arange(8)[:, None] >= jnp.arange(8)[None, :]
        weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -1e9), axis=-1)
        return jnp.einsum("bhpk,bkhd->bphd", weights, v).sum()

    def named(q, k, v):
        scores = tr.einsum(
            "batch pos heads head_dim, ... key_pos heads head_dim -> batch heads pos key_pos", q * 0.5, k
        )
        mask = tr.outer(tr.greater_equal, tr.arange(q.axis("pos")), tr.arange(k.axis("key_pos")))
        weights = tr.softmax(tr.where(mask, scores, -1e9), "key_pos")
        return (
            tr.einsum("... pos key_pos, ... key_pos head_dim -> ... pos head_dim", weights, k if v is None else v)
            .sum()
            .array
        )

    programs = [
        jax.jit(jax.grad(plain, argnums=(0, 1, 2))).lower(q.array, k.array, k.array).compile(),
        jax.jit(jax.grad(named, argnums=(0, 1, 2))).lower(q, k, k).compile(),
    ]
    first, second = (program.cost_analysis() for program in programs)
    assert first["flops"] == second["flops"]
    assert second["bytes accessed"] == pytest.approx(first["bytes accessed"], rel=0.02)
    assert operations(programs[0])["dot"] == operations(programs[1])["dot"]
