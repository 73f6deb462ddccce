"""The ledger, read off types, held against the collectives in the compiled program.

On the CPU every program is held, with reduce-scatters counted as all-reduces on both sides: its compiler writes them
so in explicit mode. The programs with reduce-scatters are held once more as what they are, compiled for a TPU slice.
A collective over two mesh axes counts for each of them what one over each axis after the other would move, which is
how XLA writes some of them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from tests.inspect.programs import PROGRAMS, arg, gradient, partly_manual, sequence_parallel, settled, tensor_parallel
from trellis.inspect import collectives, compare, ledger, structure_of
from trellis.mesh.topology import slice_devices


def mesh_of(devices, shape=(4, 2)):
    return Mesh(np.array(devices).reshape(shape), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


@functools.cache
def both(name):
    """A program's ledger, its compiled collectives on eight CPU devices, and the two matched."""
    program, *types = PROGRAMS[name]
    return _both(program, types, mesh_of(jax.devices()), {})


def _both(program, types, mesh, dtypes):
    with jax.set_mesh(mesh):
        args = [
            jax.ShapeDtypeStruct(shape, dtypes.get(dtype, dtype), sharding=NamedSharding(mesh, spec))
            for shape, spec, dtype in types
        ]
        found, compiled = ledger(program, *args), jax.jit(program).lower(*args).compile()
        return found, collectives(compiled, mesh), structure_of(found, compiled, mesh)


@pytest.mark.slow(but=20)
@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_per_mesh_axis(name):
    predicted, found, structure = both(name)
    comparison = compare(predicted, found, scatter_as_reduce=True)
    assert comparison.agrees(), f"\n{predicted}\n{found}\n{comparison}"
    assert structure.right, f"\n{predicted}\n{found}\n{structure}"


@pytest.mark.parametrize("spec", [P("model"), P(None, "data"), P(("model", "data"), None)])
def test_how_one_reshard_of_jax_exchanges_and_gathers_is_the_compilers_choice(spec):
    """A route of several moves in one equation; `tr.reshard` writes a route as one equation for each move."""
    types = [arg((16, 24), "data", "model")]
    found, _, structure = _both(lambda x: jax.sharding.reshard(x, spec), types, mesh_of(jax.devices()), {})
    assert len(found.rows) > 1 and {row.note for row in found} == {"the compiler chooses"}, found
    assert structure.right, structure


def test_a_number_over_two_axes_and_each_devices_best_are_no_more_than_their_rows_ask_for():
    """The number is summed along one axis after the other; of the best a device sends the values and the places."""
    types = [arg((64, 128), "data", "model")]
    found, _, structure = _both(lambda x: (jnp.sum(x), jnp.argmax(x, 1)), types, mesh_of(jax.devices()), {})
    assert structure.right and not structure.besides, structure
    assert not any(match.ways["an equal one"] for match in structure.matches), structure
    assert sorted(row.dtype for row in found if row.kind == "all-gather") == ["f32", "i32"]


@pytest.mark.parametrize("spec", [P("data", "model"), P(None, "model", "data"), P(("data", "model"))])
def test_sums_over_two_axes_that_are_taken_at_once_or_in_steps_agree(spec):
    """Those of two dimensions are taken one after the other here, some together; none of them may be missing."""
    program = lambda x: (x.sum((0, 1)), jnp.sin(x).sum((1, 2)), x.max(), x.sum(), (x**2).sum())
    found, compiled, structure = _both(program, [arg((16, 24, 8), *spec)], mesh_of(jax.devices()), {})
    one, other = compare(found, compiled), compare(compiled, dataclasses.replace(found, mesh=compiled.mesh))
    assert one.agrees() and other.agrees() and structure.right
    assert {axis: -more for axis, more in other.stepped.items()} == dict(one.stepped)
    for row in compiled:
        fewer = dataclasses.replace(compiled, rows=tuple(other for other in compiled if other is not row))
        assert not compare(found, fewer).agrees(), row


@pytest.mark.slow
@pytest.mark.parametrize("held", ["a/q b", "a b/q"])
def test_a_sum_settles_before_other_slices_move(held):
    """Both at once is more than XLA's partitioner finds a way for: it sends the whole array."""
    mesh = tr.make_mesh(q=2, w=4)
    like = jax.ShapeDtypeStruct((8, 8, 8), np.float32, sharding=NamedSharding(mesh, P("w", *_spec(held))))
    with jax.set_mesh(mesh):
        for to in ("a/w b", "a b/w", "a/w b/q", "a/q b/w", "a/w/q b", "a b/w/q", "a/q/w b", "a b/q/w"):
            program = lambda x, to=to: tr.reshard(f"{held} +w -> {to}", tr.einsum(f"z/w {held} -> {held} +w", x))
            found = collectives(jax.jit(program).lower(like).compile(), mesh)
            comparison = compare(ledger(program, like), found, scatter_as_reduce=True)
            assert comparison.agrees(), f"{to}\n{comparison}"


