"""How a manual function is called: containers, arguments given before, `vmap`, and collectives of JAX's own."""

import dataclasses
import functools
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from tests.mesh.told import told
from trellis.mesh import all_gather, make_mesh, reduce_scatter, reshard
from trellis.mesh.manual.einsum import einsum_plain as einsum
from trellis.mesh.manual.reshard import TransitionError
from trellis.mesh.manual.shard_map import shard_map
from trellis.mesh.meshes import MeshError, mesh_text
from trellis.notation import NotationError, TypeMismatch, f32, i32, parse, typeof

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
    container = kind.__origin__.__name__
    for program, got, place in (
        (give, "f32[2] (one slice; differs over d)", "result of"),
        (take, "f32[8/d]", "argument `x` of"),
    ):
        with pytest.raises(TypeMismatch) as caught:
            shard_map(program)(x)
        assert told(caught) == (
            f"a value must be the container of its annotation, got {got} for {kind!r}, in {place} `program`: make it a "
            f"{container}, or correct the annotation"
        )


def test_a_stack_of_arrays_with_any_leading_dimensions():
    @shard_map
    def double(x: tr.Stack["layers/d", f32["... embed/m"]]) -> f32["layers/d a embed/m"]:
        return x + x

    x = put((4, 3, 8), "layers/d a embed/m")
    assert str(typeof(double(x))) == "f32[4/d 3 8/m]"
    assert str(typeof(double(tr.named(x, "layers a embed")))) == "f32[layers/d=4 a=3 embed/m=8]"


class Scale(eqx.Module):
    by: jax.Array

    def __call__(self, x: f32["batch/d"]) -> f32["batch/d"]:
        return x * self.by

    method = __call__


@dataclasses.dataclass(frozen=True, slots=True)
class Twice:
    by: int = 2

    def __call__(self, x: f32["batch/d"], by: int = 2) -> f32["batch/d"]:
        return x * by


@pytest.mark.parametrize(
    "fn",
    [
        Scale(jnp.float32(2)),
        Scale(jnp.float32(2)).method,
        eqx.filter_jit(Scale(jnp.float32(2)).method),
        Twice(),
        Twice().__call__,
        jax.jit(Twice().__call__),
        functools.partial(Twice().__call__, by=2),
    ],
    ids=["module", "its method", "compiled", "dataclass", "method", "jit", "partial"],
)
@pytest.mark.parametrize("made", [shard_map, tr.checked])
def test_what_is_called_has_the_annotations_of_what_was_written(made, fn):
    x = put((8,), "batch/d")
    np.testing.assert_array_equal(made(fn)(x), x * 2)
    with pytest.raises(TypeMismatch, match=r"an array must have the dtype of its annotation, got i32\[8/d\]"):
        made(fn)(x.astype(jnp.int32))


def test_numbers_of_numpy_are_taken_as_jax_takes_them():
    """NumPy's have 64 bits if nothing else is said; JAX's have 32, also in a call under `jit`."""

    def program(x: f32["batch/d"], ids: i32["batch/d"], scale: f32[""]) -> tuple[f32["batch/d"], f32["three"]]:
        return x * scale + ids.astype(x.dtype), np.ones(3)

    args = np.ones(8), np.arange(8), np.float64(2)
    for call in (shard_map(program), jax.jit(shard_map(program))):
        made, ones = call(*args)
        np.testing.assert_array_equal(made, np.arange(8) + 2)
        assert (made.dtype, ones.dtype) == (np.float32, np.float32)


@pytest.mark.parametrize("grad", [jax.grad, tr.grad])
def test_a_largest_value_over_devices_has_no_derivative(grad):
    def program(x: f32["batch/d"]) -> f32[""]:
        return jax.lax.pmax(x.max(), "d")

    with pytest.raises(TypeMismatch) as caught:
        grad(lambda x: shard_map(program)(x))(put((8,), "batch/d"))
    name = told(caught).split("`")[1]
    assert told(caught) == (
        "JAX cannot differentiate a largest or smallest value over devices, got jax.lax.pmax, in "
        f"`{name}`: give it jax.lax.stop_gradient(values) if the result does not depend on it, as a softmax does not, "
        "or gather the values and compare them on each device"
    )


class Sums(typing.NamedTuple):
    total: f32["m"]
    count: f32[""]


