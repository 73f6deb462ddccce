"""Attention with sinks, and with values of a width of their own: every kind equals the formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.nn.attention.test_sliced import KEY, QUERY
from trellis._compat import cudnn_assumed
from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.mesh import Layout, make_mesh
from trellis.named import named
from trellis.nn.attention import AttentionError, attend, attend_cached, decode_attention, dot_product_attention
from trellis.nn.attention.pattern import Pattern
from trellis.nn.attention.sharded import placement_of
from trellis.nn.attention.sliced.attention import tiled_attention
from trellis.nn.attention.sliced.whole import Whole
from trellis.nn.attention.splash import SplashTiles

BATCH, POS, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 32, 4, 2, 8, 4
KINDS = {
    "heads": ({"data": 2, "model": 4}, {"batch": "data", "heads": "model"}, {}),
    "ring": ({"data": 2, "a": 2, "model": 2}, {"batch": "data", "heads": "model", "kv_heads": "model", "pos": "a"}, {}),
    "gather": ({"a": 4}, {"pos": "a"}, {}),
    "exchange": ({"data": 2, "a": 2}, {"batch": "data", "pos": "a"}, {"a": "exchange"}),
    "ring, exchange": ({"a": 4, "b": 2}, {"pos": ("a", "b")}, {"a": "ring", "b": "exchange"}),
}
KINDS["ring"][2]["a"] = "ring"


@functools.cache
def arrays():
    """Queries, keys, values, sinks, a gradient, and documents."""
    shapes = [(BATCH, POS, HEADS, HEAD_DIM), (BATCH, POS, KV_HEADS, HEAD_DIM), (BATCH, POS, KV_HEADS, VALUE_DIM)]
    shapes += [(HEADS,), (BATCH, POS, HEADS, VALUE_DIM)]
    found = [np.asarray(jax.random.normal(jax.random.key(i), shape)) for i, shape in enumerate(shapes)]
    return *found, np.repeat([[0, 1]], [11, 21], axis=1).repeat(BATCH, 0)


def formula(q, k, v, sinks, window=None, documents=None):
    """With a key of score `sinks` and value zero after the others."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, 2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * HEAD_DIM**-0.5
    seen = Pattern(window=window).visible(np.arange(POS), np.arange(POS))
    if documents is not None:
        seen = seen[None, None] & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = jnp.where(jnp.reshape(seen, (-1, 1, POS, POS)), scores, -jnp.inf)
    own = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, own], -1), -1)[..., :-1]
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def gradients(function, q, k, v, sinks, g):
    def total(*inputs):
        out = function(*inputs)
        return jnp.sum(out * g), out

    return jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))(q, k, v, sinks)


@functools.cache
def wanted(window, documents):
    *inputs, g, ids = arrays()
    return gradients(functools.partial(formula, window=window, documents=ids if documents else None), *inputs, g)


def assert_near(seen, right, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize("window", [None, 5])
def test_one_device(implementation, window):
    *inputs, g, ids = arrays()

    def call(q, k, v, sinks):
        options = dict(segment_ids=(ids, ids), window=window, implementation=implementation)
        return dot_product_attention(q, k, v, sinks=sinks, **options)

    assert_near(gradients(call, *inputs, g), wanted(window, True))


@pytest.mark.slow
def test_forward_mode():
    *inputs, _, _ = arrays()
    changes = [np.cos(x) for x in inputs]
    found = jax.jvp(lambda q, k, v, sinks: dot_product_attention(q, k, v, sinks=sinks), inputs, changes)
    assert_near(found, jax.jvp(formula, inputs, changes))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("kind, window", [(kind, window) for window in (5, None) for kind in KINDS])
def test_many_devices(kind, window):
    sizes, compute, context = KINDS[kind]
    mesh = make_mesh(jax.devices()[: np.prod(list(sizes.values()))], **sizes)
    *inputs, g, ids = arrays()
    right = wanted(window, True)
    with (layout := Layout(mesh, {}, compute, context=context)):
        place = lambda x, names: jax.device_put(x, layout.sharding(names.split()))
        rows, values = "batch pos kv_heads head_dim", "batch pos heads value_dim"
        q, k, v, sinks, g = map(place, (*inputs, g), (QUERY, rows, rows, "heads", values))
        documents = named(place(ids, "batch pos"), "batch pos")

        def call(q, k, v, sinks):
            q, k, v = named(q, QUERY), named(k, KEY), named(v, KEY.replace("head_dim", "value_dim"))
            return attend(q, k, v, segment_ids=documents, sinks=named(sinks, "heads"), window=window).array

        assert_near(gradients(call, q, k, v, sinks, g), right)


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation, sliced", [("reference", "rows"), ("chunked", "rows"), ("chunked", "positions")]
)
@pytest.mark.parametrize("held", ["queries", "keys", "sinks"])
def test_copies_along_axes_that_slice_nothing_else(held, implementation, sliced):
    """Their gradient is whole on each device: none of its parts is counted once a device."""
    mesh = make_mesh(jax.devices()[:4], x=2, y=2)
    *inputs, g, _ = arrays()
    axes = ("x",) if sliced == "rows" else (None, "x")
    with jax.set_mesh(mesh):
        *inputs, g = (jax.device_put(x, P(*axes) if x.ndim > 1 else P()) for x in (*inputs, g))
        spec = P(*axes, reduced={"y"})
        copied = {"queries": (spec, None, None, None), "keys": (None, spec, spec, None)}.get(held)
        copied = copied or (None, None, None, P(None, reduced={"x", "y"}))

        def call(*inputs):
            q, k, v, sinks = (x if s is None else jax.reshard(x, s) for x, s in zip(inputs, copied, strict=True))
            return dot_product_attention(q, k, v, sinks=sinks, implementation=implementation)

        assert_near(gradients(call, *inputs, g), wanted(None, False))


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 5])
def test_decoding_equals_the_last_position(window):
    q, k, v, sinks, _, _ = arrays()
    found = decode_attention(q[:, -1], k, v, jnp.full(BATCH, POS), window=window, sinks=sinks)
    assert_near(found, formula(q, k, v, sinks, window)[:, -1])


