"""Rows that go to experts in eight bits: what they are, what it makes of values and gradients, and what moves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import trellis as tr
from tests.equivalence.test_models import batch
from tests.nn.moe.test_interleave import CONFIG
from trellis.data.batch import Batch
from trellis.inspect import ledger
from trellis.mesh import Layout, make_mesh
from trellis.named import named, named_jit, shard
from trellis.named.saving import only
from trellis.nn.moe import Choices, choose, dispatch, grouped, mix, narrow, score
from trellis.nn.moe.dispatch import as_sent, from_words, in_words
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.step import StepOptions, batch_loss

BATCH, POS, EMBED, MLP, EXPERTS, CHOICES = 4, 4, 64, 8, 8, 2
ONE_ROUND = 16.0  # room for all tokens, whomever they choose


def rounded(x):
    """MXFP8 by its definition: e4m3, and for each 32 numbers the least power of two that clips none of them."""
    blocks = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(np.where(largest > 0, largest, 448.0) / 448.0))
    return ((blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(
        x.shape
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_what_the_format_says(dtype):
    x = (jax.random.normal(jax.random.key(0), (5, EMBED)) * jnp.logspace(-2, 2, 5)[:, None]).astype(dtype)
    x = x.at[0, :32].set(0)
    wanted = rounded(x)
    words = in_words(x, "mxfp8")
    assert words.dtype == jnp.uint16 and words.shape == (5, (EMBED + EMBED // 32 + 14) // 2)  # filled up to 16 bytes
    assert (from_words(words, EMBED, dtype, "mxfp8") == wanted.astype(dtype)).all()
    assert (as_sent(x, "mxfp8") == wanted.astype(dtype)).all()


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_all_bits_of_a_row_arrive(dtype, tiled):
    x = jax.random.normal(jax.random.key(0), (5, 9)).astype(dtype).at[0, 0].set(jnp.inf)
    assert (from_words(in_words(x, "bits", tiled=tiled), 9, dtype, "bits") == x).all()


@pytest.mark.slow
def test_a_number_that_is_none_stays_in_its_block():
    x = jnp.ones((2, EMBED)).at[0, 40].set(jnp.inf).at[1, 3].set(jnp.nan)
    found = np.isnan(from_words(in_words(x, "mxfp8"), EMBED, jnp.float32, "mxfp8"))
    assert found.tolist() == [[False] * 32 + [True] * 32, [True] * 32 + [False] * 32]


@pytest.mark.parametrize(
    ("platform", "embed", "shape"),
    [("tpu", 7168, (2, 1920)), ("tpu", 4096, (2, 1152)), ("cuda", 7168, (1, 3696)), ("cuda", 2880, (1, 1488))],
)
def test_rows_fill_what_a_platform_moves_at_once(platform, embed, shape, monkeypatch):
    monkeypatch.setattr(dispatch, "platform_of", lambda array: platform)
    words = jax.eval_shape(lambda x: in_words(x, "mxfp8", tiled=True), jax.ShapeDtypeStruct((3, embed), jnp.bfloat16))
    assert words.shape == (3, *shape)


def test_what_stays_is_rounded_where_compilers_keep_more_than_is_asked_for():
    """A conversion to eight bits and back is none to XLA's GPU compiler: the numbers are rounded before it."""
    given = (jnp.ones((4, EMBED)), jnp.full(2, 2, jnp.int32))
    for function in (
        lambda x, sizes: as_sent(x, "mxfp8"),
        lambda x, sizes: narrow._rounded_rows(x, sizes, "fp8", gradient=True),
    ):
        assert " round[" in str(jax.make_jaxpr(function)(*given))


def arrays():
    random = np.random.default_rng(0)
    sizes = {"batch": BATCH, "pos": POS, "embed": EMBED, "mlp": MLP, "experts": EXPERTS, "routes": EXPERTS}
    draw = lambda names: named(
        jnp.asarray(random.normal(0, 1 / 3, [sizes[n] for n in names.split()]), jnp.float32), names
    )
    names = ("batch pos embed", "embed routes", "experts embed mlp", "experts embed mlp", "experts mlp embed")
    return [draw(each) for each in names]


