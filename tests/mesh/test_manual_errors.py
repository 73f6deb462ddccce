"""What manual mode refuses while tracing, and the text it says it with."""

import jax
import jax.numpy as jnp
import pytest

from tests.mesh.told import told
from trellis.mesh import ReshardError, all_gather, make_mesh, reduce_scatter, reshard
from trellis.mesh.manual.einsum import einsum_plain as einsum
from trellis.mesh.manual.pending import pending
from trellis.mesh.manual.reshard import TransitionError
from trellis.mesh.manual.shard_map import shard_map
from trellis.mesh.manual.shift import shift
from trellis.named import grad, named
from trellis.notation import NotationError, TypeMismatch, bf16, bool_, f32, struct_shapes


@pytest.fixture(scope="module", autouse=True)
def mesh():
    mesh = make_mesh(d=4, m=2)
    with jax.set_mesh(mesh):
        yield mesh


def put(shape, text):
    names = [word.split("/")[0] for word in text.split()]
    return jax.device_put(
        jnp.ones(shape), struct_shapes(f32[text], dict(zip(names, shape)), make_mesh(d=4, m=2)).sharding
    )


def product(then, result="batch/d out", axes=None):
    """A product whose pending sum is handed to `then`."""

    def program(x: f32["batch/d in/m"], w: f32["in/m out"]) -> None:
        return then(einsum("batch/d in/m, in/m out -> batch/d out +m", x, w))

    program.__annotations__["return"] = f32[result]
    program.__qualname__ = "program"
    return shard_map(program, axes=axes)(put((8, 4), "batch/d in/m"), put((4, 6), "in/m out"))


def refuses(error, message, fn, *args, **kwargs):
    with pytest.raises(error) as caught:
        fn(*args, **kwargs)
    assert message in told(caught)


