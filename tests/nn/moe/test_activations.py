"""What experts compute between their products on TPUs, by kernels: interpreted here, compiled for chips elsewhere."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.inspect.hlo import parse_program
from trellis.inspect.work import work
from trellis.mesh.topology import target_devices
from trellis.nn.gate import ClampedSwiGLU
from trellis.nn.moe import Biases, activations, choose, mix, score
from trellis.nn.moe.activations import activate, activated_product
from trellis.program import trace
from trellis.program.said import filled_rows
from trellis.proof.interpreter import NotInterpreted
from trellis.proof.interpreter.kernels.activations import KERNELS

GATES = {"swiglu": None, "clamped": ClampedSwiGLU(1.0)}
# Rows, columns, and each expert's rows: none, in the middle of tiles and at their ends, fewer than a tile, as many as
# there are, and in several tiles of columns.
LOADS = [
    (700, 96, (100, 0, 300, 5, 0, 200)),
    (1100, 256, (0, 512, 0, 512, 0)),
    (40, 130, (3, 37)),
    (64, 8, (0, 0)),
    (300, 12_345, (20, 200, 0)),
]


def defined(gated, upped, counted, biases, sizes, gate):
    """By definition, in float32."""
    wide = [x.astype(jnp.float32) for x in (gated, upped)]
    if biases:
        group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(gated)), side="right")
        wide = [x + bias.astype(jnp.float32)[jnp.minimum(group, len(bias) - 1)] for x, bias in zip(wide, biases)]
    made = jax.nn.silu(wide[0]) * wide[1] if gate is None else gate(*wide)
    return (made * counted[:, None]).astype(gated.dtype)


def drawn(rows, columns, sizes, biased, dtype=jnp.float32):
    """Operands and a gradient; nothing but NaN past the last expert's rows, which nobody may read."""
    random = np.random.default_rng(0)
    made = [random.standard_normal((rows, columns), np.float32) for _ in range(3)]
    for x in made:
        x[sum(sizes) :] = np.nan
    biases = [random.standard_normal((len(sizes), columns), np.float32) for _ in range(2 * biased)]
    counted = random.standard_normal(rows, np.float32)
    gated, upped, d = (x.astype(dtype) for x in made)
    return (gated, upped, counted, tuple(b.astype(dtype) for b in biases)), d


def both(fn, given, sizes, d):
    """What a function of operands and sizes makes, and the operands' gradients, by one program, on the host."""

    @jax.jit
    def run(given, groups, d):
        out, pull = jax.vjp(lambda *a: fn(*a, groups), *given)
        return out, pull(d)

    return jax.device_get(run(given, np.array(sizes, np.int32), d))


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients_are_those_of_the_definition(gate, biased):
    for rows, columns, sizes in LOADS:
        given, d = drawn(rows, columns, sizes, biased)
        there = sum(sizes)
        out, (*got, of_biases) = both(lambda *a: activate(*a, GATES[gate], True), given, sizes, d)
        *whole, biases = given
        plain = [np.nan_to_num(x) for x in whole]
        wanted, (*meant, meant_biases) = both(
            lambda *a: defined(*a, GATES[gate]), (*plain, biases), sizes, np.nan_to_num(d)
        )
        np.testing.assert_allclose(out[:there], wanted[:there], rtol=2e-5, atol=2e-5)
        for a, b in zip(got, meant, strict=True):
            scale = np.abs(b).max(initial=1.0)
            np.testing.assert_allclose(a[:there], b[:there], rtol=1e-4, atol=1e-5 * scale)
        for a, b in zip(of_biases, meant_biases, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
def test_the_last_product_s_backward_pass_makes_its_operand_again(gate):
    rows, columns, sizes = 300, 40, (100, 0, 120, 7)
    (*whole, biases), _ = drawn(rows, columns, sizes, biased=True)
    there = sum(sizes)
    random = np.random.default_rng(1)
    weights = random.standard_normal((len(sizes), columns, 24), np.float32)
    d = random.standard_normal((rows, 24), np.float32)
    d[there:] = np.nan

    def by_definition(gated, upped, counted, biases, weights, groups):
        operand = defined(gated, upped, counted, biases, groups, GATES[gate])
        group = jnp.searchsorted(jnp.cumsum(groups), jnp.arange(rows), side="right")
        return jnp.einsum("ri,rio->ro", operand, weights[jnp.minimum(group, len(sizes) - 1)])

    given = *whole, biases, weights
    out, got = both(lambda *a: activated_product(*a, GATES[gate], True), given, sizes, d)
    plain = [np.nan_to_num(x) for x in whole]
    wanted, meant = both(by_definition, (*plain, biases, weights), sizes, np.nan_to_num(d))
    np.testing.assert_allclose(out[:there], wanted[:there], rtol=1e-4, atol=1e-4)
    for a, b in zip(got[:3], meant[:3], strict=True):
        np.testing.assert_allclose(a[:there], b[:there], rtol=1e-3, atol=1e-3)
    for a, b in zip(jax.tree.leaves(got[3:]), jax.tree.leaves(meant[3:]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_rows_of_bfloat16_are_rounded_once():
    given, d = drawn(100, 128, (60, 30), biased=True, dtype=jnp.bfloat16)
    out, got = both(lambda *a: activate(*a, None, True), given, (60, 30), d)
    wide = [np.nan_to_num(x.astype(np.float32)) for x in given[:3]]
    biases = tuple(b.astype(np.float32) for b in given[3])
    wide_d = np.nan_to_num(d.astype(np.float32))
    wanted, meant = both(lambda *a: defined(*a, None), (*wide, biases), (60, 30), wide_d)
    np.testing.assert_array_equal(out[:90], wanted[:90].astype(jnp.bfloat16))
    for a, b in zip(got[:2], meant[:2], strict=True):
        differs = np.asarray(a[:90] != b[:90].astype(jnp.bfloat16))  # by how a sum of three is ordered
        assert differs.mean() < 1e-2


@pytest.mark.parametrize(
    ("columns", "itemsize", "tile"),
    [
        (200, 2, (512, 200)),
        (768, 2, (512, 384)),
        (2880, 2, (512, 1536)),
        (14_336, 2, (128, 7168)),
        (14_336, 4, (128, 3584)),
        (14_337, 4, (128, 4096)),
    ],
)
def test_tiles_have_room(columns, itemsize, tile):
    assert activations._tile(columns, itemsize) == tile


def compiled(name: str, biased: bool, gate, rows=65_536, columns=768, experts=4) -> str:
    """The text of the forward and the backward pass for one device of a target."""
    mesh = jax.sharding.Mesh(target_devices(name)[:1], "x", axis_types=(AxisType.Explicit,))
    wide, of_experts = ((rows, columns), jnp.bfloat16), ((experts, columns), jnp.bfloat16)
    shapes = [*[wide] * 3, ((rows,), jnp.float32), ((experts,), jnp.int32), *[of_experts] * (2 * biased)]
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P())) for shape, dtype in shapes]

    def both(d, gated, upped, counted, sizes, *biases):
        made, pull = jax.vjp(lambda *a: activate(*a, sizes, gate), gated, upped, counted, biases)
        return made.astype(jnp.float32).sum(), pull(d)

    with jax.set_mesh(mesh):
        sliced = jax.jit(jax.shard_map(both, in_specs=P(), out_specs=P()), donate_argnums=(0, 1))
        return sliced.lower(*given).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "biased", "gate"),
    [("v6e:2x2", True, "clamped"), ("v5p:2x2x1", False, "swiglu"), ("v5e:2x2", True, "swiglu")],
)
def test_tpus_read_rows_once_in_each_pass(name, biased, gate):
    program = parse_program(compiled(name, biased, GATES[gate]))
    kernels = [i.name for i in program.by_name.values() if re.match(r"experts_gate_(for|back)ward", i.name)]
    assert len(kernels) == 2
    moved = [i for i in program.by_name.values() if "bf16[65536,768]" in i.type and i.op in ("fusion", "copy")]
    assert not moved


