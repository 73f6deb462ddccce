"""Attention over positions that are dealt out, by name: in other slices than those, or whole."""

import jax
import numpy as np
import pytest

import trellis as tr
from trellis import nn
from trellis.named import NamesError, is_named

OF_KEYS = "batch pos kv_heads head_dim"
NAMES = ("batch pos heads head_dim", OF_KEYS, OF_KEYS, "batch pos")
DEALT = {
    "by heads": ({"heads": "a/b", "kv_heads": "a/b", "pos": "a/b"}, ("a", "b")),
    "by heads, beside whole key heads": ({"heads": "a/b", "pos": "a/b"}, ("a", "b")),
    "by batch": ({"batch": "a", "pos": "a"}, ("a",)),
    "whole": ({}, ("a",)),
    "an axis of one": ({"pos": "a"}, ("c", "a")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DEALT)
@pytest.mark.parametrize("kind", ["ring", "gather", "exchange"])
def test_positions_that_are_dealt_out_and_not_in_slices_are_seen_in_their_order(case, kind):
    compute, dealt = DEALT[case]
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 16, 4, 8), np.float32) for _ in range(3))
    ids = np.sort(random.integers(0, 3, (2, 16)), 1).astype(np.int32)
    by_name = lambda q, k, v, ids: nn.attend(
        q, k.rename(pos="key_pos"), v.rename(pos="key_pos"), segment_ids=ids, window=7
    )
    both = lambda *a: (by_name(*a), tr.grad(lambda *a: (by_name(*a) ** 2).sum())(*a))

    def made():
        given = [tr.from_numpy(x, n) for x, n in zip((q, k, v, ids), NAMES)]
        return [np.asarray(x) for x in jax.tree.leaves(tr.named_jit(both)(*given), is_leaf=is_named)]

    with tr.Layout(tr.make_mesh(jax.devices()[:4], a=2, b=2, c=1), compute=compute, context={"a": kind}, dealt=dealt):
        found = made()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, made())


@pytest.mark.parametrize("pos, dealt", [("a/b", ("a",)), ("b", ("a",)), ("a/b", ("b", "a"))])
def test_positions_in_other_slices_than_they_are_dealt_out_over_are_refused(pos, dealt):
    mesh = tr.make_mesh(jax.devices()[:4], a=2, b=2)
    with tr.Layout(mesh, compute={"pos": pos}, dealt=dealt):
        x = tr.ones({"batch": 1, "pos": 16, "heads": 2, "head_dim": 4})
        keys = x.rename(pos="key_pos", heads="kv_heads")
        tr.named_jit(lambda x, y: nn.attend(x, y, y, causal=False))(x, keys)
        with pytest.raises(NamesError, match=r"in the slices over which they are dealt out, or whole, got 'pos/"):
            tr.named_jit(lambda x, y: nn.attend(x, y, y))(x, keys)
