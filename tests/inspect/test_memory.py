"""What one device holds: by kind and name, from types, from the compiler, and while running."""

import collections
import functools
import gc
import json
import xml.etree.ElementTree as ElementTree
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.inspect import Buffer, Memory, NotEnoughMemory, fusion, live_bytes, live_memory, memory
from trellis.program import trace
from trellis.train.state import TrainState

LAYERS, BATCH, EMBED, MLP = 3, 8, 16, 32
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def layer(x, weights):
    up, down = weights["up"], weights["down"]
    hidden = checkpoint_name(jnp.tanh(x @ up), "hidden")
    return x + checkpoint_name(hidden @ down, "out"), None


def loss(model, x, keep=()):
    body = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*keep))
    return jnp.mean(lax.scan(body, x, model)[0] ** 2)


def shapes(sharding=lambda *partitions: None):
    def array(shape, *partitions):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding(*partitions))

    model = {"up": array((LAYERS, EMBED, MLP)), "down": array((LAYERS, MLP, EMBED))}
    return model, array((BATCH, EMBED), "data")


def step(optimizer, keep, state, x):
    gradients = jax.grad(functools.partial(loss, keep=keep))(state["model"], x)
    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
        updates, moments = optimizer.update(gradients, state["optimizer"], state["model"])
        return {"model": optax.apply_updates(state["model"], updates), "optimizer": moments}


@functools.cache
def of_step(*keep):
    model, x = shapes()
    optimizer = optax.adam(1e-3)
    state = {"model": model, "optimizer": jax.eval_shape(optimizer.init, model)}
    return memory(jax.jit(functools.partial(step, optimizer, keep), donate_argnums=0), state, x)


PARAMETERS = 2 * LAYERS * EMBED * MLP * 4


def test_kinds_of_a_train_step():
    kinds = of_step().per_kind()
    assert kinds["parameters"] == kinds["gradients"] == PARAMETERS
    assert kinds["optimizer"] == 2 * PARAMETERS + 4  # two moments and a counter
    assert kinds["batch"] == BATCH * EMBED * 4
    # Full recomputation keeps what goes from layer to layer.
    assert kinds["activations"] == LAYERS * BATCH * EMBED * 4


@pytest.mark.parametrize("keep", [("hidden",), ("out",), ("hidden", "out")])
def test_named_activations_are_kept_by_name(keep):
    sizes = {"hidden": LAYERS * BATCH * MLP * 4, "out": LAYERS * BATCH * EMBED * 4}
    more = {b.name: b.num_bytes for b in of_step(*keep).kept_by_name()}
    # The second name is the last that a layer makes: nothing in the backward pass reads it.
    assert {name: more.get(name, 0) for name in sizes} == {"hidden": sizes["hidden"] * ("hidden" in keep), "out": 0}


def test_the_largest_activation():
    largest = of_step("hidden").largest()
    assert (largest.name, largest.what) == ("hidden", "f32[3 8 32]")
    assert largest.source.startswith("test_memory.py:") and largest.source.endswith("(layer)")
    assert of_step().largest().name == "carry between layers"
    assert of_step().largest("weights in use") is None


@pytest.mark.parametrize("keep", [(), ("hidden",), ("hidden", "out")])
def test_the_highest_point_is_the_compilers(keep):
    found = of_step(*keep)
    assert sum(found.per_kind().values()) == found.total == pytest.approx(found.compiled.peak, rel=0.05)


def test_the_compiler_counts_the_same_arguments():
    found = of_step("hidden")
    kinds = found.per_kind()
    assert found.compiled.arguments == kinds["parameters"] + kinds["optimizer"] + kinds["batch"]
    assert found.compiled.aliased == kinds["parameters"] + kinds["optimizer"]
    assert found.peak == found.compiled.peak


def test_per_device_bytes_follow_the_sharding():
    sharding = lambda *partitions: NamedSharding(MESH, P(*partitions))
    model, x = shapes(sharding)
    model["up"] = jax.ShapeDtypeStruct((LAYERS, EMBED, MLP), jnp.float32, sharding=sharding(None, None, "model"))
    model["down"] = jax.ShapeDtypeStruct((LAYERS, MLP, EMBED), jnp.float32, sharding=sharding(None, "model", None))

    def parallel(model, x):
        def body(x, weights):
            hidden = checkpoint_name(jnp.tanh(x @ weights["up"]), "hidden")
            return x + jnp.einsum("bm,me->be", hidden, weights["down"], out_sharding=P("data", None)), None

        kept = jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names("hidden"))
        return jnp.mean(lax.scan(kept, x, model)[0] ** 2)

    found = memory(jax.grad(parallel), model, x, compile=False)
    assert found.per_kind()["parameters"] == PARAMETERS // 2
    assert found.per_kind()["batch"] == BATCH * EMBED * 4 // 4
    hidden = next(b for b in found.kept if b.name == "hidden")
    assert hidden.num_bytes == LAYERS * BATCH * MLP * 4 // 8
    assert hidden.what == "f32[3 8/data 32/model]"
    assert found.compiled is None and found.peak == found.total


