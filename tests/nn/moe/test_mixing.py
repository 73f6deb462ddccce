"""The ways to experts: values and gradients of each are those of the definition, on one device and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn.moe.emulated import ragged_all_to_all
from trellis.mesh import Layout, make_mesh
from trellis.named import map as loop
from trellis.named import named, named_jit, shard, vmap
from trellis.nn import ClampedSwiGLU
from trellis.nn.moe import (
    Biases,
    Choices,
    ExpertsError,
    blocks,
    choose,
    gradients,
    grouped,
    grouped_matmul,
    mix,
    mixing,
    score,
    triton,
)

BATCH, POS, EMBED, MLP, EXPERTS, CHOICES = 4, 6, 8, 12, 8, 2
CLAMPED = ClampedSwiGLU(0.5)
TENSOR = {"experts": "expert", "mlp": "model"}
LAYOUTS = {
    "one": None,
    "expert": (
        dict(data=2, expert=2),
        {"experts": "expert", "embed": "data"},
        {"experts": "expert", "batch": ("data", "expert")},
    ),
    "expert, many": (dict(expert=4), {"experts": "expert"}, {"experts": "expert", "batch": "expert"}),
    "expert, hierarchical": (
        dict(expert_y=2, expert=2),
        {"experts": ("expert_y", "expert")},
        {"experts": ("expert_y", "expert"), "batch": ("expert_y", "expert")},
    ),
    "whole tokens": (dict(expert=2, model=2), TENSOR, TENSOR),
    "tensor": (dict(expert=2, model=2), TENSOR, TENSOR | {"batch": "expert", "pos": "model"}),
    "over model": (dict(data=2, model=2), {"experts": "model"}, {"experts": "model", "batch": "data"}),
    "over both": (
        dict(expert=2, model=2),
        {"experts": ("expert", "model")},
        {"experts": ("expert", "model"), "batch": "expert"},
    ),
}


@functools.cache
def arrays():
    """Two experts get most tokens: buffers of an even load overflow."""
    keys = jax.random.split(jax.random.key(0), 5)
    draw = lambda i, names, *sizes: named(jax.random.normal(keys[i], sizes) / 3, names)
    x = draw(0, "batch pos embed", BATCH, POS, EMBED)
    router = draw(1, "embed routes", EMBED, EXPERTS)
    favoured = router.with_array(0.1 * router.array + jnp.where(jnp.arange(EXPERTS) < 2, 2.0, 0.0)[None])
    into = (draw(i, "experts embed mlp", EXPERTS, EMBED, MLP) for i in (2, 3))
    return x.with_array(jnp.abs(x.array)), favoured, *into, draw(4, "experts mlp embed", EXPERTS, MLP, EMBED)


def loss(how, x, router, gate, up, down, *biases):
    beside = dict(biases=Biases(*biases), gated=CLAMPED) if biases else {}
    out = mix(x, choose(score(x, router), CHOICES), gate, up, down, **how, **beside)
    weights = named(jnp.arange(1.0, x.shape["embed"] + 1), "embed")  # elements in a wrong place show
    return (out * out * weights).sum().array, out


def biases():
    keys = jax.random.split(jax.random.key(1), 3)
    draw = lambda i, names, *sizes: named(jax.random.normal(keys[i], sizes), names)
    gate, up = (draw(i, "experts mlp", EXPERTS, MLP) for i in (0, 1))
    return gate, up, draw(2, "routes embed", EXPERTS, EMBED)


def run(jit, given, **how):
    fn = jax.value_and_grad(functools.partial(loss, how), argnums=tuple(range(len(given))), has_aux=True)
    return jax.device_get(jit(fn)(*given))


@functools.cache
def defined(biased=False, dispatch=None):
    return run(jax.jit, arrays() + (biases() if biased else ()), way="dense", dispatch=dispatch)


# Where experts have biases, and gates with bounds.
BIASED = {
    ("one", "grouped", 1.5), ("expert", "dense", 1.5), ("expert", "ragged", 0.3), ("expert, many", "slots", 1.5),
    ("expert, many", "gather", 1.5), ("expert, hierarchical", "hierarchical", 0.3),
    ("tensor", "gather", 1.5), ("over model", "auto", 1.5), ("over both", "auto", 1.5),
}  # fmt: skip


# How rows travel, and what then is the definition. In the numbers that they have where nothing else is said.
KINDS = {None: None, "mxfp8": "mxfp8", "bits": None}
NARROW = {
    ("one", "grouped", 1.5): KINDS,
    ("expert", "dense", 1.5): KINDS,
    ("expert", "ragged", 0.3): ("mxfp8", "bits"),
    ("expert, many", "slots", 1.5): ("mxfp8", "bits"),
    ("expert, many", "gather", 1.5): KINDS,
    ("expert, hierarchical", "hierarchical", 0.3): ("mxfp8", "bits"),
    ("whole tokens", "slots", 1.5): (None, "mxfp8"),
    ("tensor", "ragged", 0.5): ("mxfp8",),
}


def on_layout(layout, given, **how):
    if LAYOUTS[layout] is None:
        return run(jax.jit, given, **how)
    x, *weights = given
    mesh, params, compute = LAYOUTS[layout]
    with Layout(make_mesh(jax.devices()[:4], **mesh), params, compute):
        return run(named_jit, (shard(x, "compute"), *shard(weights, "params")), **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "way", "slack"),
    [
        ("one", "grouped", 1.5),
        ("expert", "dense", 1.5),
        ("expert", "grouped", 1.5),
        ("expert", "ragged", 1.5),
        ("expert", "ragged", 0.3),
        ("expert", "slots", 0.3),
        ("expert, many", "gather", 1.5),
        ("expert, many", "ragged", 0.3),
        ("expert, many", "slots", 1.5),
        ("expert, hierarchical", "hierarchical", 1.5),
        ("expert, hierarchical", "hierarchical", 0.3),
        ("whole tokens", "slots", 1.5),
        ("tensor", "gather", 1.5),
        ("tensor", "ragged", 0.5),
        ("over model", "auto", 1.5),
        ("over both", "auto", 1.5),
    ],
)
def test_every_way_is_the_definition(layout, way, slack, monkeypatch):
    assert_is_the_definition(layout, way, slack, monkeypatch)


def assert_is_the_definition(layout, way, slack, monkeypatch):
    """In its values and gradients; a CPU has the ragged exchange of the tests."""
    monkeypatch.setattr(mixing, "RAGGED", (*mixing.RAGGED, "cpu"))
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    biased = (layout, way, slack) in BIASED
    given = arrays() + (biases() if biased else ())
    for dispatch in NARROW.get((layout, way, slack), (None,)):
        found = on_layout(layout, given, way=way, slack=slack, dispatch=dispatch)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(defined(biased, KINDS[dispatch])), strict=True):
            assert np.linalg.norm(a - b) < 2e-6 * np.linalg.norm(b), dispatch


def standing_in(name):
    """For a kernel for GPUs, in manual mode, where Pallas's interpreter knows no axes: the CPU's, of rows that are
    gathered before. How weights lie changes no number."""

    def kernel(*given, outer=0, sources=None, d_sources=None, targets=None):
        at = {"multiply": [sources], "rows_gradient": [sources], "weights_gradient": [sources, d_sources]}[name]
        taken = lambda x, index: x if index is None else x.at[index].get(mode="fill")
        gathered = [jax.tree.map(lambda x, i=i: taken(x, i), x) for x, i in zip(given, at, strict=False)]
        made = getattr(blocks, name)(*gathered, *given[len(at) :])
        return made if targets is None else jnp.full_like(made, jnp.nan).at[targets].set(made)

    return kernel


@pytest.fixture
def kernels_of_gpus(monkeypatch, layout):
    """The kernels for GPUs in the place of the CPU's; which are called, and what each is told of rows to gather."""
    told = set()
    for name in ("multiply", "rows_gradient", "weights_gradient"):
        kernel = functools.partial(getattr(triton, name), interpret=True) if layout == "one" else standing_in(name)

        def called(*given, kernel=kernel, name=name, **how):
            told.add((name, *(key for key in how if key != "outer")))
            return kernel(*given, **how)

        monkeypatch.setattr(triton, name, called)
    monkeypatch.setattr(grouped, "_KERNELS", {"cpu": "triton"})
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        ("expert", "grouped"),
        ("one", "grouped"),
        ("expert, many", "gather"),
        ("expert, many", "slots"),
        ("expert", "ragged"),
        ("expert, hierarchical", "hierarchical"),
        ("tensor", "gather"),
        ("over both", "auto"),
    ],
)
def test_kernels_of_gpus_gather_their_rows(layout, way, kernels_of_gpus, monkeypatch):
    """Of the first products, and of the last one's gradients. Results, and the others' gradients, are sorted before
    they are summed for each token; rows that are exchanged are written as they arrived."""
    assert_is_the_definition(layout, way, 0.3 if "expert" in layout else 1.5, monkeypatch)
    written = ("targets",) if way in mixing.EXCHANGES else ()
    assert kernels_of_gpus == {
        ("multiply", "sources"),
        ("multiply", *written),
        ("rows_gradient", "sources"),
        ("rows_gradient", *written),
        ("weights_gradient", "sources"),
        ("weights_gradient", "d_sources"),
    }