@pytest.mark.slow
def test_sinks_and_lengths_that_are_on_no_mesh():
    """As any array from outside, also where a program closes over them."""
    names = ["batch pos heads head_dim", "batch key_pos kv_heads head_dim", "batch key_pos kv_heads value_dim", "heads"]
    q, k, v, sinks = map(named, arrays(), names)
    length = named(np.int32(POS), "")

    @jax.jit
    def both(q, k, v):
        last = attend_cached(q["pos", POS - 1 :], k, v, length, sinks=sinks)
        return attend(q, k, v, sinks=sinks).array, last.array[:, 0]

    wanted = formula(*arrays()[:4])
    with Layout(make_mesh(data=2, model=4), compute={"batch": "data", "heads": "model"}):
        everywhere, last = both(q, k, v)
    np.testing.assert_allclose(everywhere, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(last, wanted[:, -1], rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_splash_computes_the_formula():
    """Queries of 192 with values of 128, in Pallas's interpreter."""
    shapes = (1, 256, 2, 192), (1, 256, 1, 192), (1, 256, 1, 128), (2,), (1, 256, 2, 128)
    *inputs, g = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    program = Whole(SplashTiles(scale=192**-0.5, interpret=True), Pattern())
    splash = lambda q, k, v, sinks: tiled_attention(placement_of(q, k, v), program, q, k, v, None, sinks)
    reference = lambda q, k, v, sinks: dot_product_attention(q, k, v, sinks=sinks, implementation="reference")
    assert_near(gradients(splash, *inputs, g), gradients(reference, *inputs, g), 1e-4)


@pytest.mark.parametrize(
    ("gpu", "sunk", "widths", "runs"),
    [
        ("H100", True, (64, 64), True),
        ("H100", False, (192, 128), True),
        ("B200", False, (192, 128), True),
        ("A100", False, (192, 128), False),
        ("H200", False, (256, 256), True),  # Gemma's, for which there are kernels on Hopper alone
        ("A100", False, (256, 256), False),
        ("B200", False, (256, 256), False),
        ("H100", False, (264, 264), False),
    ],
)
def test_gpus_run_cudnn_where_it_has_kernels(gpu, sunk, widths, runs):
    mesh = make_mesh(described_devices(target(f"4x{gpu}")), data=2, model=2)

    def struct(heads, width):
        spec = NamedSharding(mesh, P("data", None, "model"))
        return jax.ShapeDtypeStruct((8, 1024, heads, width), jnp.bfloat16, sharding=spec)

    sinks = jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=NamedSharding(mesh, P("model")))

    def total(q, k, v, sinks):
        return jnp.sum(dot_product_attention(q, k, v, sinks=sinks if sunk else None).astype(jnp.float32) ** 2)

    shapes = struct(8, widths[0]), struct(8, widths[0]), struct(8, widths[1])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), cudnn_assumed():
        text = str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(*shapes, sinks))
    assert f"bf16[4,1024,4,{widths[1]}]" in text  # a device's part
    for way in ("fwd", "bwd"):
        assert text.count(f"= dot_product_attention_{way}_wrapper[") == runs


def test_refusals():
    q, k, v, sinks, _, _ = arrays()
    with pytest.raises(AttentionError, match=r"sinks must be one score per head, got shape \(2,\) for heads=4"):
        dot_product_attention(q, k, v, sinks=sinks[:2])