def test_what_a_scatter_gathers_is_there():
    """All but what a lookup's gradient scatters into zeros, which the compiler slices instead."""
    arrays = tr.named(jnp.zeros((64, 4)), "vocab embed"), tr.named(jnp.zeros((32, 4)), "batch embed")
    with tr.Layout(MESH, compute={"batch": "data", "vocab": "model"}):
        table, rows, ids = (tr.shard(x, "compute") for x in (*arrays, tr.named(jnp.zeros(32, jnp.int32), "batch")))
        found = memory(lambda table, ids, rows: table.at["vocab", ids].add(rows), table, ids, rows, compile=False)
    whole = {b.what for b in found.buffers}
    assert {"f32[vocab embed]", "f32[batch embed]"} <= whole


def test_a_gathered_weight_that_is_kept_shows_as_one():
    """Without recomputation a weight that was gathered for the forward pass stays for the backward pass."""

    def gathered(w, x):
        w = jax.reshard(w, P(None, None, reduced={"data"}))
        return jnp.sum(jnp.tanh(x @ w))

    w = jax.ShapeDtypeStruct((EMBED, MLP), jnp.float32, sharding=NamedSharding(MESH, P("data", None)))
    x = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32, sharding=NamedSharding(MESH, P("data", None)))
    found = memory(jax.grad(gathered, argnums=(0, 1)), w, x, compile=False)
    assert found.per_kind()["weights in use"] == EMBED * MLP * 4
    assert found.largest("weights in use").what == "f32[16 32 ~data]"


def test_what_is_computed_of_parameters_is_not_a_weight():
    squares = memory(lambda w: jax.nn.softmax(w @ w.T, axis=1), jnp.ones((EMBED, MLP)), compile=False)
    assert set(squares.per_kind()) == {"parameters", "temporaries", "fragmentation"}
    cast = memory(lambda w: w.astype(jnp.bfloat16), jnp.ones((EMBED, MLP)), compile=False)
    assert cast.per_kind()["weights in use"] == EMBED * MLP * 2


def test_both_passes_inside_a_loop_over_microbatches():
    def accumulate(model, xs):
        def body(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(functools.partial(loss, keep=("hidden",)))(model, x)), None

        return lax.scan(body, jax.tree.map(jnp.zeros_like, model), xs)[0]

    model, x = shapes()
    xs = jax.ShapeDtypeStruct((5, *x.shape), x.dtype)
    found = memory(accumulate, model, xs, compile=False)
    assert found.largest().name == "hidden"
    assert found.largest().num_bytes == LAYERS * BATCH * MLP * 4  # of one microbatch


def test_random_bits_are_made_by_what_reads_them():
    """No compiler writes them: on v5e and on H100s as many as a weight has took nothing (libtpu 0.0.42, JAX 0.11.2)."""
    weight = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    drawn = lambda w, key: jnp.where(jax.random.bits(key, w.shape) > 7, w, 0.0).sum()
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert memory(drawn, weight, key, compile=False).total < 1.01 * 1024 * 256 * 4


def test_results_take_donated_memory_or_their_own():
    double = lambda x: (x * 2, jnp.sum(x))
    x = jnp.ones((64, 64))
    alone, donated = (memory(jax.jit(double, donate_argnums=given), x) for given in ((), (0,)))
    assert alone.total - donated.total >= x.nbytes and donated.compiled.aliased == x.nbytes


def test_what_updates_or_views_an_argument_is_a_result_of_its_own():
    """A caller that donates nothing keeps its array as it is."""
    x, at = jnp.ones((64, 64)), jnp.arange(8)
    for change in (
        lambda x: x.at[at].add(1.0),
        lambda x: jax.lax.dynamic_update_slice(x, x[:1], (2, 0)),
        lambda x: x.reshape(-1),
        lambda x: jnp.tanh(x.at[at].add(1.0)),
    ):
        for given in ((), (0,)):
            found = memory(jax.jit(change, donate_argnums=given), x)
            assert abs(found.total - found.peak) < x.nbytes / 2


