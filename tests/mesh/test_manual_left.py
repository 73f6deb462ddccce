"""Mesh axes that a manual function leaves to the surrounding program: sums, lookups and collectives of JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.mesh.told import told
from trellis.mesh import make_mesh, reshard
from trellis.mesh.manual.einsum import einsum_plain as einsum
from trellis.mesh.manual.shard_map import shard_map
from trellis.mesh.manual.take import take_plain as take
from trellis.mesh.meshes import MeshError
from trellis.notation import NotationError, TypeMismatch, f32, i32, parse

MESH = make_mesh(data=4, model=2)


@pytest.fixture(autouse=True)
def on_the_mesh():
    with jax.set_mesh(MESH):
        yield


def put(array, text):
    return jax.device_put(jnp.asarray(array), parse(text).spec)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def agree(program, plain, x, *rest):
    """The values and gradients of a manual function of `model` are those of a plain function on one device."""
    mapped = shard_map(program, axes={"model"})
    whole = lambda *arrays: tuple(map(np.asarray, arrays))

    def both(f, *arrays):
        return jax.value_and_grad(lambda *arrays: jnp.sum(jnp.tanh(f(*arrays))))(*arrays)

    got = jax.jit(lambda *arrays: both(mapped, *arrays))(x, *rest)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), "one")):
        want = both(plain, *whole(x, *rest))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.slow
def test_a_sum_over_an_axis_that_is_left_is_made_by_the_surrounding_program():
    def squares(h: f32["b/model c/data"]) -> f32[""]:
        return reshard("+model -> ", einsum("b/model c/data, b/model c/data -> +model", h, h))

    def product(h: f32["... c/data"], w: f32["c/data e"]) -> f32["b/model e"]:
        return einsum("... c/data, c/data e -> ... e", h, w)

    h = put(numbers(4, 8), "b/model c/data")
    agree(squares, lambda h: jnp.sum(h * h), h)
    agree(product, lambda h, w: h @ w, h, put(numbers(8, 3, seed=1), "c/data e"))


@pytest.mark.parametrize(
    "text, count, rule",
    [
        (
            "b/model c/data, b/model c/data -> b/model +data",
            2,
            "a text cannot have states of a mesh axis that is left to the surrounding program, which makes these sums "
            "itself, got '+data', in einsum('b/model c/data, b/model c/data -> b/model +data'): remove it, or add "
            "'data' to the axes of shard_map",
        ),
        (
            "b/model c/data, b/model c/data, b/model c/data -> b/model",
            3,
            "a sum over a mesh axis that is left to the surrounding program must have two factors, got 'c/data' summed "
            "of 3, in einsum('b/model c/data, b/model c/data, b/model c/data -> b/model'): multiply two of them "
            "first",
        ),
    ],
)
def test_a_sum_over_an_axis_that_is_left_and_is_refused(text, count, rule):
    @shard_map(axes={"model"})
    def program(h: f32["b/model c/data"]) -> f32["b/model"]:
        return einsum(text, *[h] * count)

    with pytest.raises(NotationError) as error:
        program(put(numbers(4, 8), "b/model c/data"))
    assert told(error) == rule


IDS = np.array([7, 3, 0, 3, 5, -1, 2, 9], np.int32)
LOOKUPS = {
    "positions": ("v/model e", "b/data", "b/data e", (8, 3), lambda t, i: jnp.take(t, i, 0, mode="fill", fill_value=0)),
    "aligned": ("b/data v/model", "b/data", "b/data", (8, 10), lambda t, i: t[jnp.arange(8), i]),
}


@pytest.mark.slow
@pytest.mark.parametrize("table, positions, rows, shape, plain", LOOKUPS.values(), ids=LOOKUPS)
def test_a_lookup_where_an_axis_is_left(table, positions, rows, shape, plain):
    def program(t: f32[table], i: i32[positions]) -> f32[rows]:
        return reshard(f"{rows} +model -> {rows}", take(f"{table}, {positions} -> {rows} +model", t, i))

    agree(program, plain, put(numbers(*shape), table), put(IDS, positions))


def test_a_lookup_along_an_axis_that_is_left():
    @shard_map(axes={"model"})
    def program(t: f32["v/data e"], i: i32["b/model"]) -> f32["b/model e"]:
        return take("v/data e, b/model -> b/model e", t, i)

    with pytest.raises(NotationError) as error:
        program(put(numbers(8, 3), "v/data e"), put(IDS, "b/model"))
    assert told(error) == (
        "a lookup cannot move rows, got 'v/data' looked up, where 'data' is left to the surrounding program, in "
        "take('v/data e, b/model -> b/model e'): take the rows outside, or add 'data' to the axes of shard_map"
    )


@pytest.mark.slow
def test_reduce_scatters_of_jaxs_own_where_an_axis_is_left():
    def gathered(x: f32["b/model c/data"]) -> f32["b/model c/data"]:
        return x * lax.all_gather(x, "model", axis=0, tiled=True).sum(0, keepdims=True)

    def scattered(x: f32["b/model c/data"]) -> f32["b/model c/data"]:
        return lax.psum_scatter(jnp.concatenate([x, x * x]), "model", scatter_dimension=0, tiled=True)

    def plain(x):
        return sum(jnp.concatenate([each, each * each]) for each in jnp.split(x, 2))

    x = put(numbers(4, 8), "b/model c/data")
    agree(gathered, lambda x: x * x.sum(0, keepdims=True), x)
    agree(scattered, plain, x)


@pytest.mark.parametrize(
    "call",
    [lambda x: lax.pmean(x, "data"), lambda x: lax.psum(x, ("data", "model")), lambda x: x * lax.axis_index("data")],
)
def test_a_collective_along_an_axis_that_is_left(call):
    @shard_map(axes={"model"})
    def left(x: f32["b/model c/data"]) -> f32["b/model c/data"]:
        return call(x)

    with pytest.raises(MeshError) as error:
        left(put(numbers(4, 8), "b/model c/data"))
    assert told(error) == (
        "a collective must run along manual axes, got 'data', which is left to the surrounding program, in `left`: "
        "leave it out (a sum over a dimension that 'data' slices is whole there), or add 'data' to the axes of "
        "shard_map"
    )


@pytest.mark.parametrize("call, seen", [(lax.psum, "one"), (lax.pmean, "one"), (lax.pmax, "pmax")])
def test_a_collective_among_groups(call, seen):
    @shard_map
    def groups(x: f32["b/data c"]) -> f32["r c"]:
        return call(x, "data", axis_index_groups=[[0, 1], [2, 3]])

    with pytest.raises(NotationError) as error:
        groups(put(numbers(4, 2), "b/data c"))
    assert told(error) == (
        f"a collective must run along whole mesh axes, got {seen} with axis_index_groups, in `groups`: split that axis "
        "of the mesh in two, and use one of them"
    )


@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
def test_one_text_serves_where_types_say_what_is_left_and_where_they_do_not(axis_type):
    @shard_map(axes={"m"})
    def total(x: f32["a/d b/m"]) -> f32["a/d"]:
        return reshard("a/d +m -> a/d", einsum("a/d b/m -> a/d +m", x))

    mesh = make_mesh(d=4, m=2, axis_type=axis_type)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(32.0).reshape(8, 4), jax.NamedSharding(mesh, jax.P("d", "m")))
        np.testing.assert_array_equal(jax.jit(total)(x), x.sum(1))


OF_SORT = "Arguments to sort must have equal shardings"  # JAX 0.12 differentiates it


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (lambda x: jnp.cumsum(x, 1), "Input should be unsharded"),
        (lambda x: jnp.repeat(x, 2, 1)[:, ::2], "Please pass sharding to `jnp.repeat`"),
        (jax.grad(lambda x: (jnp.sort(x, 0) ** 2).sum()), OF_SORT),
        (lambda x: jnp.sort(x, 0), OF_SORT),  # where it is differentiated
    ],
)
def test_what_jaxs_types_refuse_along_an_axis_that_is_left(program, said):
    def by_hand(x: f32["a/model b/data"]) -> f32["a/model b/data"]:
        return program(x)

    gradient = jax.grad(lambda x: shard_map(by_hand, axes={"model"})(x).sum())
    if said == OF_SORT and jax.__version_info__ >= (0, 12):
        expected = jax.grad(lambda x: program(x).sum())(numbers(4, 8))  # in whatever order
        np.testing.assert_allclose(gradient(put(numbers(4, 8), "a/model b/data")), expected, rtol=1e-6)
        return
    with pytest.raises(MeshError) as error:
        gradient(put(numbers(4, 8), "a/model b/data"))
    assert f"knows how the result is sliced, got one where it does not ({said}" in str(error.value)
    assert str(error.value).endswith(
        "jax.reshard the array first, pass out_sharding, or add 'data' to the axes of shard_map"
    )


def test_a_collective_of_a_copy():
    @shard_map
    def sent(x: f32["a"]) -> f32["a"]:
        return lax.psum(reshard("a -> a ~model", x), "model")

    with pytest.raises(TypeMismatch) as error:
        sent(put(numbers(4), "a"))
    assert told(error, by_line=True) == (
        "a copy '~model' can only be multiplied with an operand that model slices, got a collective of one or a cast, "
        "in `sent`: use the value from before the reshard to '~model'"
    )
