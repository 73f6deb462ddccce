"""What the types place on a mesh whose communication the compiler places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.named.explicitly import explicitly
from trellis.notation.state import mode_of
from trellis.notation.typeof import typeof

COMPUTE = {"batch": "data", "embed": "model"}


@pytest.fixture
def auto():
    return tr.Layout(tr.make_mesh(data=2, model=4, axis_type="auto"), {}, COMPUTE)


def values(*sizes):
    return jnp.arange(float(np.prod(sizes))).reshape(sizes)


def seen_by(f, jit, *args):
    """The types that `f` sees of its named arguments, and what the call gives."""
    types = []

    def seen(*args):
        types.extend(str(typeof(x)) for x in args if isinstance(x, tr.NamedArray))
        return f(*args)

    return types, (jax.jit if jit else lambda call: call)(lambda *args: explicitly(seen, *args))(*args)


@pytest.mark.parametrize("jit", [True, False])
def test_what_comes_in_is_sliced_as_the_layout_says_and_what_goes_out_is_the_compilers(auto, jit):
    with auto:
        x, w = tr.named(values(4, 8), "batch embed"), tr.named(values(8, 3), "embed mlp")
        types, y = seen_by(lambda x, w: tr.dot(x, w, over="embed"), jit, x, w)
        assert types == ["f32[batch/data=4 embed/model=8]", "f32[embed/model=8 mlp=3]"]
        np.testing.assert_array_equal(y.array, values(4, 8) @ values(8, 3))
        assert mode_of(jax.typeof(y.array).sharding.mesh) == "auto"
        assert (y + y).names == ("batch", "mlp")


def test_names_that_their_mesh_axes_do_not_divide_are_whole_within(auto):
    """Also for what is computed there."""
    with auto:
        x = tr.named(values(3, 8), "batch embed")
        types, y = seen_by(lambda x: (tr.ones((x.axis("batch"),)) * x).sum("embed"), True, x)
        assert types == ["f32[batch=3 embed/model=8]"]
        np.testing.assert_array_equal(y.array, x.array.sum(1))


@pytest.mark.parametrize(("batch", "pos", "wanted"), [(3, 5, "batch=3 pos=5"), (3, 4, "batch=3 pos/data=4")])
def test_a_mesh_axis_goes_to_the_next_name_only_if_it_divides_that(batch, pos, wanted):
    with tr.Layout(tr.make_mesh(data=2, model=4, axis_type="auto"), {}, {"batch": "data", "pos": "data"}):
        x = tr.named(values(batch, pos), "batch pos")
        types, y = seen_by(lambda x: x * 2, True, x)
        assert types == [f"f32[{wanted}]"]
        np.testing.assert_array_equal(y.array, x.array * 2)


def test_its_gradient_is_that_of_the_function(auto):
    x, w = values(4, 8), values(8, 3)

    def loss(x, w, call):
        x, w = tr.named(x, "batch embed"), tr.named(w, "embed mlp")
        return call(lambda x, w: tr.dot(x, w, over="embed"), x, w).array.sum()

    wanted = jax.grad(loss, (0, 1))(x, w, lambda f, *args: f(*args))
    with auto:
        found = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, w, explicitly)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_elsewhere_it_is_a_call():
    """Without a layout, and where the types say it already."""
    x = tr.named(values(4, 8), "batch embed")
    assert explicitly(lambda x, n: (x, n), x, 3) == (x, 3)
    with tr.Layout(tr.make_mesh(data=2, model=4), {}, COMPUTE):
        x = tr.shard(x, "compute")
        assert explicitly(lambda x: x, x) is x


def test_other_arguments_come_as_they_are_and_other_arrays_whole(auto):
    def scaled(x, parts):
        assert parts["by"] == 3 and parts["nothing"] is None
        return x * parts["by"] + tr.named(parts["plain"], "embed")

    with auto:
        x = tr.named(values(4, 8), "batch embed")
        made = explicitly(scaled, x, {"by": 3, "nothing": None, "plain": values(8)})
        np.testing.assert_array_equal(made.array, values(4, 8) * 3 + values(1, 8))