def test_sums_over_microbatches_are_gradients():
    def accumulate(model, xs):
        body = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(model, x)), None)
        return jax.tree.map(lambda p, g: p - g, model, lax.scan(body, jax.tree.map(jnp.zeros_like, model), xs)[0])

    model, x = shapes()
    found = memory(accumulate, model, jax.ShapeDtypeStruct((5, *x.shape), x.dtype), compile=False)
    assert found.per_kind()["gradients"] >= PARAMETERS


def test_reading_a_residual_stream_takes_time_in_proportion(monkeypatch):
    """Of layers that are written out: each value's readers are looked through once."""
    asked, writes = [], fusion.writes
    monkeypatch.setattr(fusion, "writes", lambda operation: asked.append(operation) or writes(operation))

    def seen(layers):
        asked.clear()

        def total(weights, x):
            for w in weights:
                x = jnp.tanh(x @ w) + x
            return jnp.mean(x * x)

        weights = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * layers
        step = lambda weights, x: jax.tree.map(jnp.subtract, weights, jax.grad(total)(weights, x))
        memory(step, weights, jax.ShapeDtypeStruct((16, 8), jnp.float32), compile=False)
        return len(asked)

    assert seen(40) < 2.5 * seen(20)


def test_forward_only_has_no_gradients():
    model, x = shapes()
    assert not {"gradients", "activations"} & set(memory(loss, model, x, compile=False).per_kind())


FLOAT, INTEGER = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)


class Model(eqx.Module):
    mu: jax.Array
    optional_head: jax.Array


class Own(NamedTuple):
    """The state of a rule of one's own."""

    sums: jax.Array


class Params(NamedTuple):
    w: jax.Array


def kinds(*args, fn=lambda *args, **kwargs: None, **kwargs):
    return [(argument.name, argument.kind) for argument in trace(fn, *args, **kwargs).arguments]


@pytest.mark.parametrize(
    "model",
    [
        {"mu": FLOAT, "trace": FLOAT, "option_head": FLOAT, "average": FLOAT, "nu": FLOAT},
        Model(FLOAT, FLOAT),
        Params(FLOAT),
        (FLOAT, [FLOAT]),
    ],
)
def test_what_an_argument_is_follows_from_types_and_not_from_names(model):
    batch = {"params": FLOAT, "model": INTEGER, "optimizer": FLOAT, "mu": FLOAT}
    for rule in (optax.adam(1e-3), optax.scale_by_adam(), optax.chain(optax.adam(1e-3), optax.trace(0.9))):
        moments = jax.eval_shape(rule.init, model)
        state = {"first": model, "second": moments, "step": INTEGER}
        expected = {kind: len(jax.tree.leaves(tree)) for kind, tree in (("parameters", model), ("optimizer", moments))}
        for args, others in (((state,), 1), ((model, moments), 0), ((moments, model), 0)):
            found = collections.Counter(kind for _, kind in kinds(*args, batch))
            assert found == expected | {"batch": len(batch) + others}


def test_a_state_of_ones_own_is_the_optimizers_in_a_chain():
    rule = (optax.EmptyState(), Own(FLOAT), (optax.EmptyState(), Own(FLOAT)))
    assert kinds({"params": FLOAT, "state": rule}) == [
        ("params", "parameters"),
        ("state.1.sums", "optimizer"),
        ("state.2.1.sums", "optimizer"),
    ]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_only_the_update_reads_is_the_optimizers(microbatches):
    """A rule by hand: masters in float32, weights that are cast before they are used, an average."""

    def step(state, batch):
        rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state["trace"])
        loss = lambda w, x: jnp.sum(w["w"] * x).astype(jnp.float32) ** 2 + (w["b"].astype(jnp.float32) ** 2).sum()
        turn = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(rounded, x.astype(jnp.bfloat16))), None)
        gradients, _ = lax.scan(turn, jax.tree.map(jnp.zeros_like, rounded), batch)
        sums = jax.tree.map(lambda m, g: m + g.astype(m.dtype), state["params"], gradients)
        weights = jax.tree.map(lambda w, m: w - m, state["trace"], sums)
        return {"trace": weights, "params": sums, "model": state["model"] * 0.9 + weights["w"]}

    weights = {"w": FLOAT, "b": FLOAT}
    state = {"trace": weights, "params": weights, "model": FLOAT}
    found = kinds(state, jax.ShapeDtypeStruct((microbatches, 2), jnp.float32), fn=step)
    assert found == [
        ("model", "optimizer"),
        ("params.b", "optimizer"),
        ("params.w", "optimizer"),
        ("trace.b", "parameters"),
        ("trace.w", "parameters"),
        ("argument 1", "batch"),
    ]


