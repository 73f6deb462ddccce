"""Query heads in slices that do not fall on the groups of key heads: three heads on each device, two to a key head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import f32, nn

Q, K = "batch pos heads head_dim", "batch key_pos kv_heads head_dim"


@tr.shard_map
def manual(q: f32["batch pos heads/a head_dim"], k: f32[K], v: f32[K]) -> f32["batch pos heads/a head_dim"]:
    return nn.attend(q, k, v)


HOW = {
    "explicit": ({"heads": "a"}, nn.attend),
    "exchanged": ({"pos": "a"}, nn.attend),
    "sinks": ({"heads": "a"}, lambda q, k, v: nn.attend(q, k, v, sinks=tr.full({"heads": 6}, -1e9))),
    "manual": ({"heads": "a"}, manual),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_each_reads_its_own_key_head(how):
    compute, attend = HOW[how]
    random = np.random.default_rng(0)
    shapes = (Q, (1, 4, 6, 4)), (K, (1, 4, 3, 4)), (K, (1, 4, 3, 4))
    given = [tr.named(random.standard_normal(shape, np.float32), names) for names, shape in shapes]
    weights = random.standard_normal((1, 4, 6, 4), np.float32)

    def run(attend, *given):
        total = lambda *given: (attend(*given) * tr.named(weights, Q)).sum()
        return tr.named_jit(tr.value_and_grad(total, (0, 1, 2)))(*given)

    wanted = jax.tree.leaves(run(nn.attend, *given))
    mesh = tr.make_mesh(jax.devices()[:2], a=2)
    with tr.Layout(mesh, compute=compute, context={"a": "exchange"} if "pos" in compute else {}):
        found = jax.tree.leaves(run(attend, *given))
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(jnp.asarray(mine), theirs, rtol=1e-4, atol=1e-5)
