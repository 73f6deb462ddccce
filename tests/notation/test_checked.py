"""`@checked`: one length for a name in one call; dtype, rank, sharding; both places in the message."""

import dataclasses
import gc
import re
import threading
import typing
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from trellis.named import named
from trellis.notation import (
    NotationError,
    Stack,
    TypeMismatch,
    bf16,
    bool_,
    checked,
    checking,
    f32,
    i32,
    key,
    shaped,
    struct,
)
from trellis.notation.binding import live


@pytest.fixture(autouse=True)
def on():
    with checking(True):
        yield


@struct
class Block:
    up: f32["embed mlp"]
    bias: f32["mlp"] | None = None


@struct
class Net:
    layers: Stack["layers", Block]
    out: f32["embed vocab"]


@checked
def add(x: f32["batch pos"], y: f32["batch pos"]) -> f32["batch pos"]:
    return x + y


@checked
def wrong_result(x: f32["batch pos"]) -> f32["batch"]:
    return x


@checked
def apply(x: f32["... embed"], net: Net, *extra: f32["vocab"], scale: f32[""] | float = 1.0) -> None:
    return None


@checked
def containers(
    xs: list[f32["a"]], pair: tuple[f32["a b"], i32["b"]], table: dict[str, f32["a 2"]], any_dtype: shaped["b"]
) -> tuple[f32["a"], ...]:
    return tuple(xs)


@checked
def random(k: key[""], mask: bool_["a"]) -> f32["a"]:
    return jax.random.normal(k, mask.shape)


def net(layers=3, embed=4, mlp=8, vocab=5, bias=8):
    return Net(Block(jnp.ones((layers, embed, mlp)), jnp.ones((layers, bias))), jnp.ones((embed, vocab)))


def test_what_fits_passes():
    assert add(jnp.ones((2, 3)), jnp.ones((2, 3))).shape == (2, 3)
    apply(jnp.ones((7, 4)), net(), jnp.ones(5), jnp.ones(5), scale=2.0)
    apply(jnp.ones(4), Net(Block(jnp.ones((1, 4, 8))), jnp.ones((4, 5))), scale=jnp.float32(1))
    one = jnp.ones(3)
    out = containers(
        [one, one], (jnp.ones((3, 2)), jnp.arange(2, dtype=jnp.int32)), {"k": jnp.ones((3, 2))}, jnp.arange(2)
    )
    assert len(out) == 2
    assert random(jax.random.key(0), jnp.ones(3, bool)).shape == (3,)


def refuses(message, fn, *args, error=TypeMismatch, **kwargs):
    with pytest.raises(error, match=re.escape(message)):
        fn(*args, **kwargs)


X = jnp.ones((2, 3))


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (
            "a name must have one length in a call, got pos=3 from argument `x` of `add` and pos=4 from argument `y` "
            "of `add`, in `add`: make them agree, or give one of them another name",
            lambda: add(X, jnp.ones((2, 4))),
        ),
        (
            "an array must have the dtype of its annotation, got bf16[2 3] for f32[batch pos], in argument `y` of "
            "`add`: cast it to f32, or annotate bf16",
            lambda: add(X, X.astype(jnp.bfloat16)),
        ),
        (
            "a type must name every dimension, got 2 in 'batch pos' and 1 in f32[3], in argument `y` of `add`: write "
            "all dimensions, or '...' for leading ones",
            lambda: add(X, jnp.ones(3)),
        ),
        (
            "expected an array of type f32[batch pos], got float[], in argument `y` of `add`: pass an array",
            lambda: add(X, 1.0),
        ),
        (
            "expected an array of type f32[batch pos], got None, in argument `y` of `add`: pass an array, or annotate "
            '`f32["batch pos"] | None`',
            lambda: add(X, None),
        ),
        (
            "a type must name every dimension, got 1 in 'batch' and 2 in f32[2 3], in result of `wrong_result`",
            lambda: wrong_result(X),
        ),
        (
            "a name must have one length in a call, got mlp=8 from argument `net.layers.up` of `apply` and mlp=9 from "
            "argument `net.layers.bias` of `apply`",
            lambda: apply(jnp.ones(4), net(bias=9)),
        ),
        (
            "got embed=6 from argument `x` of `apply` and embed=4 from argument `net.layers.up` of `apply`",
            lambda: apply(jnp.ones(6), net()),
        ),
        (
            "got vocab=5 from argument `net.out` of `apply` and vocab=6 from argument `extra[1]` of `apply`",
            lambda: apply(jnp.ones(4), net(), jnp.ones(5), jnp.ones(6)),
        ),
        (
            "a value must be of its annotated class, got f32[3] for Net, in argument `net` of `apply`: pass a Net",
            lambda: apply(jnp.ones(4), jnp.ones(3)),
        ),
        (
            "a value must match one of its annotation's alternatives, got str for "
            'f32[""] | float, in argument `scale` of `apply`: pass a value of one of these types',
            lambda: apply(jnp.ones(4), net(), scale="1"),
        ),
        (
            "a literal dimension must match the array's size, got 3 where 'a 2' says 2, in argument `table['k']` of "
            "`containers`: pass an array of 2, or write a name",
            lambda: containers(
                [], (jnp.ones((3, 2)), jnp.arange(2, dtype=jnp.int32)), {"k": jnp.ones((3, 3))}, jnp.ones(2)
            ),
        ),
        (
            "got a=3 from argument `xs[0]` of `containers` and a=4 from argument `pair[0]` of `containers`",
            lambda: containers([jnp.ones(3)], (jnp.ones((4, 2)), jnp.arange(2)), {}, jnp.ones(2)),
        ),
        (
            "expected an array of type f32[a], got tuple, in argument `xs[0]` of `containers`: pass an array, or "
            'annotate the container, as in list[f32["a"]]',
            lambda: containers([(X,)], (jnp.ones((4, 2)), jnp.arange(2)), {}, jnp.ones(2)),
        ),
        (
            "a named array must have the names of its annotation in the same order, got f32[pos=2 batch=3] for "
            "f32[batch pos], in argument `x` of `add`: rename or rearrange it to 'batch pos', or correct the "
            "annotation",
            lambda: add(named(X, "pos batch"), named(X, "batch pos")),
        ),
    ],
)
def test_what_does_not_fit_names_both_places(message, call):
    refuses(message, call)


