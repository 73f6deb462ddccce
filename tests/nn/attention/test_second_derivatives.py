"""Second derivatives of attention whose keys are copies on several devices are those of one device."""

import jax
import numpy as np
import pytest

import trellis as tr
from trellis import nn

COPIES = {
    "keys gathered along positions": ({"pos": "a"}, False),
    "keys that are whole, with sinks": ({"heads": "a"}, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COPIES)
def test_second_derivatives_are_those_of_one_device(case):
    compute, sunk = COPIES[case]
    random = np.random.default_rng(0)
    draw = lambda names, *shape: tr.named(random.standard_normal(shape, np.float32), names)
    q = draw("batch pos heads head_dim", 1, 8, 2, 4)
    k, v = (draw("batch key_pos kv_heads head_dim", 1, 8, 1, 4) for _ in range(2))
    given = (q, k, v, draw("heads", 2)) if sunk else (q, k, v)

    def size(q, k, v, sinks=None):
        return (nn.attend(q, k, v, sinks=sinks) ** 2.0).sum()

    @tr.named_jit
    def second(*given):
        return tr.grad(lambda *given: (tr.grad(size, 1)(*given) ** 2.0).sum(), 1)(*given)

    with tr.Layout(tr.make_mesh(jax.devices()[:2], a=2), compute=compute):
        found = np.asarray(second(*given))
    np.testing.assert_allclose(found, np.asarray(second(*given)), rtol=1e-4, atol=1e-5)