@pytest.mark.parametrize(
    ("then", "result", "error", "message"),
    [
        (
            lambda y: reshard("batch/d out -> batch/d out", y),
            "batch/d out",
            TransitionError,
            "the left side of a text must describe the array, got f32[2 6 +m] (one slice; differs over d), which is "
            "pending along m, for 'batch/d out', in reshard('batch/d out -> batch/d out'): write +m there",
        ),
        (
            lambda y: reshard("batch/d in +m -> batch/d in", y),
            "batch/d out",
            TypeMismatch,
            "a name must have one length in a call, got in=4 from argument `x` of `program` and in=6 from "
            "reshard('batch/d in +m -> batch/d in'), in `program`: make them agree, or give one of them another name",
        ),
        (
            lambda y: reshard("batch/d out +q -> batch/d out", y),
            "batch/d out",
            TransitionError,
            "a text can only name axes of the mesh, got 'q' where the mesh has d, m, in reshard('batch/d out +q -> "
            "batch/d out'): use one of these, or add 'q' to the mesh (size 1 will do)",
        ),
        (
            lambda y: all_gather("batch/d out +m -> batch/d out", y),
            "batch/d out",
            ReshardError,
            "all_gather can only perform an all-gather, got a transition that is all-reduce",
        ),
        (
            lambda y: reduce_scatter("batch/d out +m -> batch/d out", y),
            "batch/d out",
            ReshardError,
            "reduce_scatter can only perform a reduce-scatter, got a transition that is all-reduce",
        ),
        (
            lambda y: reshard("batch/d out +m -> batch/d out", y).astype(jnp.bfloat16),
            "batch/d out",
            TypeMismatch,
            "an array must have the dtype of its annotation, got bf16[2 6] (one slice; differs over d) for f32[batch "
            "out], in result of `program`: cast it to f32, or annotate bf16",
        ),
        (
            lambda y: reshard("batch/d out +m -> batch/d out", y)[:1],
            "batch/d out",
            TypeMismatch,
            "a name must have one length in a call, got batch=8 from argument `x` of `program` and batch=4 from "
            "result of `program`, in `program`: make them agree, or give one of them another name",
        ),
        (
            lambda y: reshard("batch/d out +m -> batch/d out", y) + jax.lax.axis_index("m").astype(jnp.float32),
            "batch/d out",
            TransitionError,
            "a result must match its annotation, got f32[2 6] (one slice; differs over d, m), which differs along m, "
            "for 'batch/d out', in result of `program`: write which dimension 'm' slices, or '+m' if these are "
            "partial sums",
        ),
        (
            lambda y: reshard("batch/d out +m -> batch/d out", y),
            "batch/d out +m",
            TypeMismatch,
            "a result must match its annotation, got f32[2 6] (one slice; differs over d), which has no sum pending "
            "along m, for f32[batch/d out +m], in result of `program`: remove '+m' from the annotation",
        ),
        (
            lambda y: [y],
            "batch/d out",
            TypeMismatch,
            "expected an array of type f32[batch/d out], got list, in result of `program`: pass an array, or annotate "
            'the container, as in list[f32["batch/d out"]]',
        ),
        (
            lambda y: shift("batch/d out +m", y, "m"),
            "batch/d out",
            TransitionError,
            "a shift needs a dimension that its mesh axis slices, got 'batch/d out +m', which 'm' does not slice, in "
            "shift('batch/d out +m', axis='m')",
        ),
    ],
)
def test_a_text_that_does_not_fit(then, result, error, message):
    refuses(error, message, product, then, result)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "batch/d in/m, in/m out -> batch/d out",
            "a sum over a sliced name must be marked as pending, got 'in/m' summed and no '+m' in the result, in "
            "einsum('batch/d in/m, in/m out -> batch/d out'): write '-> batch/d out +m', and settle it with "
            'reshard("batch/d out +m -> batch/d out", ...)',
        ),
        (
            "batch/d in/m, in/m out -> batch out +m",
            "a product cannot change how a name is sliced, got 'batch/d' on the left and 'batch' on the right, in "
            "einsum('batch/d in/m, in/m out -> batch out +m'): write 'batch/d' on the right and reshard the result",
        ),
        (
            "batch in/m, in/m out -> batch out +d +m",
            "a name must have one length in a call, got batch=8 from argument `x` of `program` and batch=2 from "
            "einsum(",
        ),
        (
            "batch/d in/m, in/m out -> batch/d out +m +d",
            "mesh axis 'd' is used twice",
        ),
        (
            "batch/d in/m, in/m out -> batch/d else",
            "a result can only have names of its operands, got 'else', in einsum('batch/d in/m, in/m out -> batch/d "
            "else'): correct the name",
        ),
        (
            "batch/d in/m, row/m out -> batch/d out +m",
            "a mesh axis can slice only one name in a product, got 'm' on 'in' and on 'row', where each device would "
            "multiply blocks that do not match, in einsum('batch/d in/m, row/m out -> batch/d out +m'): gather one, "
            'as in reshard("row/m out -> row out ~m", ...)',
        ),
        (
            "batch/d in/m, in/m out ~d -> batch/d out +m",
            "the left side of a text must describe the array, got f32[2 6] (one slice; differs over m), which is not "
            "copied along d, for 'in/m out ~d', in einsum('batch/d in/m, in/m out ~d -> batch/d out +m'): write no ~d "
            "there",
        ),
        ("batch/d in/m, in/m out", "an einsum must have exactly one '->', got 0, in einsum('batch/d in/m, in/m out')"),
        (
            "batch/d in/m -> batch/d +m",
            "an einsum needs one array for each shape on its left, got 2 arrays for 1 shapes",
        ),
        ("batch/d 4/m, in/m out -> batch/d out", "an einsum needs a name for each dimension, got 'batch/d 4/m'"),
        (
            "batch/d in/m, in/q out -> batch/d out +m",
            "a text can only name axes of the mesh, got 'q' where the mesh has d, m",
        ),
    ],
)
def test_a_product_that_devices_cannot_do_alone(text, message):
    @shard_map
    def program(x: f32["batch/d in/m"], w: f32["in/m out"]) -> f32["batch/d out +m"]:
        return einsum(text, x, w)

    refuses(NotationError, message, program, put((8, 4), "batch/d in/m"), put((4, 6), "in/m out"))


def test_operands_sliced_differently():
    @shard_map
    def program(x: f32["batch/d in"], w: f32["in/m out"]) -> f32["batch/d out +m"]:
        return einsum("batch/d in, in/m out -> batch/d out +m", x, w)

    refuses(
        NotationError,
        "a name must be sliced the same way in all operands, got 'in' and 'in/m', in einsum('batch/d in, in/m out -> "
        "batch/d out +m'): write "
        'reshard("batch/d in -> batch/d in/m", ...) first',
        program,
        put((8, 4), "batch/d in"),
        put((4, 6), "in/m out"),
    )


