"""How a manual function is called: containers, arguments given before, `vmap`, and collectives of JAX's own."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.mesh.told import told
from trellis.mesh import make_mesh, reshard
from trellis.mesh.manual.einsum import einsum_plain as einsum
from trellis.mesh.manual.reshard import TransitionError
from trellis.mesh.manual.shard_map import shard_map
from trellis.mesh.meshes import MeshError
from trellis.notation import NotationError, TypeMismatch, f32, parse

MESH = make_mesh(d=4, m=2)


@pytest.fixture(autouse=True)
def on_the_mesh():
    with jax.set_mesh(MESH):
        yield


def put(shape, text):
    return jax.device_put(jnp.ones(shape), parse(text).spec)


@pytest.mark.parametrize(
    "kind", [tuple[f32["batch/d"], f32["batch/d"]], list[f32["batch/d"]], dict[str, f32["batch/d"]]], ids=str
)
def test_an_array_where_the_annotation_has_a_container(kind):
    def give(x: f32["batch/d"]) -> kind:
        return x

    def take(x: kind) -> f32["batch/d"]:
        return x

    give.__qualname__ = take.__qualname__ = "program"
    x = put((8,), "batch/d")
    with pytest.raises(TypeMismatch) as caught:
        shard_map(give)(x)
    assert told(caught) == (
        f"a result must match its annotation, got f32[2] (one slice; differs over d) where {kind!r} has no array, in "
        "result of `program`: return what the annotation says, or correct it"
    )
    with pytest.raises(NotationError) as caught:
        shard_map(take)(x)
    assert told(caught) == (
        f"a manual function's arrays must be annotated, got f32[8/d] where {kind!r} has no array, in argument `x` of "
        "`program`: annotate that field, or pass what the annotation says"
    )


def test_a_function_with_some_of_its_arguments_given():
    def scaled(by, x: f32["batch/d"]) -> f32["batch/d"]:
        return by * x

    x = put((8,), "batch/d")
    assert (shard_map(functools.partial(scaled, 2.0))(x) == 2.0).all()
    with pytest.raises(TypeMismatch, match="in argument `x` of `.*scaled`|in argument `x` of `scaled`"):
        shard_map(functools.partial(scaled, 2.0))(x[:, None])


def test_a_sum_of_jaxs_over_an_axis_along_which_devices_hold_the_same():
    def program(x: f32["batch/d"]) -> f32[""]:
        return jax.lax.psum(x.sum(), ("d", "m"))

    program.__qualname__ = "program"
    with pytest.raises(TypeMismatch) as caught:
        shard_map(program)(put((8,), "batch/d"))
    assert told(caught, by_line=True) == (
        "a value must differ along all mesh axes of a JAX collective, or along none, got psum over d, m of one that "
        "is the same along m, in `program`: leave m out, or use reshard"
    )


def test_a_manual_function_with_a_pending_sum_is_not_mapped():
    def program(x: f32["batch/d in/m"], w: f32["in/m out"]) -> f32["batch/d out"]:
        return reshard("batch/d out +m -> batch/d out", einsum("batch/d in/m, in/m out -> batch/d out +m", x, w))

    program.__qualname__ = "program"
    x, w = put((8, 4), "batch/d in/m"), put((4, 6), "in/m out")
    with pytest.raises(NotationError) as caught:
        jax.vmap(shard_map(program), in_axes=(None, 0))(x, jnp.stack([w, w]))
    assert told(caught) == (
        "JAX cannot map over a manual function that begins or ends a pending sum or a copy, got one under vmap, in "
        "`program`: write the mapped dimension in its annotations and texts, or use jax.lax.map"
    )


def test_what_each_device_multiplies_by_itself_is_no_partial_sum():
    """To JAX's types; `einsum` says that it is one."""

    def program(x: f32["batch/d in/m"], w: f32["in/m out"]) -> f32["batch/d out"]:
        return reshard("batch/d out +m -> batch/d out", x @ w)

    program.__qualname__ = "program"
    with pytest.raises(TransitionError) as caught:
        shard_map(program)(put((8, 4), "batch/d in/m"), put((4, 6), "in/m out"))
    assert told(caught, by_line=True) == (
        "the left side of a text must describe the array, got f32[2 6] (one slice; differs over d, m), which is not "
        "pending along m, for 'batch/d out +m', in reshard('batch/d out +m -> batch/d out'): write no +m there; if "
        "these are partial sums, make them with einsum('... -> ... +m', ...)"
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.lax.psum(x, "dd"),
        lambda x: jax.lax.pmax(x, ("d", "dd")),
        lambda x: jax.lax.ppermute(x, "dd", [(0, 1)]),
        lambda x: jax.lax.all_gather(x, "dd", tiled=True),
        lambda x: x * jax.lax.axis_index("dd"),
    ],
)
def test_a_collective_over_an_axis_that_is_none(call):
    @shard_map
    def apart(x: f32["b/d e"]) -> f32["b/d e"]:
        return call(x)

    with pytest.raises(MeshError) as error:
        apart(put((4, 4), "b/d e"))
    assert (
        told(error)
        == "a collective must run along axes of the mesh (d=4, m=2), got 'dd', in `apart`: did you mean `d`?"
    )


def test_an_assertion_of_ones_own_stays():
    @shard_map
    def apart(x: f32["b/d e"]) -> f32["b/d e"]:
        assert x.shape == "dd"
        return x

    with pytest.raises(AssertionError):
        apart(put((4, 4), "b/d e"))


def test_a_mesh_axis_becomes_manual_once():
    def twice(x: f32["batch/d"]) -> f32["batch/d"]:
        return 2 * x

    x = put((8,), "batch/d")
    for inner, seen, fix in (
        (shard_map(twice), "a call where all of (d=4, m=2) are manual", "remove its @shard_map, or call its `__w"),
        (shard_map(twice, axes={"d"}), "'d', which is manual around this call", "remove it from axes"),
    ):

        @shard_map
        def outer(x: f32["batch/d"]) -> f32["batch/d"]:
            return inner(x)  # noqa: B023

        with pytest.raises(NotationError) as caught:
            outer(x)
        assert seen in told(caught) and fix in told(caught)

    @shard_map
    def around(x: f32["batch/d"]) -> f32["batch/d"]:
        return shard_map(twice).__wrapped__(x)

    assert around(x).tolist() == [2.0] * 8