def test_a_named_tuple_comes_in_and_goes_out():
    def add(x: f32["batch/d m"], sums: list[Sums]) -> Sums:
        total = jax.lax.psum(x.sum(0), "d")
        return Sums(total + sums[0].total, jax.lax.psum(1.0, "d"))

    got = shard_map(add)(put((8, 3), "batch/d m"), [Sums(jnp.ones(3), jnp.ones(()))])
    assert isinstance(got, Sums)
    assert (got.total.tolist(), float(got.count)) == ([9.0] * 3, 4.0)
    with pytest.raises(TypeMismatch, match=r"one length in a call, got m=3 .* and m=2 from argument `sums\[0\].total`"):
        shard_map(add)(put((8, 3), "batch/d m"), [Sums(jnp.ones(2), jnp.ones(()))])


def test_a_number_of_pythons_is_an_array_without_dimensions_if_the_type_holds_it():
    def count(by: i32[""]) -> i32[""]:
        return jax.lax.psum(1.0, "d")

    with pytest.raises(TypeMismatch, match=r"expected an array of type i32\[\], got float\[\], in argument `by`"):
        shard_map(count)(2.5)
    count.__annotations__["by"] = f32[""]
    with pytest.raises(TypeMismatch, match=r"expected an array of type i32\[\], got float\[\], in result of"):
        shard_map(count)(2)


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


@shard_map
def layer(x: f32["batch/d in/m"], w: f32["in/m out/d"]) -> f32["batch/d out/m"]:
    """A copy, a pending sum, and a scatter of it."""
    w = reshard("in/m out/d -> in/m out ~d", w)
    y = einsum("batch/d in/m, in/m out ~d -> batch/d out +m", x, w)
    return jnp.tanh(reshard("batch/d out +m -> batch/d out/m", y))


def plain_layer(x, w):
    return jnp.tanh(x @ w)


@pytest.mark.slow
def test_a_manual_function_with_pending_sums_and_copies_is_mapped():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(2, 4, 8)).astype(np.float32)
    mapped = lambda fn: jax.vmap(fn, in_axes=(None, 0))
    loss = lambda fn: jax.grad(lambda x, w: (mapped(fn)(x, w) ** 2).sum(), argnums=(0, 1))
    sliced = jax.device_put(x, parse("batch/d in/m").spec), jax.device_put(w, parse("two in/m out/d").spec)
    one = jax.device_put(w[0], parse("in/m out/d").spec)
    ways = [(way, sliced, (x, w)) for way in (mapped, loss)]
    ways += [(way, (sliced[0], one), (x, w[0])) for way in (jax.jacrev, jax.jacfwd)]
    for way, given, whole in ways:
        found, expected = jax.jit(way(layer))(*given), way(plain_layer)(*whole)
        for value, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)