def test_a_pending_operand_and_a_copy_without_slices():
    @shard_map
    def pending(x: f32["batch/d in +m"], w: f32["in out"]) -> f32["batch/d out +m"]:
        return einsum("batch/d in +m, in out -> batch/d out", x, w)

    @shard_map
    def copied(x: f32["batch/d in"], w: f32["in out"]) -> f32["batch/d out"]:
        copy = reshard("in out -> in out ~m", w)
        return einsum("batch/d in, in out ~m -> batch/d out", x, copy)

    @shard_map
    def elementwise(w: f32["in out"]) -> f32["in out"]:
        return reshard("in out -> in out ~m", w) + 1.0

    x = put((8, 6), "batch/d in")
    sums = product(lambda y: y, "batch/d out +m")
    w = put((6, 6), "in out")
    refuses(
        NotationError,
        "a pending sum must be settled before it is multiplied, got 'batch/d in +m', in einsum('batch/d in +m, in out "
        "-> batch/d out'): write "
        'reshard("batch/d in +m -> batch/d in", ...) first',
        pending,
        sums,
        w,
    )
    refuses(
        NotationError,
        "a copy ~m needs another operand that 'm' slices, got none, in einsum('batch/d in, in out ~m -> batch/d "
        "out'): use the value from before the cast to ~m",
        copied,
        x,
        w,
    )
    refuses(
        TypeMismatch,
        "a copy '~x' can only be multiplied with an operand that x slices, got an elementwise operation of one with a "
        "value that is the same on all devices, in `elementwise`: use",
        elementwise,
        w,
    )


def same(x: f32["batch/d embed"]) -> f32["batch/d embed"]:
    return x


def unannotated(x) -> f32["batch/d embed"]:
    return x


def no_result(x: f32["batch/d embed"]):
    return x


def another_axis(x: f32["batch/q embed"]) -> f32["batch embed"]:
    return x


def open_result(x: f32["batch/d embed"]) -> f32["... embed"]:
    return x


def pending_result(x: f32["batch/d embed"]) -> f32["batch/d embed +m"]:
    return x


def minor(x: f32["batch/d/m embed"]) -> f32["batch/d/m embed"]:
    return x


def many(*xs: f32["batch/d embed"]) -> f32["batch/d embed"]:
    return xs[0]


def half(x: bf16["batch/d embed"]) -> bf16["batch/d embed"]:
    return x


X = ((8, 8), "batch/d embed")


@pytest.mark.parametrize(
    ("fn", "axes", "where", "message"),
    [
        (
            same,
            None,
            ((8, 8), "batch embed"),
            "an annotation that mentions a mesh axis must match the whole sharding, got f32[8 8] for f32[batch/d "
            'embed], in argument `x` of `same`: write reshard("batch embed -> batch/d embed", ...) first, or correct '
            "the annotation",
        ),
        (
            same,
            None,
            ((7, 8), "batch embed"),
            "a dimension must be divisible by the mesh axes that slice it, got batch=7 over d=4, in argument `x` of "
            "`same`: make batch 4 or 8, or slice it over other axes",
        ),
        (
            unannotated,
            None,
            X,
            "a manual function's arrays must be annotated, got f32[8/d 8] and no annotation, in argument `x` of "
            '`unannotated`: write its type, as in f32["batch/data embed"]',
        ),
        (
            no_result,
            None,
            X,
            "a manual function's result must be annotated, got None, in result of `no_result`: write '-> "
            'f32["batch/data"]\'',
        ),
        (
            another_axis,
            None,
            X,
            "an annotation can only name axes of the mesh, got 'q' in f32[batch/q embed] where the mesh has d, m, in "
            "argument `x` of `another_axis`: use one of these, or add 'q' to the mesh (size 1 will do)",
        ),
        (
            open_result,
            None,
            X,
            "a manual function's result must have all its dimensions named, got f32[... embed], in result of "
            "`open_result`: write them instead of '...'",
        ),
        (
            pending_result,
            {"m"},
            X,
            "JAX can pass pending sums and copies into or out of a function only if all mesh axes are manual, got "
            "f32[batch/d embed +m] with some axes left to the surrounding program, in result of `pending_result`: "
            "settle 'm' on the other side, or make all axes manual",
        ),
        (
            minor,
            {"m"},
            ((8, 8), "batch/d/m embed"),
            "the manual axes of a dimension must be its major ones, got 'batch/d/m' with manual m, in result of "
            "`minor`: write batch/m first",
        ),
        (
            same,
            {"q"},
            X,
            "manual axes must be axes of the mesh, got 'q' where the mesh has d, m, in `same`: use one of these",
        ),
        (
            same,
            set(),
            X,
            "a manual function must make mesh axes manual, got axes of none, in `same`: name some of d, m, or leave "
            "axes out for all of them",
        ),
        (
            half,
            None,
            X,
            "an array must have the dtype of its annotation, got f32[8/d 8] for bf16[batch/d embed], in argument `x` "
            "of `half`: cast it to bf16, or annotate f32",
        ),
    ],
)
def test_a_signature_that_does_not_fit(fn, axes, where, message):
    refuses(NotationError, message, shard_map(fn, axes=axes), put(*where))