def test_fields_of_a_training_state_are_what_they_are_for():
    model = {"mu": FLOAT}
    state = TrainState(INTEGER, model, model, model, INTEGER, {"scale": FLOAT})
    of_keywords = kinds(batch=model, state=state, fn=lambda state, batch: None)
    assert of_keywords == [
        ("step", "batch"),
        ("model.mu", "parameters"),
        ("optimizer.mu", "optimizer"),
        ("average.mu", "optimizer"),
        ("key", "batch"),
        ("scales.scale", "parameters"),
        ("mu", "batch"),
    ]
    assert kinds(state, model) == of_keywords


def test_keyword_arguments_come_as_the_function_has_them():
    model, batch = {"w": FLOAT}, {"x": FLOAT}
    loss_of = lambda model, batch: jnp.float32(0)
    for fn in (loss_of, jax.jit(loss_of)):
        assert kinds(batch=batch, model=model, fn=fn) == [("w", "parameters"), ("x", "batch")]
    assert kinds(batch=FLOAT, model=model) == [("argument batch", "parameters"), ("w", "batch")]  # as they are given
    assert kinds(model, batch=FLOAT) == [("w", "parameters"), ("argument batch", "batch")]


def test_what_arguments_are_can_be_said():
    seen = []
    found = memory(
        lambda a, *, b: (a + 1, b["c"] * 2),
        FLOAT,
        b={"c": FLOAT},
        compile=False,
        kind_of=lambda path, array: seen.append(path) or "optimizer",
    )
    assert seen == [("0",), ("b", "c")] and found.per_kind()["optimizer"] == 16


def test_table_json_and_picture():
    found = of_step("hidden")
    text = str(found)
    for words in ("kind", "parameters", "12.0 KiB", "largest activation: hidden, 3.00 KiB", "by the compiler: peak"):
        assert words in text
    data = json.loads(found.to_json())
    assert data["per_kind"] == found.per_kind() and sum(data["per_kind"].values()) == data["total"] == found.total
    assert data["peak"] == found.peak == found.compiled.peak
    root = ElementTree.fromstring(found.svg())
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "hidden f32[3 8 32] 3.00 KiB" in titles
    assert "model.up f32[3 16 32] 6.00 KiB" in titles


def test_areas_of_the_picture_are_in_proportion():
    found = Memory((
        Buffer(kind="parameters", name="a", what="", num_bytes=3000),
        Buffer(kind="parameters", name="b", what="", num_bytes=1000),
        Buffer(kind="batch", name="c", what="", num_bytes=4000),
    ))  # fmt: skip
    areas = {}
    for element in ElementTree.fromstring(found.svg()).iter("{http://www.w3.org/2000/svg}rect"):
        for title in element:
            areas[title.text[0]] = float(element.get("width")) * float(element.get("height"))
    assert areas["a"] == pytest.approx(3 * areas["b"], rel=0.01)
    assert areas["c"] == pytest.approx(4 * areas["b"], rel=0.01)


def test_what_colors_of_the_picture_are_is_within_it():
    kinds = ("parameters", "optimizer", "gradients", "activations", "weights in use", "batch", "temporaries")
    found = Memory(tuple(Buffer(kind=kind, name=kind, what="", num_bytes=1 << 20) for kind in kinds))
    root = ElementTree.fromstring(found.svg())
    words = [text for text in root.iter("{http://www.w3.org/2000/svg}text") if text.text.endswith("1.00 MiB")]
    ends = {text.text: float(text.get("x")) + 6 * len(text.text) for text in words if text.text != "1.00 MiB"}
    assert {f"{kind} 1.00 MiB" for kind in kinds} == {*ends} and max(ends.values()) <= float(root.get("width"))
    legend = max(float(text.get("y")) for text in words if text.text in ends)
    assert legend < min(float(rect.get("y")) for rect in root.iter("{http://www.w3.org/2000/svg}rect") if len(rect))


def test_live_buffers():
    gc.collect()
    before = live_memory().per_kind().get("other", 0)
    model = {"up": jax.device_put(jnp.ones((64, 64)), jax.devices()[0])}
    lost = jax.device_put(jnp.ones((32, 32)), jax.devices()[0])
    found = live_memory(parameters=model)
    assert found.per_kind()["parameters"] == 64 * 64 * 4
    assert [b.name for b in found.buffers if b.kind == "parameters"] == ["up"]
    assert found.per_kind()["other"] >= 32 * 32 * 4 and found.per_kind()["other"] >= before
    del lost