@pytest.mark.slow
def test_rows_are_rounded_and_gradients_of_what_is_made_of_them():
    """By two calls of the whole: of rounded tokens, and backward of a rounded gradient."""
    x, router, *weights = arrays()
    choices = jax.jit(lambda x, router: choose(score(x, router), CHOICES))(x, router)
    d = np.random.default_rng(1).normal(size=x.array.shape).astype(np.float32)

    @functools.partial(jax.jit, static_argnames="dispatch")
    def made(d, x, counts, *weights, dispatch=None):
        how = dict(way="grouped", dispatch=dispatch)
        run = lambda x, counts, *weights: mix(x, Choices(choices.ids, counts), *weights, **how).array
        out, pull = jax.vjp(run, x, counts, *weights)
        return out, pull(d)

    as_float32 = lambda x: jnp.asarray(rounded(x), jnp.float32)
    wanted, whole = made(as_float32(d), x.with_array(as_float32(x.array)), choices.weights, *weights)
    found, rounding = made(d, x, choices.weights, *weights, dispatch="mxfp8")
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert not np.allclose(found, made(d, x, choices.weights, *weights)[0], rtol=1e-4)
    for a, b in zip(jax.tree.leaves(rounding), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "sizes", "there"),
    [
        ("slots", dict(expert=4), "all-to-all"),
        ("hierarchical", dict(expert_y=2, expert=2), "all-to-all"),
        ("gather", dict(expert=4), "all-gather"),
    ],
)
def test_what_goes_there_takes_a_quarter_of_float32(way, sizes, there):
    """Forward tokens, backward gradients; what comes back, and the gradients of tokens, are as wide as before."""
    over, words = tuple(sizes), (EMBED + EMBED // 32 + 14) // 16 * 16
    with Layout(make_mesh(jax.devices()[:4], **sizes), {"experts": over}, {"experts": over, "batch": over}):
        x, *weights = shard(arrays(), "compute")

        def moved(how):
            def loss(x, router, *weights):
                choices = choose(score(x, router), CHOICES)
                return mix(x, choices, *weights, way=way, slack=ONE_ROUND, dispatch=how).sum().array

            rows = ledger(named_jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4))), x, *weights).rows
            row = (f" {EMBED}", f" {words // 2}")
            return [r for r in rows if r.times == 1 and not r.note and r.what.endswith(row)]

        wide, narrower = moved(None), moved("mxfp8")
    assert len(wide) == len(narrower) and {r.dtype for r in wide} == {"f32"}
    of = lambda kind: [(a.wire, b.wire) for a, b in zip(wide, narrower, strict=True) if b.dtype == kind]
    for whole, wire in of("u16"):
        assert wire * 4 * EMBED == whole * words
    assert all(whole == wire for whole, wire in of("f32"))
    assert len(of("u16")) == len(wide) / 2 and {r.kind for r in narrower if r.dtype == "u16"} == {there}
    assert {r.direction for r in narrower if r.dtype == "u16"} == {"forward", "backward"}


@pytest.mark.slow
def test_blocks_that_are_cut_are_refused():
    with Layout(make_mesh(jax.devices()[:4], model=4), {}, {"embed": "model"}):
        x, *weights = shard(arrays(), "compute")
        with pytest.raises(tr.NamesError, match="numbers that share a scale must be on one device, got 4 slices"):
            mix(x, choose(score(x, weights[0]), CHOICES), *weights[1:], way="dense", dispatch="mxfp8")


def exchanged_again(dispatch, slack, *keep):
    """Over which axes rows travel once more in the backward pass of a layer, and in which type."""
    routing = dataclasses.replace(CONFIG.routing, way="hierarchical", dispatch=dispatch, slack=slack)
    config = dataclasses.replace(CONFIG, routing=routing, embed=64, layers=2)
    with make_layout(MeshSizes(data=1, expert=2, expert_y=2), LayoutChoice(preset="fsdp"), jax.devices()[:4]):
        model = jax.eval_shape(lambda: shard(config.init(key=jax.random.key(0), vocab_multiple=8), "params"))
        given = shard(Batch(**batch()).named(), "compute")
        options = StepOptions(policy=only("attention", *keep))
        loss = lambda model: batch_loss(model, given, options)[0].total
        rows = ledger(jax.grad(loss), model).rows
    again = (r for r in rows if r.kind == "all-to-all" and r.direction == "recomputed" and not r.note)
    return sorted((r.axis, r.dtype) for r in again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dispatch", "slack", "platform"),
    [(None, ONE_ROUND, "cpu"), ("mxfp8", ONE_ROUND, "cpu"), ("mxfp8", 1.5, "cpu")]
    + [(None, ONE_ROUND, "cuda"), ("mxfp8", ONE_ROUND, "cuda")],
)
def test_rows_that_are_kept_do_not_travel_again(dispatch, slack, platform, monkeypatch):
    """In eight bits what is kept of them is what travelled; where kernels gather rows, what they gather them from."""
    monkeypatch.setattr(grouped, "platform_of", lambda a: platform)
    kind = "u16" if dispatch else "f32"
    if slack == ONE_ROUND:
        assert exchanged_again(dispatch, slack) == [("expert", kind), ("expert_y", kind)]
        assert exchanged_again(dispatch, slack, "mlp_rows") == []
    assert exchanged_again(dispatch, slack, "far_rows") == [("expert", kind)]
