"""27: XLA's CPU compiler reads rows of an array that it has already written over."""

import jax
import jax.numpy as jnp
import numpy as np

import trellis as tr
from trellis._compat import full_text
from trellis.proof.interpreter import Interpreter


def shifted(x):  # "1 pos embed" -> "pos embed": each row becomes the one before, the first stays
    return x[0].at[1:].set(x[0][:-1])


def test_rows_that_move_down_in_their_own_array():
    x = np.arange(12, dtype=np.float32).reshape(1, 4, 3)
    right, first = x[0][[0, 0, 1, 2]], x[0][[0, 0, 0, 0]]
    compiled = jax.jit(shifted).lower(x).compile()
    assert np.array_equal(compiled(x), first), "XLA has mended it: say since when on the page"
    assert np.array_equal(Interpreter(full_text(compiled))([x[None]])[0][0], right), "what the program says is right"
    assert np.array_equal(jax.jit(lambda x: shifted(x[None]))(x[0]), right), "without the first dimension"
    joined = lambda x: jnp.concatenate([x[0][:1], x[0][:-1]])
    assert np.array_equal(jax.jit(joined)(x), right)


def test_with_names():
    x = tr.named(np.arange(12, dtype=np.float32).reshape(1, 4, 3), ("part", "pos", "embed"))

    def joined(x):
        rows = x["part", 0]
        return tr.concatenate([rows["pos", :1], rows["pos", :-1]], "pos")

    assert np.array_equal(jax.jit(joined)(x).array, np.asarray(x.array)[0][[0, 0, 1, 2]])
