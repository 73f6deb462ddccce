"""Layers as a pipeline: the same values and gradients, one permute a tick, and one error for each mistake."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trellis.inspect import ledger
from trellis.mesh import Layout, make_mesh, reshard
from trellis.named import (
    Axis,
    Keep,
    NamedArray,
    NamesError,
    Stacked,
    arange,
    einsum,
    named,
    named_jit,
    random,
    save,
    shard,
    tanh,
    zeros,
)
from trellis.named.pipeline.cut import before

EMBED, BATCH, LAYERS = 8, 16, 4


class Layer(eqx.Module):
    """`x + tanh(x w) * marks`, each row with its own mark, times each layer's own `scale`."""

    w: NamedArray

    def __call__(self, x, scale, marks):
        hidden = save(tanh(einsum("batch embed, embed out -> batch out", x, self.w)).rename(out="embed"), "hidden")
        return x + hidden * marks * scale


def drawn(seed: int, *sizes: int) -> np.ndarray:
    """By NumPy: each layout would have JAX compile what draws."""
    return np.random.default_rng(seed).standard_normal(sizes, np.float32)


def layers(count: int = LAYERS, **options) -> Stacked:
    weights = named(drawn(0, count, EMBED, EMBED) * np.float32(0.2), "layers embed out")
    return Stacked(Layer(weights), Axis("layers", count), **options)


def inputs():
    x = named(drawn(1, BATCH, EMBED), "batch embed")
    return x, named(1 + np.arange(BATCH, dtype=np.float32) / 8, "batch")


def layout(stages: int, data: int = 1, *, extra=(), **options) -> Layout:
    mesh = make_mesh(jax.devices()[: stages * data], stage=stages, data=data)
    over = ("data", "stage") if "stage" in extra else "data"
    return Layout(mesh, {"layers": "stage", "embed": "data"}, {"layers": "stage", "batch": over}, **options)


def through(stacked, x, marks, policy=None):
    scale = named(1.0 + jnp.arange(stacked.axis.size, dtype=jnp.float32), "layers")
    return stacked.fold(x, marks, each=(scale,), policy=policy)


def value_and_gradients(stacked, x, marks, policy=None):
    loss = lambda s, x: (through(s, x, marks, policy) ** 2.0).mean().array
    return jax.value_and_grad(loss, argnums=(0, 1))(stacked, x)


@functools.cache
def one_by_one(count: int = LAYERS):
    """What one device finds."""
    return named_jit(value_and_gradients)(layers(count), *inputs())


def check_close(found, expected):
    """Float32 sums in another order: each array to 1e-5 of its largest value."""
    for wanted, got in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def placed(x, marks):
    return shard(x, "compute"), shard(marks, "compute")


@pytest.mark.slow
@pytest.mark.parametrize("stages, data, extra", [(2, 1, ()), (4, 2, ()), (2, 4, ("stage",))])
@pytest.mark.parametrize("microbatches", [None, 2])
def test_values_and_gradients_are_those_of_the_layers_one_by_one(stages, data, extra, microbatches):
    with layout(stages, data, extra=extra, pipeline_microbatches=microbatches):
        found = named_jit(value_and_gradients)(shard(layers()), *placed(*inputs()))
        weights = found[1][0].block.w
        assert str(weights.type) == ("layers/stage embed/data out" if data > 1 else "layers/stage embed out")
    check_close(found, one_by_one())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"unrolled": True}, {"unroll": 1}])
@pytest.mark.parametrize("policy", [Keep(), Keep(names=("hidden",))])
def test_unrolled_layers_and_policies_change_nothing(options, policy):
    with layout(2, 2):
        found = named_jit(value_and_gradients, static=(3,))(shard(layers(**options)), *placed(*inputs()), policy)
    check_close(found, one_by_one())


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint])
def test_a_stack_that_is_called_inside_of_a_function_of_jax_is_refused_with_the_fix(around):
    """What its layers get exists in that function alone."""
    model = around(lambda x, marks: through(layers(), x, marks))
    met = lambda model: jax.make_jaxpr(lambda *args: before("layers", model, *args).x.array)(*inputs())
    assert met(lambda x, marks: through(layers(), x, marks))
    with pytest.raises(
        NamesError, match=r"got a call inside of a function under jax\.jit(.|\n)*call the model without"
    ):
        met(model)


