"""Every implementation against the reference: values and gradients, on one device and on a mesh."""

import contextlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis import nn
from trellis.mesh.meshes import make_mesh
from trellis.nn.attention import chunked as chunked_module
from trellis.nn.attention import decode_attention
from trellis.nn.attention import dot_product_attention as attention
from trellis.nn.attention.dispatch import AttentionError
from trellis.nn.attention.pattern import Pattern
from trellis.nn.attention.sharded import PlacementError

BATCH, POS, HEADS, KV_HEADS, HEAD_DIM = 4, 24, 4, 2, 8
QUERY, KEY = "batch pos heads head_dim", "batch key_pos kv_heads head_dim"
PATTERNS = list(itertools.product([True, False], [None, 5], [False, True], [None, 2.0]))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_module, "CHUNK", 8)


@pytest.fixture(scope="module")
def arrays():
    random = np.random.default_rng(0)
    shapes = ((BATCH, POS, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    ids = np.cumsum(random.random((BATCH, POS)) < 0.2, axis=1, dtype=np.int32)
    return *(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes), jnp.asarray(ids)


def value_and_gradients(q, k, v, g, **settings):
    def total(q, k, v):
        out = attention(q, k, v, **settings)
        return jnp.sum(out * g), out

    return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)


def assert_near(seen, wanted, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=tolerance, rtol=tolerance)


def by_hand(q, k, v, visible):
    """Attention in numpy loops: `visible(b, i, j)` says whether query i sees key j."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(*q.shape[:3]):
        seen = [j for j in range(k.shape[1]) if visible(b, i, j)]
        scores = np.array([q[b, i, h] @ k[b, j, h // group] for j in seen]) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights / weights.sum() @ np.stack([v[b, j, h // group] for j in seen])
    return out


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_the_masks_mean_what_they_say(arrays, implementation):
    q, k, v, _, ids = arrays
    *numbers, documents = (np.asarray(x) for x in (q, k, v, ids))

    @jax.jit
    def both(q, k, v, ids):
        near = attention(q, k, v, causal=True, window=5, segment_ids=(ids, ids), implementation=implementation)
        return near, attention(q, k, v, causal=False, window=3, implementation=implementation)

    near, both_ways = both(q, k, v, ids)
    wanted = by_hand(*numbers, lambda b, i, j: j <= i and i - j < 5 and documents[b, i] == documents[b, j])
    np.testing.assert_allclose(np.asarray(near), wanted, atol=1e-5)
    np.testing.assert_allclose(np.asarray(both_ways), by_hand(*numbers, lambda b, i, j: abs(i - j) < 3), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("causal,window,documents,cap", PATTERNS)
def test_chunks_equal_the_reference(arrays, causal, window, documents, cap):
    q, k, v, g, ids = arrays
    settings = dict(causal=causal, window=window, logit_softcap=cap, segment_ids=(ids, ids) if documents else None)
    wanted = value_and_gradients(q, k, v, g, implementation="reference", **settings)
    assert_near(value_and_gradients(q, k, v, g, implementation="chunked", **settings), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize("causal,window,documents", [(True, None, False), (True, 5, True), (False, None, False)])
def test_a_mesh_computes_what_one_device_does(arrays, implementation, causal, window, documents, copied):
    q, k, v, g, ids = arrays
    settings = dict(causal=causal, window=window, implementation=implementation)
    one = value_and_gradients(q, k, v, g, segment_ids=(ids, ids) if documents else None, **settings)
    mesh = make_mesh(data=2, context=2, model=2)
    with jax.set_mesh(mesh):
        put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
        queries, out = put(q, "data", "context", "model"), put(g, "data", "context", "model")
        keys, values = put(k, "data", None, "model"), put(v, "data", None, "model")
        pair = (put(ids, "data", "context"), put(ids, "data"))

        def total(q, k, v):
            if copied:
                spec = P("data", None, "model", None, reduced={"context"})
                k, v = jax.reshard(k, spec), jax.reshard(v, spec)
            seen = attention(q, k, v, segment_ids=pair if documents else None, **settings)
            assert jax.typeof(seen).sharding.spec == P("data", "context", "model", None)
            return jnp.sum(seen * out), seen

        many = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(queries, keys, values)
    assert_near(many, one)


@pytest.mark.slow
@pytest.mark.parametrize("model", [2, 4])
def test_whole_kv_heads_serve_sharded_heads(arrays, model):
    q, _, _, g, _ = arrays
    k, v = (jax.random.normal(jax.random.key(i), (BATCH, POS, KV_HEADS, HEAD_DIM)) for i in (7, 8))
    one = value_and_gradients(q, k, v, g, implementation="chunked")
    mesh = make_mesh(model=model, devices=jax.devices()[:model])
    with jax.set_mesh(mesh):
        heads = NamedSharding(mesh, P(None, None, "model"))
        whole = NamedSharding(mesh, P())
        many = value_and_gradients(
            *(jax.device_put(x, s) for x, s in zip((q, k, v, g), (heads, whole, whole, heads), strict=True)),
            implementation="chunked",
        )
    assert_near(many, one)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_causality_through_the_gradient(arrays, implementation):
    q, k, v, _, _ = arrays
    early = lambda k, v: jnp.sum(attention(q, k, v, implementation=implementation)[:, :11] ** 2)
    for gradient in jax.jit(jax.grad(early, (0, 1)))(k, v):
        assert np.all(np.asarray(gradient[:, 11:]) == 0)
        assert np.all(np.any(np.asarray(gradient[:, :11]) != 0, axis=(2, 3)))


@pytest.mark.slow
def test_masked_blocks_are_not_computed(arrays):
    q, k, v, *_ = arrays
    flops = lambda **s: jax.jit(lambda q, k, v: attention(q, k, v, implementation="chunked", **s)).lower(
        q, k, v).compile().cost_analysis()["flops"]  # fmt: skip
    assert flops() < 0.75 * flops(causal=False)
    assert flops(window=4) < 0.7 * flops()


@pytest.mark.slow
def test_a_traced_scale_and_a_low_precision(arrays):
    q, k, v, *_ = arrays

    @jax.jit
    def found(q, k, v, scale):
        half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
        low = [attention(*half, scale=0.25, upcast=upcast) for upcast in (True, False)]
        return attention(q, k, v, scale=scale), attention(q, k, v, scale=0.25, implementation="reference"), low

    seen, wanted, halves = found(q, k, v, jnp.float32(0.25))
    assert_near(seen, wanted)
    for low in halves:
        assert low.dtype == jnp.bfloat16
        assert_near(low.astype(jnp.float32), wanted, tolerance=0.06)


@pytest.mark.slow
def test_what_is_saved_by_name_is_not_computed_again(arrays):
    q, k, v, *_ = arrays

    def exps(save_name, **how):
        policy = jax.checkpoint_policies.save_only_these_names("attention")
        layer = jax.checkpoint(lambda q, k, v: attention(q, k, v, save_name=save_name, **how), policy=policy)
        text = str(jax.make_jaxpr(jax.grad(lambda *x: jnp.sum(layer(*x) ** 2)))(q, k, v))
        return len(re.findall(r"(?<!,1)\] = exp ", text))  # those of scores; others are one a row

    # Forward and backward once each, against the forward's a second time before the backward.
    assert exps("attention") == 2 * POS // 8
    assert exps(None) == 3 * POS // 8
    assert (exps("attention", implementation="reference"), exps(None, implementation="reference")) == (1, 2)


def test_no_exponential_of_scores_is_made_twice(arrays):
    """In a loop over microbatches either: masks taken out of it would be two, forward and backward."""
    q, k, v, g, _ = arrays

    def gradients(total, g):
        more = jax.grad(lambda q, k, v: jnp.sum(attention(q * total, k, v) * g), (0, 1, 2))(q, k, v)
        return total + sum(map(jnp.sum, more)), None

    program = jax.jit(lambda g: jax.lax.scan(gradients, 1.0, g)[0]).lower(jnp.stack([g, g])).compile().as_text()
    found = re.findall(r"f32\[\d+,\d+,\d+,(\d+)\]\S* exponential\(", program)  # others are one a row
    assert sorted(found) == ["16", "24", "8"]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 4])
def test_decoding_equals_the_last_position(arrays, window):
    q, k, v, *_ = arrays
    lengths = jnp.array([1, 7, 24, 12], jnp.int32)
    whole = attention(q, k, v, window=window, logit_softcap=3.0, implementation="reference")
    last = jnp.take_along_axis(q, lengths[:, None, None, None] - 1, axis=1)[:, 0]
    wanted = jnp.take_along_axis(whole, lengths[:, None, None, None] - 1, axis=1)[:, 0]
    assert_near(decode_attention(last, k, v, lengths, window=window, logit_softcap=3.0), wanted)


def test_a_pattern_bounds_the_keys():
    for causal, window in itertools.product([True, False], [None, 1, 3, 50]):
        pattern = Pattern(causal=causal, window=window)
        visible = pattern.visible(np.arange(20), np.arange(20))
        visible = np.ones((20, 20), bool) if visible is None else visible
        for start, stop in itertools.combinations(range(0, 21, 4), 2):
            first, last = pattern.key_range(start, stop, 20)
            assert not visible[start:stop, :first].any() and not visible[start:stop, last:].any()
            assert visible[start:stop, first].any() and visible[start:stop, last - 1].any()
            assert pattern.hides(start, stop, first, last) == (not visible[start:stop, first:last].all())


def refusal(error, call) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_refusals(arrays):
    q, k, v, _, ids = arrays
    assert refusal(AttentionError, lambda: attention(q, k, v, implementation="fast")) == (
        "the implementation of attention must be one of auto, reference, chunked, cudnn, splash, got 'fast', in "
        "attention: use one of them"
    )
    assert refusal(AttentionError, lambda: attention(q, k[:, :, :, :4], v)) == (
        "q must be 'batch pos heads head_dim', k and v 'batch key_pos kv_heads head_dim', got shapes (4, 24, 4, 8), "
        "(4, 24, 2, 4), (4, 24, 2, 8), in attention: reshape or reorder the dimensions"
    )
    assert refusal(AttentionError, lambda: attention(q[:, :, :3], k, v)) == (
        "each key head must serve the same number of query heads, got heads=3, kv_heads=2, in attention: make heads a "
        "multiple of kv_heads"
    )
    assert refusal(AttentionError, lambda: attention(q, k, v.astype(jnp.bfloat16))) == (
        "q, k and v must have the same dtype, got float32, float32, bfloat16, in attention: cast them to one"
    )
    for window in (0, 2.5, True):
        assert refusal(AttentionError, lambda window=window: attention(q, k, v, window=window)) == (
            f"a window must be a whole number of keys, from 1 on, got window={window}, in attention: use "
            "1 or more, or None"
        )
    assert refusal(AttentionError, lambda: attention(q, k, v, segment_ids=(ids, ids[:, :3]))) == (
        "segment_ids must be a pair of 'batch pos' and 'batch key_pos', got shapes ((4, 24), (4, 3)) for q (4, 24, 4, "
        "8) and k (4, 24, 2, 8), in attention: pass (query_ids, key_ids)"
    )
    assert refusal(AttentionError, lambda: attention(q, k, v, implementation="cudnn")) == (
        "an implementation must support the attention it is asked for, got 'cudnn': it takes bfloat16 and float16, "
        "not float32, in attention(implementation='cudnn'): use implementation='auto'"
    )
    assert refusal(AttentionError, lambda: attention(q, k, v, implementation="splash")) == (
        "an implementation must support the attention it is asked for, got 'splash': it takes lengths that are "
        "multiples of 128, not pos=24 and key_pos=24, in attention(implementation='splash'): use implementation='auto'"
    )


def test_kernels_are_not_where_a_compiler_slices(arrays):
    """Mesh axes in auto mode, or those that a `shard_map` leaves to the compiler."""
    mesh = make_mesh(axis_type="auto", data=2, model=4)
    why = "got 'splash': compilers cannot slice a kernel, and along mesh axes in auto mode they have to"
    q, k, v = (jnp.ones((4, 128, heads, 128), jnp.bfloat16) for heads in (4, 2, 2))
    kernel = lambda q, k, v: attention(q, k, v, implementation="splash")
    rows = jax.shard_map(kernel, mesh=mesh, axis_names={"data"}, in_specs=P("data"), out_specs=P("data"))
    with jax.set_mesh(mesh):
        assert why in refusal(AttentionError, lambda: jax.eval_shape(kernel, q, k, v))
        assert why in refusal(AttentionError, lambda: jax.eval_shape(rows, q, k, v))
        assert jax.eval_shape(attention, q, k, v).shape == q.shape
    with jax.set_mesh(make_mesh(jax.devices()[:1], axis_type="auto", data=1)):
        assert jax.eval_shape(kernel, q, k, v).shape == q.shape


def test_refused_placements(arrays):
    q, k, v, *_ = arrays
    mesh = make_mesh(data=2, context=2, model=2)
    with jax.set_mesh(mesh):
        put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
        assert refusal(PlacementError, lambda: attention(put(q, "data"), put(k, "data", "context"), v)) == (
            "keys and values must be whole along key_pos, or sliced over the mesh axes of pos or its major ones, got "
            "q float32[4@data,24,4,8], k float32[4@data,24@context,2,8], v float32[4,24,2,8], in attention: gather "
            "them first: reshard('... key_pos/x ... -> ... key_pos')"
        )
        assert refusal(PlacementError, lambda: attention(put(q, "data"), put(k, "data"), put(v))) == (
            "queries, keys and values must be sharded the same way along batch, keys and values along all dimensions, "
            "got q float32[4@data,24,4,8], k float32[4@data,24,2,8], v float32[4,24,2,8], in attention: reshard one "
            "of them"
        )
        assert refusal(PlacementError, lambda: attention(put(q, None, None, None, "data"), put(k), put(v))) == (
            "head_dim must be whole, got q float32[4,24,4,8@data], k float32[4,24,2,8], v float32[4,24,2,8], in "
            "attention: gather it first, or shard heads instead"
        )
        assert refusal(
            PlacementError, lambda: attention(put(q), put(k, None, None, "model"), put(v, None, None, "model"))
        ) == (
            "kv_heads must be sharded like heads, or over the major ones of their mesh axes, or whole, got q "
            "float32[4,24,4,8], k float32[4,24,2@model,8], v float32[4,24,2@model,8], in attention: shard kv_heads "
            "like heads, or leave them whole"
        )


def test_a_chunk_of_all_positions_adds_its_gradients_without_a_scatter():
    """XLA of JAX 0.11.2 ends the process over a scatter of everything inside of `shard_map`."""
    q, kv = jnp.ones((1, chunked_module.CHUNK, 2, 8)), jnp.ones((1, chunked_module.CHUNK, 1, 8))
    summed = lambda q, k, v: attention(q, k, v, implementation="chunked").sum()
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(summed, (0, 1, 2)))(q, kv, kv))


@pytest.mark.slow
def test_one_example_has_no_batch():
    """Alone, and mapped over a sliced batch: values and gradients are those of the batch."""
    draw = lambda n, **axes: tr.random.normal(jax.random.key(n), {"batch": 8, **axes, "head_dim": 8})
    q, k, v = draw(0, pos=4, heads=4), draw(1, key_pos=4, kv_heads=2), draw(2, key_pos=4, kv_heads=2)
    documents = tr.named(jnp.arange(32, dtype=jnp.int32).reshape(8, 4) // 3, "batch pos")
    attend = lambda q, k, v, d: nn.attend(q, k, v, segment_ids=d)
    given = q, k, v, documents
    alone, many = jax.jit(lambda *given: (attend(*(x["batch", 3] for x in given)), attend(*given)["batch", 3]))(*given)
    np.testing.assert_allclose(alone, many, rtol=1e-5, atol=1e-6)

    def gradients(fn):
        square = lambda q, k, v, d: (fn(q, k, v, d) ** 2.0).sum()
        return tr.named_jit(tr.grad(square, argnums=(0, 1, 2)))(q, k, v, documents)

    with tr.Layout(tr.make_mesh(data=8), compute={"batch": "data"}):
        for found, wanted in zip(gradients(tr.vmap(attend, "batch")), gradients(attend), strict=True):
            np.testing.assert_allclose(found.transpose(wanted.names), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_a_window_of_all_keys_hides_some_from_queries_behind_them(arrays, implementation):
    q, k, v = (np.asarray(x) for x in arrays[:3])
    k, v = k[:, :16], v[:, :16]
    for causal in (True, False):
        found = attention(q, k, v, causal=causal, window=16, implementation=implementation)
        seen = lambda b, i, j, causal=causal: abs(i - j) < 16 and (j <= i or not causal)
        np.testing.assert_allclose(found, by_hand(q, k, v, seen), atol=1e-5)


def test_a_cap_of_nothing_is_refused(arrays):
    q, k, v, *_ = arrays
    for call in (
        lambda cap: attention(q, k, v, logit_softcap=cap),
        lambda cap: decode_attention(q[:, 0], k, v, jnp.full(BATCH, 3), logit_softcap=cap),
        lambda cap: nn.linear_cross_entropy(q[:, :, 0], q[0, 0].T, q[:, :, 0, 0].astype(int), logit_softcap=cap),
    ):
        for cap in (0.0, -1.0):
            with pytest.raises(tr.NamesError, match=f"logit_softcap must be more than 0, got {cap}, in .*: pass None"):
                call(cap)


def test_refusals_of_decoding(arrays):
    q, k, v, *_ = arrays
    decode = lambda q, **options: decode_attention(q, k, v, jnp.full(BATCH, 3), **options)
    assert refusal(AttentionError, lambda: decode(q)) == (
        "q must be 'batch heads head_dim', k and v 'batch key_pos kv_heads head_dim', got shapes (4, 24, 4, 8), (4, 24"
        ", 2, 8), (4, 24, 2, 8), in decode_attention: reshape or reorder the dimensions"
    )
    assert "got heads=3, kv_heads=2, in decode_attention" in refusal(AttentionError, lambda: decode(q[:, 0, :3]))
    assert "got window=0, in decode_attention" in refusal(AttentionError, lambda: decode(q[:, 0], window=0))
    jax.jit(lambda window: decode(q[:, 0], window=window))(2)
    named = tr.named(q, "batch pos heads head_dim"), *(tr.named(x, "batch key_pos kv_heads head_dim") for x in (k, v))
    assert refusal(tr.NamesError, lambda: nn.attend_cached(*named, 3)) == (
        "attention to a cache takes one new position at a time, got q f32[batch=4 pos=24 heads=4 head_dim=8], in "
        "attend_cached: use attend for several, or keep a dimension 'pos' of size 1"
    )


def test_documents_of_queries_alone_are_refused(arrays):
    q, k, v, _, ids = arrays
    k, v = (tr.named(x[:, :8], "batch key_pos kv_heads head_dim") for x in (k, v))
    call = lambda: nn.attend(tr.named(q, "batch pos heads head_dim"), k, v, segment_ids=tr.named(ids, "batch pos"))
    assert refusal(tr.NamesError, call) == (
        "documents are those of queries and of keys, which must have the same positions, got pos=24, key_pos=8 and "
        "segment_ids i32[batch=4 pos=24], in attend: pass the ids of both to trellis.nn.dot_product_attention"
    )


def test_a_window_that_is_a_value_of_the_program_is_refused(arrays):
    call = jax.jit(lambda window: attention(*arrays[:3], window=window))
    assert "a window must be a whole number of keys" in refusal(AttentionError, lambda: call(3))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_no_sequences_have_an_empty_result(arrays, implementation):
    q, k, v, *_ = arrays
    out, gradients = jax.value_and_grad(
        lambda *given: attention(*given, implementation=implementation).sum(), argnums=(0, 1, 2)
    )(q[:0], k[:0], v[:0])
    assert out == 0 and [x.shape for x in gradients] == [x[:0].shape for x in (q, k, v)]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("axes", [None, {"batch": "data"}, {"batch": "data", "pos": "model"}], ids=str)
def test_no_queries_have_an_empty_result_and_every_query_a_key(arrays, axes):
    q, k, v = (tr.named(a, names) for a, names in zip(arrays[:3], (QUERY, KEY, KEY)))
    none = q[{"pos": slice(0, 0)}]
    layout = contextlib.nullcontext() if axes is None else tr.Layout(make_mesh(data=4, model=2), compute=axes)
    with layout:
        for keys in (k, k[{"key_pos": slice(0, 0)}]):
            if axes is not None and keys is k and "pos" in axes:
                continue  # slices have as many queries as keys
            loss = lambda *given: nn.attend(*given, causal=False).sum().array
            out, gradients = jax.value_and_grad(loss, (0, 1))(none, keys, v if keys is k else keys)
            assert out == 0 and not gradients[1].array.any() and gradients[1].shape == keys.shape
        with pytest.raises(AttentionError, match="every query must see a key, got q .* and no keys, k .* pass one key"):
            nn.attend(q, k[{"key_pos": slice(0, 0)}], v[{"key_pos": slice(0, 0)}])


def test_arrays_without_names_and_with_names_are_not_confused(arrays):
    q, k, v, *_ = arrays
    named = [tr.named(a, names) for a, names in zip(arrays[:3], (QUERY, KEY, KEY))]
    assert refusal(tr.NamesError, lambda: attention(*named)) == (
        "a function of plain arrays takes no names, got f32[batch=4 pos=24 heads=4 head_dim=8] in "
        "dot_product_attention: use attend, or pass its .array"
    )
    for call, what in [
        (lambda: nn.attend(named[0], k, named[2]), "attend"),
        (lambda: nn.attend_cached(named[0], named[1], v, 3), "attend_cached"),
    ]:
        assert "a named operation takes named arrays, got f32[4 24 2 8] in " + what in refusal(tr.NamesError, call)
    assert "in decode_attention: use attend_cached" in refusal(
        tr.NamesError, lambda: nn.decode_attention(q[:, 0], named[1], v, jnp.ones(4, jnp.int32))
    )
