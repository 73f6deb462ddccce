"""The factor of scores may be a value of the program, such as a learned temperature, with names or without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import nn
from trellis.mesh import make_mesh
from trellis.nn.attention import decode_attention, dot_product_attention

SCALE = tr.named(jnp.float32(0.3), "")


def arrays():
    q = tr.random.normal(jax.random.key(0), {"batch": 4, "pos": 8, "heads": 2, "head_dim": 4})
    return q, q.rename(pos="key_pos", heads="kv_heads")


def test_a_named_scale_is_a_parameter():
    q, k = arrays()

    def loss(scale):
        last = nn.attend_cached(q["pos", 7:], k, k, 8, scale=scale)
        return (nn.attend(q, k, k, scale=scale) ** 2).sum() + (last**2).sum()

    def plain(scale):
        out = dot_product_attention(q.array, k.array, k.array, scale=scale)
        last = decode_attention(q.array[:, 7], k.array, k.array, jnp.full(4, 8), scale=scale)
        return (out**2).sum() + (last**2).sum()

    wanted = jax.value_and_grad(plain)(SCALE.array)
    found = tr.named_jit(tr.value_and_grad(loss))(SCALE)
    np.testing.assert_allclose([x.array for x in found], wanted, rtol=1e-5)
    with tr.Layout(make_mesh(data=4, model=2), compute={"batch": "data", "heads": "model", "kv_heads": "model"}):
        sliced = tr.named_jit(tr.value_and_grad(loss))(SCALE)
        np.testing.assert_allclose([np.asarray(x) for x in sliced], wanted, rtol=1e-5)


def test_a_scale_of_several_numbers_is_refused():
    """Plain, it would meet the width of the heads, whatever it was meant for."""
    q, k = arrays()
    with pytest.raises(tr.NamesError, match=r"attend takes single numbers, got scale=f32\[heads=2\].*multiply"):
        nn.attend(q, k, k, scale=tr.ones({"heads": 2}))
    with pytest.raises(tr.NamesError, match="dot_product_attention takes single numbers, got scale="):
        dot_product_attention(q.array, k.array, k.array, scale=jnp.ones(4))
    with pytest.raises(tr.NamesError, match="takes single numbers, got scale="):
        decode_attention(q.array[:, 7], k.array, k.array, jnp.full(4, 8), scale=jnp.ones(4))
