"""Arrays on no mesh, or on one device, where a text says how they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import trellis as tr
from tests.mesh.told import told
from trellis import f32
from trellis.mesh.reshard import ReshardError
from trellis.notation import NotationError, TypeMismatch

MESH = tr.make_mesh(x=2, y=4)
NUMBERS = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
ON_NO_MESH = jnp.asarray(NUMBERS)
GIVEN = {
    "numpy": lambda: NUMBERS,
    "jax": lambda: ON_NO_MESH,
    "one device": lambda: jax.device_put(NUMBERS, jax.devices()[3]),
}
SLICED = lambda a: tr.reshard("a b -> a/x b", a)


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(MESH):
        yield


@pytest.mark.parametrize("given", GIVEN)
def test_what_lies_on_no_mesh_is_moved_from_being_whole(given):
    a = GIVEN[given]()
    assert tr.typeof(SLICED(a)) == "f32[16/x 24]"
    assert tr.typeof(jax.jit(lambda: SLICED(a))()) == "f32[16/x 24]"
    np.testing.assert_array_equal(SLICED(a), NUMBERS)
    with pytest.raises(ReshardError, match="got an array of type 'a b'"):
        tr.reshard("a/y b -> a b", a)
    if given != "one device":  # JAX's own jit refuses these
        assert tr.typeof(jax.jit(SLICED)(a)) == "f32[16/x 24]"
        gradient = jax.grad(lambda a: (SLICED(a) ** 2).sum())(a)
        np.testing.assert_array_equal(gradient, 2 * NUMBERS)
        assert tr.typeof(gradient) == "f32[16 24]"


@pytest.mark.parametrize("given", ["numpy", "jax"])
def test_in_auto_mode(given):
    auto = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    a = GIVEN[given]()
    with jax.set_mesh(auto):
        for made in (SLICED(a), jax.jit(SLICED)(a)):
            assert made.sharding.shard_shape(made.shape) == (8, 24)
            np.testing.assert_array_equal(made, NUMBERS)


def test_what_is_no_array():
    with pytest.raises(ReshardError) as caught:
        SLICED([1.0, 2.0])
    assert told(caught) == (
        "a transition takes an array, got list, in reshard('a b -> a/x b'): pass one, or convert it with jnp.asarray(x)"
    )


@pytest.mark.parametrize("given", GIVEN)
def test_factors_of_a_product(given):
    a, w = GIVEN[given](), np.ones((24, 8), np.float32)
    with pytest.raises(TypeMismatch) as caught:
        tr.einsum("a/x b, b c -> a/x c", a, w)
    assert told(caught) == (
        "the left side of an einsum must describe its arrays, got f32[16 24] for 'a/x b', in einsum('a/x b, b c -> "
        "a/x c'): write "
        'reshard("a b -> a/x b", ...) first, or correct the text'
    )
    product = tr.einsum("a/x b, b c -> a/x c", SLICED(a), w)
    assert tr.typeof(product) == "f32[16/x 8]"
    np.testing.assert_allclose(product, NUMBERS @ w)


@pytest.mark.parametrize("given", GIVEN)
def test_an_argument_of_a_manual_function(given):
    @tr.shard_map
    def twice(a: f32["a/x b"]) -> f32["a/x b"]:
        return 2 * a

    np.testing.assert_array_equal(twice(GIVEN[given]()), 2 * NUMBERS)


@pytest.mark.parametrize("given", GIVEN)
def test_by_name(given):
    a = GIVEN[given]()
    np.testing.assert_array_equal(jax.jit(lambda: tr.named(a, "a b") * 2)().array, 2 * NUMBERS)
    with tr.Layout(MESH, compute={"a": "x"}):
        assert tr.typeof(tr.named(a, "a b") * 2) == "f32[a/x=16 b=24]"


def test_a_lookup_in_slices_of_whole_arrays():
    """It is one device's: there would be no device that it is of."""
    with pytest.raises(NotationError) as caught:
        tr.take("a/x b, i -> i b +x", SLICED(NUMBERS), np.arange(3))
    assert told(caught) == (
        "a lookup in a sliced dimension needs manual mode, got 'a/x b' outside it, in take('a/x b, i -> i b +x'): "
        "call it in a function under @shard_map, or name the arrays, as in take(named(table, 'a b'), ...)"
    )


def test_what_one_device_has_is_cut_without_a_program_and_outlives_its_slices(caplog):
    """JAX compiles one for each shape. A program that is given the slices to overwrite writes nowhere else."""
    numbers = jax.device_put(NUMBERS[:, :20] + 1, jax.devices()[1])  # of a shape that no other test has
    keys, weak = jax.random.split(jax.random.key(0), 4), jnp.full((4,), 2.0)
    given = [tr.NamedArray(numbers, ("a", "b")), tr.NamedArray(keys, ("b",)), tr.NamedArray(weak, ("b",))]
    with tr.Layout(MESH, {"a": "x", "b": "y"}), jax.log_compiles():
        caplog.clear()
        sliced = tr.shard(given[0])
        assert not caplog.records
        others = tr.shard(given[1:])
    assert tr.typeof(sliced.array) == "f32[16/x 20/y]" and [tr.typeof(x.array) for x in others] == [
        "key[4/y]",
        "f32[4/y]",
    ]
    jax.jit(lambda x: x * 0, donate_argnums=0)(sliced.array).block_until_ready()
    np.testing.assert_array_equal(numbers, NUMBERS[:, :20] + 1)