@pytest.mark.slow
def test_gradients_may_have_room_for_more_rows(monkeypatch):
    """Which a kernel leaves as they are, as chips want it whose collectives then run beside their products."""
    made, room = blocks.weights_gradient, []

    def kernel(*given, down_to=None):
        if down_to is None:
            return made(*given)
        room.append(down_to)
        return jnp.pad(made(*given), ((0, 0), (0, down_to - given[0].shape[1]), (0, 0)), constant_values=jnp.nan)

    monkeypatch.setattr(blocks, "weights_gradient", kernel)
    monkeypatch.setattr(gradients, "scattered_tiles", lambda device_kind: 16)
    assert_is_the_definition("expert", "grouped", 1.5, monkeypatch)
    assert not room  # for weights so small, it would be many times as much
    monkeypatch.setattr(gradients, "MORE", 3.0)
    assert_is_the_definition("expert", "grouped", 1.5, monkeypatch)
    assert room and {*room} == {32}  # of four experts' shares, each of one tile across, that fill 16 tiles
    room.clear()
    assert_is_the_definition("expert, many", "ragged", 1.5, monkeypatch)  # weights are not gathered
    assert not room


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
def test_the_definition(biased):
    """Token by token, in NumPy."""
    (_, out), _ = defined(biased)
    x, router, gate, up, down = (np.asarray(a.array, np.float64) for a in arrays())
    own = [np.asarray(b.array) if biased else np.zeros(b.array.shape) for b in biases()]
    for place in np.ndindex(BATCH, POS):
        scores = x[place] @ router
        chances = np.exp(scores - scores.max())
        best = np.argsort(-chances)[:CHOICES]
        total = np.zeros(EMBED)
        for e in best:
            gated, upped = x[place] @ gate[e] + own[0][e], x[place] @ up[e] + own[1][e]
            hidden = gated / (1 + np.exp(-gated)) * upped
            if biased:
                gated, upped = np.minimum(gated, 0.5), np.clip(upped, -0.5, 0.5)
                hidden = gated / (1 + np.exp(-1.702 * gated)) * (upped + 1)
            made = hidden @ down[e] + own[2][e]
            total += chances[e] / chances[best].sum() * made
        np.testing.assert_allclose(out.array[place], total, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_dropped_choices_add_nothing():
    x, _, *experts = arrays()
    ids = named(jnp.tile(jnp.array([3, EXPERTS], jnp.int32), (BATCH, POS, 1)), "batch pos choices")
    weights = named(jnp.tile(jnp.array([0.25, 0.0]), (BATCH, POS, 1)), "batch pos choices")
    alone = named(jnp.tile(jnp.array([0.25, 0.0]), (BATCH, POS, 1)), "batch pos choices")
    other = named(jnp.tile(jnp.array([3, 4], jnp.int32), (BATCH, POS, 1)), "batch pos choices")
    wanted = mix(x, Choices(other, alone), *experts, way="dense").array
    for way in ("dense", "grouped"):
        np.testing.assert_allclose(mix(x, Choices(ids, weights), *experts, way=way).array, wanted, atol=1e-6)


@pytest.mark.slow
def test_no_buffer_of_a_weight_for_every_token():
    """The compiled program, gradients included, holds no `[tokens, embed, mlp]`, and no `[experts, tokens, mlp]`."""
    tokens, embed, mlp, experts = 512, 64, 128, 16
    shapes = ((8, tokens // 8, embed), (embed, experts), *[(experts, embed, mlp)] * 2, (experts, mlp, embed))
    names = ("batch pos embed", "embed routes", *["experts embed mlp"] * 2, "experts mlp embed")
    given = [named(jax.ShapeDtypeStruct(s, jnp.float32), n) for s, n in zip(shapes, names, strict=True)]

    def temporaries(way):
        fn = jax.grad(lambda *a: loss(dict(way=way), *a)[0], argnums=tuple(range(5)))
        return jax.jit(fn).lower(*given).compile().memory_analysis().temp_size_in_bytes

    for_every_token = 4 * tokens * embed * mlp
    by_every_expert = 4 * experts * tokens * mlp
    pairs = 4 * tokens * CHOICES * (2 * embed + 6 * mlp)  # rows in and out, and what is between
    grouped, dense = temporaries("grouped"), temporaries("dense")
    assert grouped < 1.5 * (pairs + 3 * 4 * experts * embed * mlp) < for_every_token / 2
    assert grouped < dense and dense > by_every_expert


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(5, 0, 130, 9), (0, 0, 0, 0), (144, 0, 0, 0), (1, 2, 3, 4)])
def test_grouped_products(sizes):
    """Against one product a group; groups may be empty, and rows may be left over."""
    rows, weights = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(144, 6), (4, 6, 7)]))
    total = sum(sizes)

    def by_groups(rows, weights):
        parts = np.split(np.arange(total), np.cumsum(sizes)[:-1])
        return jnp.concatenate([rows[part] @ w for part, w in zip(parts, weights, strict=True)])

    def summed(fn):
        return lambda *a: (jnp.sin(fn(*a)[:total]) * jnp.arange(1.0, 8)[None]).sum()

    ours = lambda rows, weights: grouped_matmul(rows, weights, jnp.array(sizes, jnp.int32))
    found = jax.jit(jax.value_and_grad(summed(ours), (0, 1)))(rows, weights)
    wanted = jax.jit(jax.value_and_grad(summed(by_groups), (0, 1)))(rows, weights)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_refused():
    x, *weights = arrays()
    mesh, params, compute = LAYOUTS["expert"]
    with Layout(make_mesh(jax.devices()[:4], **mesh), params, compute):
        given = (shard(x, "compute"), *shard(weights, "params"))
        with pytest.raises(ExpertsError) as error:
            jax.eval_shape(functools.partial(loss, dict(way="ragged")), *given)
    assert str(error.value) == (
        "A ragged exchange needs a backend that supports it.\n  seen:  way='ragged' on cpu\n  where: "
        "model.routing.way\n  fix:   use slots or auto here; tpu and cuda support it"
    )
    mesh, params, compute = LAYOUTS["over model"]
    with Layout(make_mesh(jax.devices()[:4], **mesh), params, compute):
        with pytest.raises(ExpertsError) as error:
            jax.eval_shape(functools.partial(loss, dict(way="slots")), shard(x, "compute"), *shard(weights, "params"))
    assert str(error.value) == (
        "Tokens can be exchanged only along mesh axes that slice both experts and tokens.\n  seen:  slots: "
        "experts/model, tokens/data\n  where: model.routing.way\n  fix:   use gather or auto, or slice the batch over "
        "these axes too"
    )


