"""A program of whole arrays, run as the program of one device inside a program of more mesh axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trellis.mesh import make_mesh
from trellis.mesh.device.view import DeviceViewError, View
from trellis.mesh.meshes import on_another, without_axis


def test_an_operation_that_jax_writes_out_late_is_run_where_it_stands():
    """Such an operation (searchsorted of JAX 0.12) says on which mesh it was traced, which is not where it runs."""
    mesh = make_mesh(jax.devices()[:4], stage=2, data=2)
    inner = without_axis(mesh, "stage")
    ends, x = jnp.array([1, 4, 9]), jnp.arange(8)

    def place(ends, part):
        return jnp.searchsorted(ends, part, side="right") + part

    with on_another(inner):
        whole = jax.shard_map(place, in_specs=(P(), P("data")), out_specs=P("data"))
        types = (jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(inner.abstract_mesh, spec))
                 for a, spec in ((ends, P()), (x, P("data"))))  # fmt: skip
        closed = jax.make_jaxpr(whole)(*types)
    view = View(dict(mesh.shape))
    with jax.set_mesh(mesh):
        run = jax.shard_map(lambda *parts: view.run(closed, *parts)[0], in_specs=(P(), P("data")), out_specs=P("data"),
                            check_vma=False)  # fmt: skip
        found = jax.jit(run)(ends, jax.device_put(x, jax.NamedSharding(mesh, P("data"))))
    np.testing.assert_array_equal(found, place(ends, x))


def on_a_device(fn, spec, out, **sizes):
    """What a function of whole arrays makes of 0 to 7, as a device's program under a stage's axis.

    Args:
        fn: of an array, and of the mesh that it lies on.
        spec, out: where its argument and its result lie.
        sizes: of the mesh axes.
    """
    mesh = make_mesh(**(sizes or dict(stage=2, data=2, model=2)))
    inner, x = without_axis(mesh, "stage").abstract_mesh, jnp.arange(8.0)
    with on_another(without_axis(mesh, "stage")):
        typed = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(inner, spec))
        closed = jax.make_jaxpr(lambda x: fn(x, inner))(typed)
    view = View(dict(mesh.shape))
    with jax.set_mesh(mesh):
        run = jax.shard_map(lambda x: view.run(closed, x)[0], in_specs=(spec,), out_specs=out, check_vma=False)
        return jax.jit(run)(jax.device_put(x, NamedSharding(mesh, spec)))


@pytest.mark.parametrize(
    ("fn", "spec", "out"),
    [
        (lambda x, mesh: jax.device_put(x, NamedSharding(mesh, P(None))), P("data"), P()),
        (lambda x, mesh: jax.device_put(x, NamedSharding(mesh, P("data"))), P(), P("data")),
        (lambda x, mesh: jax.device_put(x), P("data"), P("data")),
    ],
    ids=["gathers", "slices", "stays"],
)
def test_what_is_put_elsewhere_on_the_mesh_is_moved_there(fn, spec, out):
    np.testing.assert_array_equal(on_a_device(fn, spec, out), np.arange(8.0))


@pytest.mark.parametrize("spec", [P("data"), P(("data", "model")), P(("model", "data"))])
@pytest.mark.parametrize("over", [("data",), ("model",), ("data", "model")])
def test_slices_that_become_partial_sums_are_in_their_places(spec, over):
    """The gradient of copies of which each device takes its slice; what is whole is on one device."""
    kept = [axis for axis in jax.tree.leaves(tuple(spec)) if axis not in over]

    def summed(x, mesh):
        partial = jax.reshard(x, NamedSharding(mesh, P(tuple(kept), unreduced=set(over))))
        return jax.reshard(partial, NamedSharding(mesh, P(None)))

    np.testing.assert_array_equal(on_a_device(summed, spec, P()), np.arange(8.0))


@pytest.mark.parametrize(
    "before, after", [(("data", "model"), ("model", "data")), (("model", "data"), ("data", "model"))]
)
def test_slices_in_another_order_of_mesh_axes(before, after):
    """Between axes of other sizes, from the mesh's own order and to it."""
    fn = lambda x, mesh: jax.reshard(x, NamedSharding(mesh, P(after)))
    np.testing.assert_array_equal(on_a_device(fn, P(before), P(after), stage=1, data=4, model=2), np.arange(8.0))


@pytest.mark.parametrize(
    ("before", "shape", "after"),
    [
        ((P("data"), (8,)), (2, 4), P("data", "model")),
        ((P(("data", "model")), (8,)), (2, 4), P("data", "model")),  # a row's parts are where they were
        ((P("data"), (8,)), (2, 4), P(None, "data")),
        ((P(None, "data"), (2, 4)), (8,), P("data")),
        ((P(("data", "model")), (8,)), (4, 2), P("model", "data")),
        ((P("model", "data"), (2, 4)), (2, 1, 4), P("model", None, "data")),
        ((P("model", "data"), (2, 4)), (4, 2), P(("model", "data"), None)),
    ],
)
def test_a_reshape_that_says_where_its_result_lies(before, shape, after):
    """In whole dimensions where elements would change places, which JAX moves by itself."""
    there, first = before

    def fn(x, mesh):
        x = jax.lax.reshape(jax.reshard(x, P(None)), first, out_sharding=P(*[None] * len(first)))
        return jax.lax.reshape(jax.reshard(x, there), shape, out_sharding=after)

    np.testing.assert_array_equal(on_a_device(fn, P(), after), np.arange(8.0).reshape(shape))