def _spec(text: str) -> list[tuple[str, ...]]:
    return [tuple(dim.split("/")[1:]) for dim in text.split()]


def test_halves_that_become_thirds_are_gathered():
    mesh = mesh_of(jax.devices()[:6], (2, 3))
    predicted, found, structure = _both(
        lambda x: jax.reshard(x, P("model", None)), [arg((12, 8), "data", None)], mesh, {}
    )
    assert predicted.per_kind() == found.per_kind() == {"all-gather": 192}
    assert compare(predicted, found).agrees() and structure.right


# Large enough that the TPU's compiler keeps them: it makes all-reduces of small reduce-scatters.
SCATTERS = {
    "scatter": (settled(["data"], "data", None), arg((256, 512), None, "data"), arg((512, 256), "data", None)),
    "tensor parallel": (
        gradient(tensor_parallel),
        arg((8, 128, 256), "data", None, None), arg((256, 512), "data", "model"), arg((512, 256), "model", "data"),
    ),
    "sequence parallel": (
        gradient(sequence_parallel),
        arg((8, 128, 256), "data", "model", None), arg((256, 512), "data", "model"), arg((512, 256), "model", "data"),
    ),
    "partly manual": (gradient(partly_manual), arg((256, 256), "data", None), arg((256, 512), None, "model")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SCATTERS)
def test_reduce_scatters_on_a_tpu_slice(name):
    program, *types = SCATTERS[name]
    mesh = mesh_of(slice_devices("v5e:2x4"))
    predicted, found, structure = _both(program, types, mesh, {jnp.float32: jnp.bfloat16})  # as products move there
    comparison = compare(predicted, found)
    assert comparison.agrees(), f"\n{predicted}\n{found}\n{comparison}"
    assert structure.right, str(structure)
    assert predicted.per_kind() == found.per_kind(), f"\n{predicted}\n{found}\n{comparison}"
    assert ("reduce-scatter" in found.per_kind()) == (name != "partly manual")


def test_a_joint_scatter_over_a_whole_two_dimensional_slice_is_an_all_reduce_there():
    """What the types ask for and what the TPU's compiler does differ here; the comparison shows it."""
    program, *types = PROGRAMS["scatter jointly"]
    mesh = mesh_of(slice_devices("v5e:2x4"))
    predicted, found, structure = _both(program, types, mesh, {jnp.float32: jnp.bfloat16})
    comparison = compare(predicted, found)
    assert structure.right and "all-reduce and slice" in str(structure)
    assert not comparison.agrees()
    assert comparison.axes == {"data": (6144, 12288), "model": (1024, 2048)}
    assert "reduce-scatter" in str(comparison) and "2.000" in str(comparison)


def test_names_survive_into_the_compiled_program():
    mesh = mesh_of(jax.devices())

    def program(w):
        return jnp.sin(tr.reshard("embed/data mlp -> embed mlp ~data", w))

    with jax.set_mesh(mesh):
        w = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("data", None)))
        (row,) = collectives(jax.jit(program).lower(w).compile(), mesh).rows
    assert (row.kind, row.what) == ("all-gather", "embed=16 mlp=32")
    assert row.source.endswith("(program)")


@pytest.mark.parametrize(
    ("first", "counts"),
    [
        pytest.param(lambda x: x, (1, 1), id="one value"),
        pytest.param(jnp.sin, (2, 1), id="equal values"),
        pytest.param(lambda x: jax.reshard(x, P(None, "data")), (3, 2), id="a route of two moves"),
        pytest.param(lambda x: jnp.sum(x, 0, keepdims=True), (2, 1), id="equal sums"),
    ],
)
def test_a_value_moves_once_and_on_tpus_equal_values_do(first, counts):
    """XLA's partitioner moves one value once, even if the program says so twice; only TPUs' compiler merges others."""

    def program(x):
        return jax.reshard(first(x), P(None, None)) + jnp.sin(jax.reshard(first(x), P(None, None)))

    found, compiled, _ = _both(program, [arg((8, 4), "data")], mesh_of(jax.devices()), {})
    on_tpus = NamedSharding(mesh_of(slice_devices("v5e:2x4")), P("data"))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=on_tpus)
    assert (found.count(), ledger(program, x).count()) == counts
    assert compare(found, compiled).agrees()
