"""The fenced gates against the plain ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.named import NamesError, named
from trellis.nn import geglu, swiglu

GATES = pytest.mark.parametrize(
    ("gated", "activation"), [(swiglu, jax.nn.silu), (geglu, jax.nn.gelu)], ids=["swiglu", "geglu"]
)


@GATES
def test_the_fence_changes_no_number(gated, activation):
    gate, up, cotangent = 2 * jax.random.normal(jax.random.key(0), (3, 4, 16))
    value, pull = jax.vjp(gated, gate, up)
    expected, plain = jax.vjp(lambda gate, up: activation(gate) * up, gate, up)
    np.testing.assert_array_equal(value, expected)
    for mine, theirs in zip(pull(cotangent), plain(cotangent)):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=5e-6)


@pytest.mark.slow
@GATES
def test_both_modes_and_second_derivatives(gated, activation):
    gate, up = jax.random.normal(jax.random.key(1), (2, 4, 16))
    plain = lambda gate, up: (activation(gate) * up).sum()
    mine = lambda gate, up: gated(gate, up).sum()
    for derive in (jax.jacfwd, jax.jacrev, lambda f: jax.jacfwd(jax.grad(f)), lambda f: jax.jacrev(jax.grad(f))):
        np.testing.assert_allclose(derive(mine)(gate, up), derive(plain)(gate, up), rtol=2e-5, atol=2e-6)


def test_a_geglu_keeps_its_operands_alone():
    """Two arrays of `mlp`, and no third, for a batch that is not recomputed."""
    gate, up = jax.random.normal(jax.random.key(0), (2, 4, 16)).astype(jnp.bfloat16)
    _, pull = jax.vjp(geglu, gate, up)
    assert sum(leaf.size for leaf in jax.tree.leaves(pull)) == 2 * gate.size


def test_on_a_cpu_each_gradient_is_one_operation_that_reads_nothing_which_both_have():
    loss = lambda gate, up: (swiglu(jnp.sin(gate), jnp.cos(up)) ** 2).sum()
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*jnp.ones((2, 64, 32))).compile().as_text()
    computations = dict(re.findall(r"^%([\w.\-]+) \(.*?\{$(.*?)^\}", text, re.M | re.S))
    called = [computations[name] for name in re.findall(r" call\(.*?to_apply=%([\w.\-]+)", text)]
    assert len(called) == 2
    for body in called:
        (fused,) = re.findall(r"calls=%([\w.\-]+)", body)
        assert computations[fused].count(" exponential(") == 1


@GATES
def test_in_bfloat16_a_cpu_rounds_values_and_gradients_once(gated, activation):
    wide = jax.random.normal(jax.random.key(0), (3, 4, 16)).astype(jnp.bfloat16).astype(jnp.float32)
    value, pull = jax.vjp(gated, *wide[:2].astype(jnp.bfloat16))
    expected, plain = jax.vjp(gated, *wide[:2])
    found = (value, *pull(wide[2].astype(jnp.bfloat16)))
    for mine, exact in zip(found, (expected, *plain(wide[2])), strict=True):
        np.testing.assert_array_equal(mine, exact.astype(jnp.bfloat16))


@pytest.mark.slow
def test_operands_that_lie_differently():
    gate, up = jax.random.normal(jax.random.key(0), (2, 4, 3))
    expected = jax.jit(jax.grad(lambda gate, up: ((jax.nn.silu(gate) * up) ** 2).sum(), argnums=(0, 1)))(gate, up)
    with tr.Layout(tr.make_mesh(jax.devices()[:2], model=2), params={"batch": "model"}):
        sliced, whole = tr.shard(named(gate, "batch mlp")), tr.shard(named(up, "batch mlp"), "compute")
        loss = lambda gate, up: (swiglu(gate, up) ** 2).sum()
        for operands in (sliced, whole), (sliced.array, whole.array):
            found = tr.grad(loss, argnums=(0, 1))(*operands)
            for mine, theirs in zip(jax.tree.leaves(found), expected, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_fences_of_each_platform():
    """Of the gradients everywhere; of what they are made of, too, where the forward pass's would be kept: on CPUs, and
    on GPUs, which write layers out."""

    def traced(platform):
        mesh = AbstractMesh(
            (2,), ("data",), (AxisType.Explicit,), abstract_device=AbstractDevice(platform, None, platform)
        )
        with jax.sharding.use_abstract_mesh(mesh):
            x = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
            loss = lambda a, b: swiglu(named(a, "batch mlp"), named(b, "batch mlp")).array.astype(jnp.float32).sum()
            return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, x)).count(" optimization_barrier ")

    assert [traced(platform) for platform in ("tpu", "cpu", "cuda")] == [1, 2, 2]


@GATES
def test_operands_in_other_slices_of_a_manual_program_are_refused(gated, activation):
    """Their order on the devices is no part of JAX's types."""

    @tr.shard_map
    def program(gate: tr.f32["pos/a/b mlp"], up: tr.f32["pos/b/a mlp"]) -> tr.f32["pos/a/b mlp"]:
        return gated(gate, up)

    x = tr.ones({"pos": 4, "mlp": 2})
    with (
        jax.set_mesh(tr.make_mesh(jax.devices()[:4], a=2, b=2)),
        pytest.raises(NamesError, match="sliced the same way in all operands, got pos over a/b and over b/a"),
    ):
        program(x, x)