def test_named_arrays_are_bound_by_their_names():
    x, y = named(X, "batch pos"), named(jnp.ones((2, 4)), "batch pos")
    assert add(x, x).names == ("batch", "pos")
    refuses("got pos=3 from argument `x` of `add` and pos=4 from argument `y` of `add`", add, x, y)


def test_off_costs_one_comparison_and_checks_nothing():
    with checking(False):
        assert not checking()
        assert wrong_result(X) is X
        with checking(True):
            assert checking()
            other = threading.Thread(target=checking, args=(False,))  # it has checks of its own
            other.start()
            other.join()
            assert checking()
        assert not checking()
    assert checking()


def test_each_call_binds_anew_and_texts_inside_see_the_bindings():
    inner = []

    @checked
    def outer(x: f32["batch pos"]) -> f32["batch pos"]:
        inner.append(dict(live().sizes))
        add(jnp.ones((5, 6)), jnp.ones((5, 6)))
        inner.append({name: size for name, (size, _) in live().sizes.items()})
        return x

    outer(X)
    assert live() is None
    assert inner[1] == {"batch": 2, "pos": 3}
    assert inner[0] == {"batch": (2, "argument `x` of `outer`"), "pos": (3, "argument `x` of `outer`")}


def test_under_jit_vmap_grad_and_with_abstract_values():
    assert jax.jit(add)(X, X).shape == (2, 3)
    assert jax.vmap(add)(X[None], X[None]).shape == (1, 2, 3)
    assert jax.grad(lambda x: jnp.sum(add(x, x)))(X).shape == (2, 3)
    assert jax.eval_shape(add, X, X).shape == (2, 3)
    refuses("got pos=3", jax.eval_shape, add, X, jnp.ones((2, 4)))


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((4, 2, 1), ("data", "model", "one"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        yield mesh


@checked
def sharded(x: f32["batch/data/one embed"]) -> f32["batch/data embed"]:
    return x


@checked
def plain(x: f32["batch embed"]) -> f32["batch embed"]:
    return x


@checked
def pending(x: f32["batch embed +model"]) -> f32["batch embed +model"]:
    return x


def test_sharding_is_checked_where_the_annotation_mentions_a_mesh_axis(mesh):
    whole = jax.device_put(jnp.ones((8, 4)), PartitionSpec())
    x = jax.device_put(whole, PartitionSpec("data"))
    assert sharded(x) is x
    assert jax.jit(sharded)(x).shape == (8, 4)
    assert plain(x) is x
    refuses(
        "an annotation that mentions a mesh axis must match the whole sharding, got f32[8 4] for f32[batch/data/one "
        'embed], in argument `x` of `sharded`: write reshard("batch embed -> batch/data embed", ...) first, or '
        "correct the annotation",
        sharded,
        whole,
    )
    refuses(
        "got f32[batch/data=8 embed/model=4] for f32[batch/data/one embed], in argument `x` of `sharded`: write "
        'reshard("batch/data embed/model -> batch/data embed", ...)',
        sharded,
        named(jax.device_put(whole, PartitionSpec("data", "model")), "batch embed"),
    )

    def product(x, w, spec):
        return pending(jnp.einsum("bi,ie->be", x, w, out_sharding=spec))

    x = jax.device_put(jnp.ones((8, 4)), PartitionSpec(None, "model"))
    w = jax.device_put(jnp.ones((4, 4)), PartitionSpec("model"))
    assert jax.jit(lambda x, w: product(x, w, PartitionSpec(None, None, unreduced={"model"})))(x, w).shape == (8, 4)
    refuses(
        'got f32[8 4] for f32[batch embed +model], in argument `x` of `pending`: write reshard("batch embed -> batch '
        "embed "
        '+model", ...) first',
        jax.jit(lambda x, w: product(x, w, PartitionSpec())),
        x,
        w,
    )


def test_sharding_is_not_checked_where_types_do_not_carry_it():
    assert sharded(jnp.ones((8, 4))).shape == (8, 4)
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        assert sharded(jnp.ones((8, 4))).shape == (8, 4)


def test_inside_manual_mode_sizes_are_whole(mesh):
    @checked
    def inner(x: f32["batch/data embed"], whole: f32["batch"]) -> f32["embed +data"]:
        return jax.lax.pcast(jnp.sum(x, 0), "data", to="unreduced")

    def body(x, whole):
        return jax.lax.psum(inner(x, whole), "data")

    x = jax.device_put(jnp.ones((8, 4)), PartitionSpec("data"))
    specs = (PartitionSpec("data"), PartitionSpec())
    run = jax.shard_map(body, in_specs=specs, out_specs=PartitionSpec())
    assert run(x, jnp.ones(8)).shape == (4,)
    refuses("got batch=8 from argument `x` of", run, x, jnp.ones(2))
    unsettled = jax.shard_map(
        lambda x, w: jax.lax.psum(checked(_returns_sum)(x), "data"), in_specs=specs, out_specs=PartitionSpec()
    )
    refuses(
        "got f32[4 +data] for f32[embed ~data], in result of `_returns_sum`: write "
        'reshard("embed +data -> embed ~data", ...) first',
        unsettled,
        x,
        jnp.ones(8),
    )


def _returns_sum(x: f32["batch/data embed"]) -> f32["embed ~data"]:
    return jax.lax.pcast(jnp.sum(x, 0), "data", to="unreduced")


def test_fields_of_other_dataclasses_and_tuples():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Pair:
        a: f32["n"]
        b: typing.Any

    class Named(typing.NamedTuple):
        first: f32["n"]
        second: bf16["m"]

    @checked
    def both(pair: Pair, other: Named, n: f32["n"]) -> None: ...

    both(Pair(jnp.ones(2), jnp.ones(7)), Named(jnp.ones(2), jnp.ones(3, jnp.bfloat16)), jnp.ones(2))
    refuses(
        "got n=2 from argument `pair.a` of `both` and n=3 from argument `n` of `both`",
        both,
        Pair(jnp.ones(2), None),
        Named(jnp.ones(2), jnp.ones(3, jnp.bfloat16)),
        jnp.ones(3),
    )
    refuses(
        "got n=2 from argument `pair.a` of `both` and n=3 from argument `other.first` of `both`",
        both,
        Pair(jnp.ones(2), None),
        Named(jnp.ones(3), jnp.ones(3, jnp.bfloat16)),
        jnp.ones(2),
    )


def test_named_tuples_are_checked_as_dataclasses_are():
    class Pair(typing.NamedTuple):
        w: f32["a b"]
        v: f32["b"] = 0

    @checked
    def alone(s: Pair) -> None: ...

    @checked
    def stacked(s: list[Stack["layers", Pair]]) -> None: ...

    alone(Pair(jnp.ones((2, 3)), jnp.ones(3)))
    stacked([Pair(jnp.ones((4, 2, 3)), jnp.ones((4, 3)))])
    refuses("got b=3 from argument `s.w`", alone, Pair(jnp.ones((2, 3)), jnp.ones(4)))
    refuses("got b=3 from argument `s[0].w`", stacked, [Pair(jnp.ones((4, 2, 3)), jnp.ones((4, 5)))])
    refuses("a value must be of its annotated class, got tuple for Pair", alone, (jnp.ones((2, 3)), jnp.ones(3)))


def test_annotations_that_are_texts():
    def late(x: "f32['batch pos']", y: "Missing") -> None: ...

    refuses(
        "annotations must use names that can be looked up from the module, got name 'Missing' is not defined, in `",
        checked(late),
        X,
        X,
        error=NotationError,
    )

    def known(x: "f32['batch 4']") -> None: ...

    refuses("a literal dimension must match the array's size, got 3 where 'batch 4' says 4", checked(known), X)


def test_an_annotation_is_subscripted_with_a_shape():
    refuses("an annotation's shape must be a string, got b'a', in 'f32[...]'", lambda: f32[b"a"], error=NotationError)
    refuses(
        "Stack takes a leading dimension and a type, got 'layers', in 'Stack[...]': write Stack[\"layers\", Block]",
        lambda: Stack["layers"],
        error=NotationError,
    )
    refuses(
        "a stack's first part must consist of dimensions only, got '+x', in 'Stack[...]'",
        lambda: Stack["+x", Block],
        error=NotationError,
    )
    assert repr(Stack["layers/stage", Block]) == 'Stack["layers/stage", Block]'
    assert repr(bf16["a/x +y"]) == 'bf16["a/x +y"]'


def test_a_stack_of_arrays_with_any_leading_dimensions():
    @checked
    def fn(x: Stack["layers", f32["... embed"]], rates: f32["layers"], scale: f32["embed"]): ...

    rates, scale = jnp.ones(3), jnp.ones(5)
    for shape in ((3, 5), (3, 4, 5), (3, 7, 4, 5)):
        fn(jnp.ones(shape), rates, scale)
    fn(named(jnp.ones((3, 4, 5)), "layers pos embed"), rates, scale)
    refuses("got layers=4 from argument `x` of `fn` and layers=3", fn, jnp.ones((4, 3, 5)), rates, scale)
    refuses("for f32[layers 4 embed], in", fn, named(jnp.ones((3, 4, 5)), "depth pos embed"), rates, scale)
    refuses(
        "a stack's arrays must have its leading dimensions and those of their annotation, got f32[5] for "
        "f32[... embed] under 'layers', in argument `x` of `fn`: pass an array of 2 dimensions or more",
        fn,
        scale,
        rates,
        scale,
    )


@pytest.mark.slow
def test_an_annotated_function_is_not_kept():
    def make():
        large = jnp.ones(3)

        @checked
        def add(x: f32["a"]) -> f32["a"]:
            return x + large

        add(large)
        return weakref.ref(add.__wrapped__)

    made = make()
    gc.collect()
    assert made() is None


Kept = typing.TypeVar("Kept")


@dataclasses.dataclass
class _Leaf(typing.Generic[Kept]):
    """A dataclass that JAX does not know."""

    w: f32["a b"]
    kept: Kept = None


@struct
class _Tree(typing.Generic[Kept]):
    w: f32["a b"]
    kept: Kept


class _Tuple(typing.NamedTuple, typing.Generic[Kept]):
    w: f32["a b"]
    kept: Kept = None


@pytest.mark.parametrize("cls", [_Leaf, _Tree, _Tuple])
def test_classes_of_given_types_are_checked_and_dataclasses_that_are_no_trees(cls):
    def given(hint):
        def fn(given, b): ...

        fn.__annotations__ = {"given": hint, "b": f32["b"], "return": None}
        return checked(fn)

    b, right, wrong = jnp.ones(3), jnp.ones((2, 3)), jnp.ones((2, 4))
    for hint in (cls, cls[int], typing.Optional[cls[int]]):  # noqa: UP045
        given(hint)(cls(right, 0), b)
        refuses("got b=4 from argument `given.w`", given(hint), cls(wrong, 0), b)
    refuses("got b=4 from argument `given[0].w`", given(list[cls[int]]), [cls(wrong, 0)], b)
    refuses("got b=4 from argument `given.w`", given(Stack["layers", cls[int]]), cls(jnp.ones((5, 2, 4)), 0), b)
    given(cls[f32["b"]])(cls(right, b), b)
    refuses("from argument `given.kept`", given(cls[f32["b"]]), cls(right, jnp.ones(4)), b)
    refuses("must be of its annotated class, got int[] for", given(cls[int]), 3, b)


def test_a_type_under_a_name_of_its_own_is_checked():
    Matrix = typing.NewType("Matrix", f32["a b"])

    @checked
    def fn(w: Matrix, b: f32["b"]): ...

    refuses("got b=4 from argument `w`", fn, jnp.ones((2, 4)), jnp.ones(3))