def test_bfloat16_layers_stay_bfloat16_and_add_up_their_gradients_in_float32():
    """128 microbatches of one row: a sum in bfloat16 would stop growing at 256 times its addends."""
    ones = lambda *names: named(
        np.ones([2 if n == "layers" else 256 if n == "batch" else 1 for n in names], jnp.bfloat16), " ".join(names)
    )

    class Add(eqx.Module):
        w: NamedArray

        def __call__(self, x):
            assert self.w.dtype == jnp.bfloat16
            return x + self.w

    def total(stacked, x):
        return stacked.fold(x).astype(jnp.float32).sum().array

    with layout(2, pipeline_microbatches=256):
        stacked = shard(Stacked(Add(ones("layers", "embed")), Axis("layers", 2)))
        gradient = named_jit(jax.grad(total))(stacked, shard(ones("batch", "embed"), "compute"))
    np.testing.assert_array_equal(np.asarray(gradient.block.w.array, np.float32), [[256], [256]])


def test_every_tick_moves_one_microbatch_and_parameters_move_once():
    """The closed forms, in float32 bytes that each device sends, of S stages, M microbatches, D slices of the batch.

    Permutes: M + S - 1 ticks of batch / (D M) rows, of activations forward and backward, of marks forward. Into and out
    of the pipeline: an all-gather and a reduce-scatter of a slice of the batch over the stages, (S - 1) / S of it each,
    and the reverse backward. Parameters: (D - 1) / D of a stage's, gathered over data once, gradients scattered once.
    """
    stages, data, parts = 2, 2, 4
    with layout(stages, data, extra=("stage",), pipeline_microbatches=parts):
        found = ledger(value_and_gradients, shard(layers()), *placed(*inputs()))
    rows, ticks = BATCH // data, parts + stages - 1
    row, layer = 4 * EMBED, 4 * EMBED * EMBED
    stage = {kind: found.total(kind=kind, axis="stage") for kind in ("permute", "all-gather", "reduce-scatter")}
    enters = leaves = rows * row * (stages - 1) // stages
    marks = 4 * rows * (stages - 1) // stages
    assert stage == {
        "permute": ticks * rows // parts * (row + row + 4),
        "all-gather": enters + leaves + marks,  # forward, backward
        "reduce-scatter": leaves + enters,
    }
    of_a_stage = LAYERS // stages * layer * (data - 1) // data
    assert found.total(kind="all-gather", axis="data") == found.total(kind="reduce-scatter", axis="data") == of_a_stage


class Noise(eqx.Module):
    w: NamedArray

    def __call__(self, x, key):
        return x + random.normal(key, x.axes)


def noise(stacked: Stacked, x: NamedArray, of: str) -> NamedArray:
    if of == "a layer":
        return stacked.fold(x, each=(random.split(jax.random.key(3), stacked.axis),))
    key = jax.random.key(4)
    if of == "no layer":
        return stacked.fold(x, call=lambda layer, x: layer(x, key), policy=Keep())
    return stacked.fold(x, key)


@pytest.mark.slow
def test_what_all_layers_get_moves_once():
    """A weight as an argument: its gradient is summed after the last tick, and not in every tick for every layer."""
    stacked, (x, marks) = layers(), inputs()
    weight = named(drawn(2, EMBED, EMBED) * np.float32(0.2), "embed out")

    def call(layer, x, w, marks):
        return layer(x + einsum("batch embed, embed out -> batch out", x, w).rename(out="embed"), 1.0, marks)

    loss = lambda w, s, x, m: (s.fold(x, w, m, call=call) ** 2.0).mean().array
    wanted = jax.jit(jax.grad(loss))(weight, stacked, x, marks)
    with layout(2, 2):
        args = shard((weight, stacked)) + shard((x, marks), "compute")
        got = named_jit(jax.grad(loss))(*args)
        rows = ledger(jax.grad(loss), *args).rows
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
    summed = [row for row in rows if row.direction == "backward" and row.kind in ("all-reduce", "reduce-scatter")]
    assert summed and all(row.times == 1 for row in summed)


@pytest.mark.slow
def test_what_layers_take_from_around_them():
    """A weight that rests in slices is right; of the batch they see a part, so what has it is refused with the fix."""
    stacked, (x, marks) = layers(), inputs()
    weight = named(drawn(2, EMBED, EMBED) * np.float32(0.2), "embed out")

    def loss(w, s, x, m):
        more = lambda x: x + einsum("batch embed, embed out -> batch out", x, w).rename(out="embed")
        return (s.fold(x, m, call=lambda layer, x, m: layer(more(x), 1.0, m)) ** 2.0).mean().array

    wanted = jax.jit(jax.grad(loss, (0, 1)))(weight, stacked, x, marks)
    with layout(2, 4):
        args = shard((weight, stacked)) + shard((x, marks), "compute")
        got = named_jit(jax.grad(loss, (0, 1)))(*args)
        with pytest.raises(NamesError, match="a part of 'batch' at a time here: hand what they read of it to fold"):
            stacked.fold(x, call=lambda layer, h: layer(h, 1.0, marks))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("data, of", [(1, "a layer"), (4, "a layer"), (2, "all layers"), (2, "no layer")])
