"""A sample at the end of a run: text from the model as it stands in training, on the run's own mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..data import Tokenizer
from ..named import einsum, named
from .assemble import Assembled
from .state import State, cast


class Sampler:
    """Continues a document from its start, with the whole window computed for every token: no cache, any layout.

    Args:
        assembled: the run.
        tokenizer: turns tokens into text.
        tokens: how many to make; the run's sequence length bounds them.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from this many of the likeliest tokens.
        seed: of the draws.
    """

    def __init__(
        self,
        assembled: Assembled,
        tokenizer: Tokenizer,
        *,
        tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 50,
        seed: int = 0,
    ):
        self._assembled, self._tokenizer, self._seed = assembled, tokenizer, seed
        length = assembled.run.data.sequence_length
        self._tokens = min(tokens, length)
        (axes,) = assembled.layout.assign(("batch",))
        rows = int(np.prod([assembled.layout.mesh.shape[axis] for axis in axes], dtype=int))
        self._shape = (rows, length)  # the mesh slices rows: one for each slice, of which the first is shown
        self._temperature, self._top_k = temperature, min(top_k, assembled.run.model.vocab)
        self._write = jax.jit(self._loop)

    def __call__(self, state: State) -> str:
        """The text; it ends where the model ends the document. Waits for the devices."""
        model = state.model if state.average is None else state.average
        with self._assembled.layout:
            tokens = np.asarray(self._write(model, jax.random.key(self._seed)))[0, : self._tokens]
        ends = np.flatnonzero(tokens == self._tokenizer.end_of_document)
        return self._tokenizer.decode(tokens[: ends[0]] if len(ends) else tokens, special=False)

    def _loop(self, model: Any, key: jax.Array) -> jax.Array:
        """`i32["batch pos"]`, the whole of it on every device: at each position the token that was drawn there."""
        recipe = self._assembled.recipe
        model = cast(model, recipe.compute, recipe.exceptions)
        whole = self._everywhere()

        def body(at: jax.Array, tokens: jax.Array) -> jax.Array:
            # The model reads the token before: at the first position the end of the document before.
            shifted = jnp.roll(tokens, 1, axis=1).at[:, 0].set(self._tokenizer.end_of_document)
            hidden = model(named(self._place(shifted), "batch pos"))
            here = named((jnp.arange(self._shape[1]) == at).astype(hidden.dtype), "pos")
            last = einsum("batch pos embed, pos -> batch embed", hidden, here)
            logits = einsum("batch embed, vocab embed -> batch vocab", last, model.unembedding).array
            logits = jax.sharding.reshard(logits, whole) if whole else logits
            drawn = self._draw(logits[:, : self._assembled.run.model.vocab], jax.random.fold_in(key, at))
            return jax.lax.dynamic_update_slice(tokens, drawn[:, None], (0, at))

        tokens = jnp.zeros(self._shape, jnp.int32)
        return jax.lax.fori_loop(0, self._tokens, body, tokens)

    def _draw(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        logits = logits.astype(jnp.float32)
        if self._temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        top, ids = jax.lax.top_k(logits, self._top_k)
        choice = jax.random.categorical(key, top / self._temperature, axis=-1)
        return jnp.take_along_axis(ids, choice[:, None], axis=1)[:, 0].astype(jnp.int32)

    def _everywhere(self) -> NamedSharding | None:
        mesh = self._assembled.layout.mesh
        return NamedSharding(mesh, P()) if mesh.axis_types[0] == jax.sharding.AxisType.Explicit else None

    def _place(self, tokens: jax.Array) -> jax.Array:
        return jax.sharding.reshard(tokens, self._assembled.batch_sharding) if self._everywhere() else tokens