def test_a_plan_counts_the_rows_that_are_there():
    """Three arrays forward, and five backward, of as many rows as are filled."""

    def both(gated, upped, counted, sizes, d):
        with filled_rows(1000, 1500):
            made, pull = jax.vjp(lambda *a: activate(*a, (), sizes, None), gated, upped, counted)
            return made, pull(d)

    wide = jax.ShapeDtypeStruct((1500, 256), jnp.bfloat16)
    given = (wide, wide, jax.ShapeDtypeStruct((1500,), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32), wide)
    pieces = [piece for piece in work(trace(both, *given)) if piece.kind == "kernel"]
    for piece, arrays, operations in zip(pieces, (3, 5), (activations._FORWARD, activations._BACKWARD), strict=True):
        rows = arrays * 1000 * 256 * 2
        assert rows < piece.num_bytes < 1.05 * rows  # and tables, and a number for each row
        assert piece.vector == operations * 1000 * 256
    assert dataclasses.replace(pieces[0], vector=0.0).flops == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("way", "gate"), [("gather", "clamped"), ("ragged", "swiglu")])
def test_gradients_of_a_mixture_on_tpus_are_one_device_s(way, gate):
    """With all kernels, and with orders that a backward pass reads in another manual region than they were made in."""
    experts, embed, mlp = 8, 128, 256
    sizes = {"batch": 4, "pos": 64, "embed": embed, "routes": experts, "experts": experts, "mlp": mlp}
    names = ["batch pos embed", "embed routes", *["experts embed mlp"] * 2, "experts mlp embed"]
    names += ["experts mlp", "experts mlp", "routes embed"] if gate == "clamped" else []

    def loss(x, router, gated, upped, down, *biases):
        added = Biases(*biases) if biases else None
        made = mix(x, choose(score(x, router), 2), gated, upped, down, way=way, gated=GATES[gate], biases=added)
        return (made * made).sum().array

    used = {"experts": "expert", "batch": "expert/data"}
    with tr.Layout(tr.make_mesh(jax.devices()[:4], expert=2, data=2), {"experts": "expert"}, used) as layout:
        given = []
        for n in names:
            place = layout.sharding(n.split(), "compute" if "batch" in n else "params")
            shape = [sizes[name] for name in n.split()]
            given.append(tr.named(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place), n))
        proof = tr.prove(jax.grad(loss, argnums=tuple(range(len(names)))), *given, on="v5e:2x2")
    assert proof.proven, str(proof)
    assert {name.partition("ward")[0] for name in proof.kernels} >= {"experts_gate_for", "experts_gate_back"}


def test_a_gate_of_whole_numbers_is_named_as_one_of_floats():
    """A proof knows a kernel's gate by its name."""
    (*whole, biases), _ = drawn(32, 128, (20, 7), biased=True)
    kernel = lambda gate: str(jax.make_jaxpr(lambda *a: activate(*a, jnp.array([20, 7]), gate, True))(*whole, biases))
    assert "experts_gate_forward_7_0_by_2_0" in kernel(ClampedSwiGLU(limit=7, slope=2))
    assert "experts_gate_forward_7_0_by_2_0" in kernel(ClampedSwiGLU(limit=7.0, slope=2.0))
    for name in ("experts_gate_forward_wide", "experts_gate_forward_1e_20_by_1_702.3"):
        with pytest.raises(NotInterpreted, match=f"the gate of the kernel {name}"):
            KERNELS["experts_gate_forward"](name, None, SimpleNamespace(type=lambda _: None))
