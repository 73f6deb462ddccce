"""Forward mode of attention, the gate of SwiGLU and the loss, which have gradients of their own: in slices, too."""

import jax
import numpy as np
import pytest

import trellis as tr
from trellis import nn

SIZES = {"batch": 4, "pos": 16, "key_pos": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "embed": 8, "vocab": 16}


def drawn(names: str, seed: int) -> tr.NamedArray:
    shape = [SIZES[n] for n in names.split()]
    return tr.named(np.random.default_rng(seed).normal(size=shape).astype(np.float32), names)


KEYS = "batch key_pos kv_heads head_dim"
TARGETS = tr.named(np.random.default_rng(9).integers(0, 16, (4, 16)).astype(np.int32), "batch pos")
ATTENTION = lambda q, k, v: (tr.tanh(nn.attend(q, k, v)) * 2).sum().array
GATE = lambda gate, up: tr.tanh(nn.swiglu(gate, up)).sum().array
LOSS = lambda hidden, table: nn.next_token_loss(hidden, table, TARGETS, z_loss=0.1).total
CASES = {
    "attention": (ATTENTION, ("batch pos heads head_dim", KEYS, KEYS), {"batch": "data", "heads": "model"}),
    "gather": (ATTENTION, ("batch pos heads head_dim", KEYS, KEYS), {"batch": "data", "pos": "model"}),
    "ring": (ATTENTION, ("batch pos heads head_dim", KEYS, KEYS), {"batch": "data", "pos": "model"}),
    "exchange": (ATTENTION, ("batch pos heads head_dim", KEYS, KEYS), {"batch": "data", "pos": "model"}),
    "gate": (GATE, ("batch embed", "batch embed"), {"batch": "data", "embed": "model"}),
    "loss": (LOSS, ("batch pos embed", "vocab embed"), {"batch": "data", "pos": "model"}),
    "loss in chunks": (LOSS, ("batch pos embed", "vocab embed"), {"pos": "data"}),
    "loss of a sliced vocabulary": (LOSS, ("batch pos embed", "vocab embed"), {"batch": "data", "vocab": "model"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_forward_mode_agrees_with_reverse_mode(case):
    function, names, compute = CASES[case]
    values = [drawn(n, i) for i, n in enumerate(names)]
    tangents = [jax.tree.map(np.cos, x) for x in values]
    every = tuple(range(len(values)))
    wanted = jax.jit(jax.grad(function, every))(*values)
    along = sum(float((np.asarray(g) * np.asarray(t)).sum()) for g, t in zip(wanted, tangents, strict=True))
    again = jax.jit(lambda *a: jax.jvp(jax.grad(function), a[:2], a[2:])[1])
    one_more = lambda args, moves: again(*args[:2], *moves[:2]) if len(args) == 2 else None
    second = one_more(values, tangents)

    context = case if case in ("ring", "exchange") else "gather"
    with tr.Layout(tr.make_mesh(jax.devices()[:4], data=2, model=2), compute=compute, context={"model": context}):
        args, moves = tr.shard((tuple(values), tuple(tangents)), "compute")
        change = jax.jit(lambda args, moves: jax.jvp(function, args, moves)[1])(args, moves)
        np.testing.assert_allclose(change, along, rtol=1e-4)
        linear = lambda args, moves: jax.linearize(function, *args)[1](*moves)
        linear = linear if case == "gate" else jax.jit(linear)  # without it, hundreds of programs of one operation
        np.testing.assert_allclose(linear(args, moves), along, rtol=1e-4)
        if second is not None:
            np.testing.assert_allclose(one_more(args, moves), second, rtol=1e-3, atol=1e-4)
