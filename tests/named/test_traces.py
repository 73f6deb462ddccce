"""The layout is part of what JAX keys its traces by: no transformation serves a trace of another layout."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import nn
from trellis.named import NamesError
from trellis.named.saving import layer_written_out


def _product(w, x):
    return tr.dot(x, w, over="e").sum()


INNER = jax.jit(_product)
CHECKPOINTED, NAMED = jax.checkpoint(_product), tr.checkpoint(_product, tr.Keep())
WAYS = {
    "as it is": _product,
    "jit": INNER,
    "inner jit": lambda w, x: INNER(w, x),
    "named_jit": tr.named_jit(INNER),
    "jax.checkpoint": lambda w, x: CHECKPOINTED(w, x),
    "checkpoint": lambda w, x: NAMED(w, x),
    "cond": lambda w, x: jax.lax.cond(True, _product, _product, w, x),
    "scan": lambda w, x: jax.lax.scan(lambda c, _: (c, _product(w, x).array), 0, None, length=1)[1][0],
    "custom_vjp": None,
}


@jax.custom_vjp
def _own(w, x):
    return _product(w, x)


_own.defvjp(lambda w, x: (_product(w, x), (w, x)), lambda kept, g: jax.vjp(_product, *kept)[1](g))
WAYS["custom_vjp"] = lambda w, x: _own(w, x)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("way", WAYS)
def test_a_second_layout_is_traced_anew(way):
    mesh, seen = tr.make_mesh(data=4, model=2), []
    for compute in ({"b": "data"}, {"e": "model"}, {}, {"b": "data"}):
        with tr.Layout(mesh, compute=compute):
            w, x = tr.shard((tr.ones({"e": 16, "o": 8}), tr.ones({"b": 8, "e": 16})), {})
            seen.append(tr.ledger(WAYS[way], w, x).per_axis())
            np.testing.assert_array_equal(np.asarray(WAYS[way](w, x)).ravel(), [1024])
    assert seen[0].keys() == {"data"} and seen[1].keys() == {"model"} and not seen[2]
    assert seen[3] == seen[0]


def test_what_is_kept_on_the_host_and_what_is_fenced_is_traced_anew():
    marked = jax.jit(lambda x: tr.save(jnp.sin(x), "h"))
    part = jax.jit(lambda x: tr.checkpoint(marked, tr.Keep())(x))
    for keep, fences in ((tr.Keep(names=("h",)), 0), (tr.Keep(offload=("h",)), 1), (tr.Keep(names=("h",)), 0)):
        text = str(jax.make_jaxpr(tr.checkpoint(lambda x: marked(x).sum(), keep))(jnp.ones(4)))
        assert text.count("optimization_barrier") == fences
    for fenced in (False, True, False):
        with layer_written_out(fenced):
            assert f"prevent_cse={fenced}" in str(jax.make_jaxpr(lambda x: part(x))(jnp.ones(4)))


def test_strict_is_seen():
    mesh = tr.make_mesh(data=8)
    sort = jax.jit(lambda x: tr.sort(x, "b"))
    for strict in (False, True):
        with tr.Layout(mesh, compute={"b": "data"}, strict=strict):
            x = tr.shard(tr.arange(tr.Axis("b", 8)), "compute")
            if not strict:
                np.testing.assert_array_equal(sort(x), np.arange(8))
                continue
            with pytest.raises(NamesError, match="under a strict layout"):
                sort(x)


def test_one_layout_is_traced_once():
    count = []

    @jax.jit
    def f(x):
        count.append(1)
        return x + 1

    layout = tr.Layout(tr.make_mesh(data=8), compute={"b": "data"})
    for _ in range(3):
        with layout:
            f(tr.shard(tr.ones({"b": 8}), "compute"))
    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}):  # an equal one
        f(tr.shard(tr.ones({"b": 8}), "compute"))
    assert len(count) == 1


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("pos", ["", "data"], ids=["whole", "sliced"])
def test_a_gradient_traces_no_derivative_that_only_forward_mode_reads(pos, monkeypatch):
    module = importlib.import_module(f"trellis.nn.attention.{'sliced.attention' if pos else 'chunked'}")
    change, traced = module._attend_change, []
    monkeypatch.setattr(module, "_attend_change", lambda *given: traced.append(1) or change(*given))
    layout = tr.Layout(tr.make_mesh(jax.devices()[:4], data=4), compute={"pos": pos, "key_pos": pos} if pos else {})
    with layout:
        q = tr.ones({"batch": 1, "pos": 8, "heads": 2, "head_dim": 4})
        q, k = tr.shard((q, q.rename({"pos": "key_pos", "heads": "kv_heads"})), "compute")
        run = lambda q: nn.attend(q, k, k).sum().array
        jax.make_jaxpr(jax.grad(run))(q)
        assert not traced
        jax.make_jaxpr(lambda q: jax.jvp(run, (q,), (q,))[1])(q)
        jax.jit(lambda q: jax.jvp(run, (q,), (q,))[1]).lower(q)
        assert traced


def test_an_operation_asks_a_traced_value_nothing_that_jax_explains(monkeypatch):
    """It names the equations that a value was made of, in time that grows with all that were traced before."""
    explained = []

    def run(x):
        monkeypatch.setattr(type(x.array), "_origin_msg", lambda _: explained.append(1) or "")
        return (x * 2 + tr.exp(x)).sum("b")

    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}):
        jax.make_jaxpr(run)(tr.shard(tr.ones({"b": 8}), "compute"))
    assert not explained


def test_threads_have_layouts_of_their_own():
    import threading

    from trellis.mesh.layout import current_layout

    seen = []
    with tr.Layout(tr.make_mesh(data=8)):
        thread = threading.Thread(target=lambda: seen.append(current_layout()))
        thread.start()
        thread.join()
    assert seen == [None] and jnp.ones(2).sum() == 2