@pytest.mark.parametrize(
    ("left", "right", "out"),
    [
        (P("data", None), P("data", None), P("data", None)),
        (P(None, "data"), P(None, "data"), P(None, "data")),
        (P("data", "model"), P(None, "data"), P("data", None)),
    ],
)
def test_a_product_of_slices_along_a_mesh_axis_that_another_dimension_has(left, right, out):
    """What is summed is then whole, as it cannot lie along the axis too."""

    def product(x, mesh):
        a, b = (x.reshape(shape, out_sharding=P(None, None)) for shape in ((4, 2), (2, 4)))
        return jnp.dot(jax.reshard(a, left), jax.reshard(b, right), out_sharding=out)

    x = np.arange(8.0)
    np.testing.assert_array_equal(on_a_device(product, P(), out), x.reshape(4, 2) @ x.reshape(2, 4))


@pytest.mark.parametrize("spec", [P("data"), P("model"), P()])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_arrays_that_are_stacked_and_taken_apart(spec, axis):
    """Along a dimension of their own, beside slices and beside what is whole."""

    def both(x, mesh):
        whole = jnp.ones(8, out_sharding=NamedSharding(mesh, spec))
        stacked = jnp.stack([x, whole, 2 * x], axis=axis)
        first, ones, twice = jnp.unstack(stacked * stacked, axis=axis)
        return jnp.sqrt(first) + ones + twice - 4 * first - 1

    np.testing.assert_array_equal(on_a_device(both, spec, spec), np.arange(8.0))


def test_a_key_that_the_program_closes_over():
    key = jax.random.key(0)
    drawn = on_a_device(lambda x, _: x + jax.random.normal(key, x.shape), P(), P())
    np.testing.assert_allclose(drawn, np.arange(8.0) + jax.random.normal(key, (8,)), rtol=1e-6)


def _there_and_back(x, parts):
    """Through whole numbers of the same width, or of a half or a quarter of it."""
    bits = jax.lax.bitcast_convert_type(x, parts)
    return jax.lax.bitcast_convert_type(bits + jnp.zeros((), parts), x.dtype)


@pytest.mark.parametrize("spec", [P("data"), P()])
@pytest.mark.parametrize("parts", [jnp.uint32, jnp.uint16, jnp.uint8])
def test_bits_of_slices(parts, spec):
    np.testing.assert_array_equal(on_a_device(lambda x, _: _there_and_back(x, parts), spec, spec), np.arange(8.0))


@pytest.mark.parametrize(
    ("fn", "parts"),
    [
        (
            lambda x, mesh: jax.device_put(x, jax.memory.Space.Host),
            (
                "must keep their arrays in device memory.\n  seen:  `device_put` to MemorySpace.Host\n",
                "leave it out",
            ),
        ),
        (
            lambda x, mesh: jax.lax.reduce(x, 0.0, lambda a, b: a * b + b, (0,)) + x,
            (
                "must be computable on each device alone.\n  seen:  `reduce` of sliced arrays",
                "gather its operands first",
            ),
        ),
        (
            lambda x, mesh: jax.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"model"})(x),
            ("must be manual over all mesh axes.\n  seen:  ", "leave out its `axes`"),
        ),
    ],
    ids=["memory", "operation", "some axes"],
)
def test_what_no_device_does_by_itself_is_refused_in_four_parts(fn, parts):
    with pytest.raises(DeviceViewError) as caught:
        on_a_device(fn, P("data"), P("data"))
    rule, fix = parts
    assert rule in str(caught.value) and f"fix:   {fix}" in str(caught.value)
    assert "where: test_device_view.py:" in str(caught.value)


@pytest.mark.parametrize("sizes", [{"stage": 2}, {"stage": 2, "data": 2}])
def test_how_a_scatter_combines_numbers_names_no_other_mesh(sizes):
    """XLA ends the process where it does; the gradient of `top_k` is a scatter."""
    mesh = make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    inner, x = without_axis(mesh, "stage"), jnp.array([3.0, 1.0, 2.0, 5.0])
    largest = jax.grad(lambda x: (jax.lax.top_k(x, 2)[0] * jnp.array([2.0, 3.0])).sum())
    with on_another(inner):
        whole = NamedSharding(inner.abstract_mesh, P(None))
        closed = jax.make_jaxpr(largest)(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole))
    view = View(dict(mesh.shape))
    with jax.set_mesh(mesh):
        run = jax.jit(jax.shard_map(lambda x: view.run(closed, x)[0], in_specs=P(), out_specs=P(), check_vma=False))
        assert run.lower(x).as_text().count("sdy.mesh ") == 1
        np.testing.assert_array_equal(run(x), [3, 0, 0, 2])