def test_tokens_that_are_on_no_mesh_are_put_there():
    x, *weights = arrays()
    mesh, params, compute = LAYOUTS["expert"]
    with Layout(make_mesh(jax.devices()[:4], **mesh), params, compute):
        _, out = jax.eval_shape(functools.partial(loss, {}), x, *weights)
    assert out.array.sharding.spec[0] == ("data", "expert")


@pytest.mark.slow
def test_a_map_over_mixtures_is_refused():
    """Whether the mesh slices what is mapped, as the layers of a pipeline, or not; one after the other it runs."""
    x, *weights = arrays()
    many = [named(jnp.stack([w.array, w.array]), ("members", *w.names)) for w in weights]
    for members in (None, "data"):
        with Layout(make_mesh(jax.devices()[:4], data=2, expert=2), {}, {"members": members, "batch": "expert"}):
            each = lambda *w: loss({}, x, *w)[1]
            with pytest.raises(ExpertsError) as error:
                jax.eval_shape(vmap(each, "members"), *many)
            assert jax.eval_shape(loop(each, "members"), *many).names == ("members", "batch", "pos", "embed")
    assert str(error.value) == (
        "A mixture of experts on a mesh cannot be mapped, either by vmap or by a fold over layers in a pipeline.\n  "
        "seen:  the way grouped\n  where: model.routing.way\n  fix:   use the dense way, or tr.map instead of vmap, "
        "or remove the layers from the layout's compute (the trainer can run mixtures in a pipeline)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout, way", [("expert, many", "slots"), ("expert, hierarchical", "hierarchical")])