def test_random_keys_differ_between_parts(data, of):
    """Rows of different microbatches, and of different slices of the batch, get different noise."""
    with layout(2, data, pipeline_microbatches=8 // data):
        stacked = Stacked(Noise(named(drawn(0, 2, EMBED), "layers embed")), Axis("layers", 2))
        x = shard(named(np.zeros((8, EMBED), np.float32), "batch embed"), "compute")
        out = named_jit(noise, static=(2,))(shard(stacked), x, of)
    rows = np.asarray(out.array)
    assert len(np.unique(rows.round(5), axis=0)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("of", ["a layer", "all layers", "no layer"])
def test_what_is_not_drawn_along_the_batch_is_the_same_for_all_parts(of):
    """As on one device: noise of a weight is that of all rows."""
    stacked = Stacked(OfWeights(named(np.ones((LAYERS, EMBED), np.float32), "layers embed")), Axis("layers", LAYERS))
    wanted = named_jit(noise, static=(2,))(stacked, inputs()[0], of).array
    with layout(2, 2, pipeline_microbatches=2):
        found = named_jit(noise, static=(2,))(shard(stacked), placed(*inputs())[0], of)
    np.testing.assert_allclose(found.array, wanted, rtol=1e-5)


def test_a_jitted_function_may_draw_in_a_layer():
    """JAX would keep what it has traced of it, and with it the number of a part that another program has."""
    dropped = jax.jit(lambda x: random.dropout(jax.random.key(3), x, 0.5))
    stacked = Stacked(OfWeights(named(np.ones((LAYERS, EMBED), np.float32), "layers embed")), Axis("layers", LAYERS))
    with layout(2, 2, pipeline_microbatches=2):
        x, block = placed(*inputs())[0], shard(stacked)
        programs = [str(jax.make_jaxpr(lambda x: block.fold(x, call=lambda _, x: dropped(x)))(x)) for _ in range(2)]
    assert programs[0] == programs[1]


class OfWeights(eqx.Module):
    w: NamedArray

    def __call__(self, x, key):
        return x * (self.w + 0.1 * random.normal(key, self.w.axes))


class Numbered(eqx.Module):
    w: NamedArray

    def __call__(self, x):
        return x * arange(x.axis("batch"), dtype=jnp.float32)


def test_numbers_of_rows_are_not_made_in_a_layer():
    """They would be those of a part."""
    stacked = Stacked(Numbered(named(np.ones((2, EMBED), np.float32), "layers embed")), Axis("layers", 2))
    assert mistake(layout(2), stacked, inputs()[0]) == (
        "a layer in a pipeline must compute each row of 'batch' on its own, got arange along 'batch', of which it "
        "sees only a microbatch: move it out of the layers, or remove the layers from the layout's compute"
    )


class Sized(eqx.Module):
    w: NamedArray
    what: str = eqx.field(static=True)

    def __call__(self, x):
        return SIZES[self.what](x) * self.w


SIZES = {
    "a quotient": lambda x: x / x.shape["batch"],
    "an axis": lambda x: x * x.axis("batch").size,
    "one of the axes": lambda x: x * x.axes[0].size,
    "a root": lambda x: x * math.sqrt(x.shape["batch"]),
    "an array": lambda x: x * jnp.float32(x.shape["batch"]),
    "a number": lambda x: x * int(x.shape["batch"]),
    "of all": lambda x: x / math.prod(x.shape.values()),
}
MADE = {
    "zeros": lambda x: x + zeros({"batch": x.shape["batch"], "embed": EMBED}),
    "of a shape": lambda x: x + zeros(x.shape),
    "of axes": lambda x: x + zeros(x.axes),
    "of an axis": lambda x: x + zeros([x.axis("batch")]),
    "by JAX": lambda x: x + named(jnp.zeros(tuple(x.shape.values())), tuple(x.shape)),
    "reshaped": lambda x: named(x.array.reshape(x.shape["batch"], -1), "batch embed"),
    "where it is so": lambda x: x if x.shape["batch"] == x.axis("batch").size else zeros(x.shape),
}
SIZES |= MADE


@pytest.mark.parametrize("what", SIZES)
def test_how_many_rows_there_are_is_no_number_in_a_layer(what):
    """It would be that of a part; what is made of that size is right."""
    stacked = Stacked(Sized(named(np.full((2, EMBED), 0.5, np.float32), "layers embed"), what), Axis("layers", 2))
    if what not in MADE:
        assert mistake(layout(2, 2), stacked, inputs()[0]) == (
            "a layer in a pipeline must compute each row of 'batch' on its own, got a number made from the count of "
            "rows, of which it sees 1: pass the number to the layers as an argument, or remove the layers from the "
            "layout's compute"
        )
        return
    x = inputs()[0]
    with layout(2, 2):
        found = named_jit(lambda stacked, x: stacked.fold(x))(shard(stacked), shard(x, "compute"))
    np.testing.assert_allclose(found.array, x.array / 4, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rest", [{"layers": "data"}, {"layers": "data", "embed": "stage"}, {"layers": "data/stage"}])
def test_layers_that_rest_over_another_axis_go_to_their_stages(rest):
    with Layout(make_mesh(jax.devices()[:4], stage=2, data=2), rest, {"layers": "stage", "batch": "data"}):
        found = named_jit(value_and_gradients)(shard(layers()), *placed(*inputs()))
    check_close(found, one_by_one())


@pytest.mark.slow
def test_without_a_use_of_the_layers_slices_they_are_gathered():
    """Layers sliced at rest only, and `scan`, which also gives each layer's value: no pipeline."""
    expected = named_jit(through)(layers(), *inputs())
    mesh = make_mesh(jax.devices()[:2], stage=2)
    with Layout(mesh, {"layers": "stage"}, {"batch": "stage"}):
        found = named_jit(through)(shard(layers()), *placed(*inputs()))
    check_close(found, expected)


def mistake(layout, stacked, x):
    with layout, pytest.raises(NamesError) as error:
        jax.eval_shape(lambda s, x: s.fold(x), shard(stacked), x)
    return str(error.value)


class Identity(eqx.Module):
    w: NamedArray

    def __call__(self, x):
        return x


def test_mistakes():
    of = lambda n: Stacked(Identity(named(np.ones((n, 2), np.float32), "layers embed")), Axis("layers", n))
    mesh = make_mesh(stage=4, data=2)
    use = {"layers": "stage", "batch": "data"}
    x = named(np.ones((16, 2), np.float32), "batch embed")
    assert mistake(Layout(mesh, (), use, uneven=("layers",)), of(3), x) == (
        "every part of a pipeline needs a layer, got 3 'layers' in 1 group on each of 4 stages: use numbers whose "
        "product is 3 or less"
    )
    assert mistake(Layout(mesh, (), {"layers": ("stage", "data")}), of(8), x) == (
        "a pipeline must run along one mesh axis, got 'layers/stage/data': choose one of them"
    )
    assert mistake(Layout(mesh, (), use), of(4), named(np.ones(2, np.float32), "embed")) == (
        "every value that a pipeline carries must have the name 'batch', got one without it: carry named arrays that "
        "have it, or remove 'layers' from the layout's compute"
    )
    assert mistake(Layout(mesh, (), use, pipeline_microbatches=3), of(4), x) == (
        "a pipeline's microbatches must divide every slice of the batch evenly, got 3 for batch=16 in 2 slices: use "
        "one of 1, 2, 4, 8 as pipeline_microbatches"
    )
    auto = make_mesh(stage=4, data=2, axis_type="auto")
    assert mistake(Layout(auto, (), use), of(4), x) == (
        "a pipeline needs a mesh in explicit mode, got 'layers/stage' in auto mode: make an explicit mesh"
    )


@pytest.mark.slow
@pytest.mark.parametrize("count, stages", [(3, 2), (6, 4)])
def test_stages_with_a_layer_less(count, stages):
    """Values and gradients of numbers of layers that stages do not divide."""
    mesh = make_mesh(jax.devices()[: stages * 2], stage=stages, data=2)
    maps = {"embed": ("data", "stage")}, {"layers": "stage", "batch": "data"}
    with Layout(mesh, *maps, pipeline_microbatches=2, uneven=("layers",)):
        stacked = shard(layers(count), "params")
        found = named_jit(value_and_gradients)(stacked, *placed(*inputs()))
    check_close(found, one_by_one(count))


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["~stage", "~stage ~data"])
def test_layers_that_are_held_as_copies(copied):
    """Three layers on two stages, found by random programs (seed 2000637)."""
    mesh = make_mesh(jax.devices()[:4], stage=2, data=2)
    w, h = named(drawn(0, 3, EMBED), "layers embed"), inputs()[0]

    def loss(w, h):
        stack = Stacked(w, Axis("layers", 3), unroll=1)
        return stack.fold(h, call=lambda layer, x: x * layer + tanh(x)).sum().array

    def of_copies(w, h):
        return loss(w.with_array(reshard(f"layers embed -> layers embed {copied}", w.array)), h)

    expected = jax.jit(jax.grad(loss, (0, 1)))(w, h)
    with Layout(mesh, {}, {"layers": "stage"}, uneven=("layers",)):
        found = named_jit(jax.grad(of_copies, (0, 1)))(w, h)
    check_close(found, expected)