def test_a_function_of_any_number_of_arguments():
    refuses(
        NotationError,
        "a manual function cannot take *args or **kwargs, got '*xs",
        shard_map,
        many,
    )


def test_a_size_that_does_not_divide(mesh):
    auto = jax.make_mesh((4, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(auto):
        refuses(
            NotationError,
            "a dimension must be divisible by the mesh axes that slice it, got batch=6 over d=4, in argument `x` of "
            "`same`: make batch 4 or 8, or slice it over other axes",
            shard_map(same),
            jnp.ones((6, 8)),
        )


def test_an_array_from_outside():
    w = put((8,), "embed/d")

    def program(x: f32["batch/d embed"]) -> f32["batch/d embed"]:
        return x + jnp.sum(w)

    refuses(
        TypeMismatch,
        "a manual function must receive its arrays as arguments, got one from outside it, in `program`: pass it as an "
        "annotated argument (shape f32[8@d]",
        shard_map(program),
        put(*X),
    )


def test_a_named_array_under_other_names_and_one_returned_elsewhere():
    x = named(put(*X), "batch embed")

    @shard_map
    def other(x: f32["rows/d embed"]) -> f32["rows/d embed"]:
        return x

    @shard_map
    def moved(x: f32["batch/d embed"]) -> f32["batch embed/d"]:
        return x

    refuses(
        TypeMismatch,
        "a named array must have the names of its annotation in the same order, got f32[batch/d=8 embed=8] for "
        "f32[rows/d embed], in argument `x` of `other`: rename or rearrange it to 'rows embed', or correct the "
        "annotation",
        other,
        x,
    )
    refuses(NotationError, "in result of `moved`", moved, x)


@pytest.mark.parametrize("what", [lambda w: w / jnp.linalg.norm(w), jnp.tanh, lambda w: w[::-1] + 0.0])
def test_gradients_of_what_is_made_of_a_copy(what):
    @shard_map
    def program(x: f32["batch/d in"], w: f32["in out"]) -> f32["batch/d out"]:
        return x @ what(reshard("in out -> in out ~d", w))

    x, w = put((8, 4), "batch/d in"), put((4, 6), "in out")
    assert program(x, w).shape == (8, 6)
    words = "JAX can only differentiate products and sums of a copy '~x', got another operation on one"
    refuses(TypeMismatch, words, grad(lambda w: (program(x, w) ** 2).sum()), w)


def test_axes_left_to_the_program_are_not_moved_inside():
    @shard_map(axes={"m"})
    def gathers(x: f32["batch/d embed"]) -> f32["batch embed"]:
        return reshard("batch/d embed -> batch embed", x)

    @shard_map(axes={"m"})
    def forgets(x: f32["batch/d embed"]) -> f32["batch embed"]:
        return x

    refuses(
        TransitionError,
        "manual mode can only move data over its own mesh axes, got 'd', which is left to the surrounding program, in "
        "reshard('batch/d embed -> batch embed'): reshard over 'd' outside, or add it to the axes of shard_map",
        gathers,
        put(*X),
    )
    refuses(
        TypeMismatch,
        "a result must match its annotation, got 'batch/d embed' for f32[batch embed], in result of `forgets`: "
        "correct the mesh axes that are left to the surrounding program",
        forgets,
        put(*X),
    )


def test_truths_are_no_numbers_to_add_up():
    @shard_map
    def some(x: bool_["batch/d in"]) -> bool_["in"]:
        return reshard("in +d -> in", pending("in +d", x.any(0)))

    refuses(
        TransitionError,
        "only numbers can be summed over devices, got bool_[3 +d], in reshard('in +d -> in'): cast the summed values "
        "to int32, and compare the sum with 0",
        lambda: some(put((8, 3), "batch/d in") > 0),
    )


@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
def test_a_ring_of_whole_arrays(axis_type):
    with (
        jax.set_mesh(make_mesh(d=8, axis_type=axis_type)),
        pytest.raises(TransitionError, match="got 'batch/d' outside it, in shift.*: call it in a function under"),
    ):
        shift("batch/d", jax.device_put(jnp.ones(8), jax.P("d")), "d")