def test_a_map_may_slice_what_it_maps_over_a_mesh_axis_of_its_own():
    @shard_map
    def alone(x: f32["batch/d in"], w: f32["in out"]) -> f32["out"]:
        return reshard("out +d -> out", einsum("batch/d out -> out +d", x @ w))

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 8, 4)).astype(np.float32), rng.normal(size=(4, 6)).astype(np.float32)
    loss = lambda fn: jax.jit(jax.value_and_grad(lambda x, w: (jax.vmap(fn, (0, None))(x, w) ** 2).sum(), (0, 1)))
    sliced = jax.device_put(x, parse("tasks/m batch/d in").spec)
    found, expected = loss(alone)(sliced, w), loss(lambda x, w: (x @ w).sum(0))(x, w)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_annotations_of_what_is_mapped_have_no_pending_sums():
    @shard_map
    def program(x: f32["batch/d in"]) -> f32["in +d"]:
        return einsum("batch/d in -> in +d", x)

    with pytest.raises(NotationError) as caught:
        jax.vmap(program)(put((2, 8, 4), "tasks batch/d in"))
    assert told(caught) == (
        "JAX cannot map over a manual function with a pending sum or a copy in its annotations, got one under vmap, in "
        "`program`: settle it inside, write the mapped dimension in its annotations and texts, or use jax.lax.map"
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


def test_the_name_that_is_no_axis_is_told_and_no_other_on_its_line():
    @shard_map
    def apart(x: f32["b/d e"]) -> f32["b/d e"]:
        return {"e": jax.lax.psum(x, "dd")}["e"]

    with pytest.raises(MeshError, match="got 'dd', in `apart`"):
        apart(put((4, 4), "b/d e"))


@pytest.mark.parametrize(
    ("pairs", "seen"),
    [
        ([(i, i + 1) for i in range(4)], "4, which is none of 4 devices"),
        ([(0, 1.0)], "1.0, which is none of 4 devices"),
        ([(0, 1), (2, 1)], "device 1 twice in (1, 1)"),
        ([(0, 3), (2, -1)], "device 3 twice in (3, -1)"),
        ([(0, 1), (0, 2)], "device 0 twice in (0, 0)"),
    ],
)
def test_a_permute_that_is_no_permutation(pairs, seen):
    @shard_map
    def sent(x: f32["b/d e"]) -> f32["b/d e"]:
        return jax.lax.ppermute(x, "d", pairs)

    with pytest.raises(NotationError) as error:
        sent(put((4, 4), "b/d e"))
    assert told(error, by_line=True) == (
        f"a permute must send from a device once at most, and to one once at most, got {seen}, in `sent`: count "
        "devices along 'd' from 0, as in (i, (i + 1) % size)"
    )


@pytest.mark.parametrize("axes", [None, {"d", "m"}], ids=["all", "partial"])
def test_a_permute_along_mesh_axes_in_another_order_is_refused(axes):
    @shard_map(axes=axes)
    def program(x: f32["b/m/d"]) -> f32["b/m/d"]:
        return jax.lax.ppermute(x, ("m", "d"), [(0, 1), (1, 2), (2, 3), (3, 0)])

    mesh = make_mesh(jax.devices()[:4], d=2, m=2) if axes is None else make_mesh(d=2, m=2, left=2)
    with jax.set_mesh(mesh):
        with pytest.raises(NotationError) as error:
            program(jax.device_put(jnp.arange(4.0), parse("b/m/d").spec))
        assert told(error, by_line=True) == (
            "a permute along several mesh axes must name them in the mesh's order, in which JAX counts its devices "
            "whatever order it is given (`axis_index` counts in that), got ('m', 'd') on the mesh "
            f"({mesh_text(mesh)}), in `program`: write ('d', 'm'), and count along 'd/m'"
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


@pytest.mark.parametrize("axes", [None, {"d"}], ids=["all", "partial"])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_an_array_without_elements_is_moved_as_any_other(shape, axes):
    @shard_map(axes=axes)
    def program(x: f32["b/d e/m"]) -> tuple[f32["b e/m"], f32["b/d e/m"]]:
        whole = all_gather("b/d e/m -> b e/m", x)
        return whole, reduce_scatter("b e/m +d -> b/d e/m", reshard("b e/m -> b e/m +d", whole))

    x = put(shape, "b/d e/m")
    assert [typeof(y) for y in jax.jit(program)(x)] == [typeof(put(shape, text)) for text in ("b e/m", "b/d e/m")]
    gradient = jax.jit(jax.grad(lambda x: sum(map(jnp.sum, program(x)))))(x)
    assert typeof(gradient) == typeof(x)


@pytest.mark.parametrize(
    ("axes", "first", "step", "seen", "fix"),
    [
        (None, lambda x: jnp.zeros(x.shape), lambda c, x: c + x, "f32[1,4] and then f32[1,4]{V:d}",
         "start it with jax.lax.pcast(..., ('d',), to='varying')"),
        (None, lambda x: x, lambda c, x: jax.lax.psum(c, "d"), "f32[1,4]{V:d} and then f32[1,4]",
         "return jax.lax.pcast(..., ('d',), to='varying') from it"),
        ({"d"}, lambda x: jnp.zeros(4), lambda c, x: c + einsum("b/d e -> e +d", x), "f32[4] and then f32[4]{V:d}",
         "start it with jax.lax.pcast(..., ('d',), to='varying'), or if it is a pending sum with "
         'reshard("e -> e +d", ...)'),
    ],
    ids=["zeros", "summed", "pending"],
)  # fmt: skip
def test_a_carry_that_starts_otherwise_than_it_goes_on(axes, first, step, seen, fix):
    @shard_map(axes=axes)
    def looped(x: f32["b/d e"]) -> f32["b/d e"]:
        return jax.lax.fori_loop(0, 3, lambda i, c: step(c, x), first(x)) + x

    with pytest.raises(TypeMismatch) as error:
        looped(put((4, 4), "b/d e"))
    assert told(error, by_line=True) == (
        f"a loop's carry must start with the type that its body returns, got {seen.replace('f32', 'float32')}, in "
        f"`looped`: {fix}"
    )