def test_experts_that_all_turns_of_a_map_share_have_the_sum_of_their_gradients(layout, way):
    """Of an exchange in several rounds."""
    x, *weights = arrays()

    def total(way, x, *weights):
        each = vmap(lambda x: named(loss(dict(way=way, slack=0.5), x, *weights)[0], ()), "turns")(x)
        return each.sum().array

    several = x.with_array(jnp.concatenate([x.array, 0.5 * x.array])).split_axis("batch", {"turns": 2, "batch": BATCH})
    found = lambda way: jax.grad(functools.partial(total, way), argnums=(0, 1, 2, 3, 4))
    wanted = jax.device_get(jax.jit(found("dense"))(several, *weights))
    mesh, params, compute = LAYOUTS[layout]
    with Layout(make_mesh(jax.devices()[:4], **mesh), params, compute):
        given = shard(several, "compute"), *shard(weights, "params")
        got = jax.device_get(named_jit(found(way))(*given))
    for one, other in zip(wanted, got, strict=True):
        np.testing.assert_allclose(other.array, one.array, rtol=1e-4, atol=1e-4 * np.abs(one.array).max())


@pytest.mark.slow
@pytest.mark.parametrize("layout, way", [("one", "grouped"), ("expert, many", "slots"), ("over model", "gather")])
def test_a_second_derivative_is_refused(layout, way):
    """Of each argument alone, and where `dense` has one."""

    def slope(index, way, *given):
        part = lambda *given: loss(dict(way=way), *given)[0]
        return jax.tree.reduce(lambda total, a: total + (a**2).sum(), jax.grad(part, index)(*given), jnp.zeros(()))

    def twice(index, way, *given):
        return jax.eval_shape(jax.grad(functools.partial(slope, index, way), index), *given)

    mesh, params, compute = LAYOUTS[layout] or (dict(data=4), {}, {})
    with Layout(make_mesh(jax.devices()[:4], **mesh), params, compute):
        x, *weights = arrays()
        given = (shard(x, "compute"), *shard(weights, "params"))
        for index in range(len(given)):
            assert twice(index, "dense", *given).names == given[index].names
            with pytest.raises(ExpertsError) as error:
                twice(index, way, *given)
    assert str(error.value) == (
        "A mixture of experts can be differentiated once, by jax.grad or another of reverse mode.\n  seen:  a second "
        f"derivative, the way {way}\n  where: model.routing.way\n  fix:   use the dense way, which computes every "
        "expert for every token"
    )
