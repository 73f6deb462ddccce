"""The plain JAX step of `plain_jax.py`, in a process with JAX's defaults."""

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
start = time.perf_counter()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
from plain_jax import SHAPES, make_step  # noqa: E402
from serve import arguments, serve  # noqa: E402

imported = time.perf_counter() - start

name, dtype = arguments()
shape = SHAPES[name]
state, train = make_step(shape, jnp.dtype(dtype))
tokens = jax.random.randint(jax.random.key(1), (shape.batch, shape.pos), 0, shape.vocab)
targets = jnp.roll(tokens, -1, axis=1)


def step() -> float:
    global state
    state, loss = jax.block_until_ready(train(state, tokens, targets))
    return float(loss)


serve(step, tokens=shape.tokens, import_seconds=imported, packages=("jax", "optax"))
