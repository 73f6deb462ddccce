"""How much memory an execution takes is known before it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis import UserError
from trellis.mesh import make_mesh
from trellis.proof import proof
from trellis.proof.interpreter import Interpreter, most_bytes

TEXT = """HloModule m, num_partitions=4
body (s: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  s = (s32[], f32[1024]) parameter(0)
  n = s32[] get-tuple-element(%s), index=0
  x = f32[1024] get-tuple-element(%s), index=1
  one = s32[] constant(1)
  next = s32[] add(%n, %one)
  a = f32[1024] sine(%x)
  b = f32[1024] cosine(%a)
  ROOT out = (s32[], f32[1024]) tuple(%next, %b)
}
going (s: (s32[], f32[1024])) -> pred[] {
  s = (s32[], f32[1024]) parameter(0)
  n = s32[] get-tuple-element(%s), index=0
  three = s32[] constant(3)
  ROOT less = pred[] compare(%n, %three), direction=LT
}
ENTRY main () -> f32[1024] {
  x = f32[1024] parameter(0)
  zero = s32[] constant(0)
  first = f32[1024] negate(%x)
  s = (s32[], f32[1024]) tuple(%zero, %first)
  w = (s32[], f32[1024]) while(%s), condition=%going, body=%body
  ROOT last = f32[1024] get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize("rows", [1, 4])
def test_values_that_are_alive_at_a_time(rows):
    """In a turn of the loop: what it began with, two values, and a copy of the second while it is made."""
    array = 4096 * rows
    found = most_bytes(Interpreter(TEXT), [jnp.zeros((rows, 1024))])
    assert 4 * array <= found <= 4 * array + 100


def test_what_does_not_fit_is_refused(monkeypatch):
    mesh = make_mesh(jax.devices()[:4], x=4)
    x = jax.device_put(jnp.ones((8, 256)), NamedSharding(mesh, P("x")))
    monkeypatch.setattr(proof, "free_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"must fit in this machine's memory(.|\n)*0\.0 GiB free"):
        tr.prove(lambda x: jnp.sin(x).sum(), x, on="v5e:2x2")