def test_bytes_of_each_device_show_what_was_made_on_one():
    gc.collect()
    before = live_bytes()
    whole = jax.device_put(jnp.ones((8, 256)), jax.devices()[3])
    spread = jax.device_put(np.ones((8, 256), np.float32), NamedSharding(MESH, P(("data", "model"), None)))
    after = live_bytes()
    more = [after[device.id] - before[device.id] for device in jax.devices()]
    assert more == [1024, 1024, 1024, 1024 + 8192, 1024, 1024, 1024, 1024]
    del whole, spread


def test_what_does_not_fit_says_what_would():
    large, small = of_step("hidden"), of_step()
    large.check(large.peak)
    with pytest.raises(NotEnoughMemory) as caught:
        large.check(1000, {"keep nothing": lambda: small})
    assert "none of keep nothing is enough: use more devices, or a smaller model or batch" in str(caught.value)
    fits = Memory(large.buffers[:1])
    with pytest.raises(NotEnoughMemory) as caught:
        large.check(
            fits.peak,
            {"keep nothing": lambda: large, "half the batch": lambda: fits, "four devices": lambda: fits},
        )
    text = str(caught.value)
    assert text.startswith("a step must fit in a device's memory, got ")
    assert "too much; largest: " in text
    assert "what fits: half the batch (" in text and "four devices (" in text and "keep nothing" not in text


def test_what_does_not_fit_without_changes():
    with pytest.raises(NotEnoughMemory, match="use more devices, or a smaller model or batch$"):
        of_step().check(1)


def test_the_branch_that_takes_most_memory_counts():
    """And not the one with the most operations."""
    wide = lambda x: jnp.sort(jnp.tile(x, (1, 32)), 1)[:, :64]

    def long(x):
        for i in range(12):
            x = jnp.sin(x) + i
        return x

    for branches in ((wide, long), (long, wide)):
        found = memory(lambda i, x, b=branches: lax.cond(i, *b, x), jnp.bool_(True), jnp.ones((64, 64)))
        assert found.total > found.compiled.peak > 32 * 64 * 64 * 4


FOUR = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Explicit,))
WHOLE = 1024 * 1024 * 4


def product(a, w):
    return jnp.einsum("bd,df->bf", a, w, out_sharding=NamedSharding(FOUR, P("data")))


@pytest.mark.parametrize(
    "function, slices, held",
    [
        (lambda a, w: jnp.tanh(product(a, w)), ("data",), {"gathered": WHOLE}),
        (lambda a, w: product(a, w) + 1, ("data",), {"gathered": WHOLE}),  # which is a part of the product
        (product, (None, "data"), {"gathered": 2 * WHOLE}),  # columns are gathered, and transposed
        (lambda a, w: lax.top_k(w, 8)[0], ("data",), {"gathered": WHOLE}),
        (lambda a, w: jnp.fft.fft(w, axis=0).real, ("data",), {"gathered": 2 * WHOLE}),  # of complex numbers
        (lambda a, w: product(w.T, w), ("data",), {"before it is scattered": WHOLE}),
        (lambda a, w: jnp.tanh(w.sum(0)), ("data",), {}),  # a sum over devices is in its own place
    ],
)
def test_what_implied_moves_make_is_there(function, slices, held):
    """While the operation runs that the ledger has a row for."""
    place = lambda shape, *axes: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(FOUR, P(*axes)))
    found = memory(function, place((64, 1024), "data"), place((1024, 1024), *slices))
    sizes = collections.Counter()
    for buffer in found.buffers:
        for word in ("gathered", "before it is scattered"):
            sizes[word] += buffer.num_bytes * (f", {word}" in buffer.name)
    assert +sizes == held
    assert 0.6 < found.total / found.compiled.peak < 1.1  # CPUs sum into another array before they scatter


def test_what_compilers_gather_is_estimated():
    """An operand of a product in auto mode, as its constraint says; the result of another constraint is one itself."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    sliced = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=rows)
    found = memory(lambda w: lax.with_sharding_constraint(w @ w, rows), sliced)
    (gathered,) = [buffer for buffer in found.buffers if buffer.name.endswith(", gathered")]
    assert gathered.num_bytes == WHOLE and found.total == pytest.approx(found.compiled.peak, rel=0.1)
