"""Loss, perplexity and bits per byte over validation batches, summed on the devices."""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from trellis.data import Batch, Batches, Loader, TokenStore, count_bytes
from trellis.nn.loss import TokenLoss
from trellis.train.state import TrainState
from trellis.train.step import StepOptions, batch_loss

# Batches that may wait on the devices. The training loop's own come on top: on several CPU devices XLA hangs if one has
# more than 32 programs to run (seen with JAX 0.10.2).
_AHEAD = 8


class ValidationSet(NamedTuple):
    """The batches that a model is measured on.

    Attributes:
        batches: one pass over held-out text, in order.
        store: where the batches come from; it knows how many bytes of text its tokens stand for.
        limit: how many batches are used; None takes all there are.
    """

    batches: Batches
    store: TokenStore
    limit: int | None = None

    @property
    def num_batches(self) -> int:
        """How many batches are used."""
        steps = self.batches.num_steps
        assert steps is not None, "a pass over a validation set ends"
        return steps if self.limit is None else min(steps, self.limit)


class Evaluator:
    """Measures a state on validation sets. The program is compiled once for all batches of a shape.

    Args:
        sets: the validation sets, by name.
        options: how the model computes in training; the z-loss is left out.
        sharding: the sharding of a batch's arrays.
    """

    def __init__(self, sets: Mapping[str, ValidationSet], options: StepOptions, sharding: NamedSharding):
        self._sets, self._sharding = dict(sets), sharding
        self._whole = NamedSharding(sharding.mesh, PartitionSpec())
        self._bytes: dict[str, float] = {}
        plain = dataclasses.replace(options, z_loss=0.0, policy=None)

        def add(sums: TokenLoss, model: Any, batch: Batch) -> TokenLoss:
            found, _ = batch_loss(options.precision.in_use(model), batch.named(), plain)
            return jax.tree.map(jnp.add, sums, found)

        self._add = jax.jit(add)
        self._rates = jax.jit(_rates)

    def __call__(self, state: TrainState) -> dict[str, jax.Array]:
        """The measures of a state, as scalars still on the devices.

        The moving average of the parameters is measured if there is one. Several sets are also reported separately.

        Returns:
            `validation_loss` (nats a token, every token of all sets counted alike), `perplexity`,
            `validation_accuracy`, and `bits_per_byte`, which is not a number if a store does not know its text. With
            several sets also `validation_loss/NAME` and `bits_per_byte/NAME` for each set and each group (`web/c4` and
            `web/news` are in the group `web`); and `validation_loss_macro` and `bits_per_byte_macro`, the means over
            the sets, each set counted alike, also for each group.
        """
        model = state.model if state.average is None else state.average
        sums = {name: self._sums(model, chosen) for name, chosen in self._sets.items()}
        text_bytes = {name: np.float32(self.text_bytes(name)) for name in sums}
        return self._rates(sums, text_bytes)

    def text_bytes(self, name: str) -> float:
        """UTF-8 bytes of text that a set's counted targets stand for; counted on the host, once."""
        if name not in self._bytes:
            chosen = self._sets[name]
            batches = (chosen.batches.batch(i) for i in range(chosen.num_batches))
            self._bytes[name] = sum(count_bytes(chosen.store, batch) for batch in batches)
        return self._bytes[name]

    def _zero(self) -> jax.Array:
        """Zeros with the sharding of the program's sums, so that the first batch needs no compilation of its own."""
        return jax.make_array_from_callback((), self._whole, lambda _: np.zeros((), np.float32))

    def _sums(self, model: Any, chosen: ValidationSet) -> TokenLoss:
        sums = TokenLoss(*(self._zero() for _ in TokenLoss._fields))
        ahead: deque[jax.Array] = deque()
        with Loader(chosen.batches, self._sharding) as loader:
            for (_, batch), _ in zip(loader, range(chosen.num_batches)):
                sums = self._add(sums, model, batch)
                ahead.append(sums.tokens)
                if len(ahead) > _AHEAD:
                    ahead.popleft().block_until_ready()
        return sums


def _rates(sums: dict[str, TokenLoss], text_bytes: dict[str, jax.Array]) -> dict[str, jax.Array]:
    whole = _total(sums.values())
    found = {
        "validation_loss": _loss(whole),
        "perplexity": jnp.exp(_loss(whole)),
        "validation_accuracy": whole.correct / whole.tokens,
        "bits_per_byte": _bits(whole, _total(text_bytes.values())),
    }
    for name, members in groups(sums).items():
        of = [(sums[m], text_bytes[m]) for m in members]
        both = _total(of)
        ending = f"/{name}" if name else ""
        if name:
            found |= {f"validation_loss{ending}": _loss(both[0]), f"bits_per_byte{ending}": _bits(*both)}
        if name not in sums:
            found[f"validation_loss_macro{ending}"] = _total(_loss(s) for s, _ in of) / len(of)
            found[f"bits_per_byte_macro{ending}"] = _total(_bits(s, b) for s, b in of) / len(of)
    return found


def groups(names: Iterable[str]) -> dict[str, list[str]]:
    """The sets by name, the groups of several, and all of them ("") if there are several, with the sets in each.

    >>> groups(["web/c4", "web/news", "code"])
    {'web/c4': ['web/c4'], 'web/news': ['web/news'], 'code': ['code'], 'web': ['web/c4', 'web/news'],
     '': ['web/c4', 'web/news', 'code']}
    >>> groups(["validation"])
    {}
    """
    names = list(names)
    if len(names) == 1:
        return {}
    prefixes = dict.fromkeys(name[:i] for name in names for i, c in enumerate(name) if c == "/")
    inside = {group: [name for name in names if name.startswith(f"{group}/")] for group in prefixes}
    several = {group: members for group, members in inside.items() if len(members) > 1}
    return {name: [name] for name in names} | several | {"": names}


def _total(values: Iterable[Any]) -> Any:
    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), values)


def _loss(sums: TokenLoss) -> jax.Array:
    return sums.cross_entropy / sums.tokens


def _bits(sums: TokenLoss, text_bytes: jax.Array) -> jax.Array:
    return sums.cross_entropy / (math.log(2) * text_bytes)
