"""What the trainer, the planner, generation and export need of a model, whatever its family."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from trellis import Keep, NamedArray, Stacked


class Measured(Protocol):
    """What a model measures of a batch besides its hidden states: a tree of sums over the tokens that count.

    The sums of a batch's parts add up to those of the batch.
    """

    @property
    def penalty(self) -> jax.Array | None:
        """What is added to the loss, summed over tokens; None for nothing."""

    @property
    def ahead(self) -> Any:
        """For a model that looks ahead: what the losses of a batch's parts depend on, once it is added up."""

    def metrics(self, tokens: jax.Array) -> dict[str, jax.Array]:
        """What is reported for a step: float32 scalars.

        Args:
            tokens: how many tokens were counted.
        """

    def update(self, model: Any) -> Any:
        """The model after a step that measured this."""


class Unmeasured(NamedTuple):
    """Nothing was measured, and nothing follows from it."""

    @property
    def penalty(self) -> None:
        return None

    @property
    def ahead(self) -> None:
        return None

    def metrics(self, tokens: jax.Array) -> dict[str, jax.Array]:
        return {}

    def update(self, model: Any) -> Any:
        return model


class Output(NamedTuple):
    """What a model makes of a batch.

    Attributes:
        hidden: `"batch pos embed"`, what the unembedding is multiplied with, in the parameters' dtype.
        measured: sums over the batch.
    """

    hidden: NamedArray
    measured: Measured = Unmeasured()


class FamilyConfig(Protocol):
    """What defines a model: a frozen dataclass, tagged with its family.

    Attributes:
        family: the tag, as in `family: llama` of a run's file.
        vocab, embed, layers, heads, kv_heads, head_dim, mlp: sizes.
        experts, experts_per_token: 1 for a model without a mixture of experts.
        positions: the longest sequence; None for any.
        tie_embeddings: whether the unembedding is the embedding.
    """

    family: str
    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    experts: int
    experts_per_token: int
    positions: int | None
    tie_embeddings: bool

    def init(self, *, key: jax.Array, vocab_multiple: int = 1) -> "LanguageModel":
        """The model with fresh parameters, its vocabulary padded to a multiple."""


def stacked(config: FamilyConfig) -> int:
    """How many blocks a model's stack has for the stages of a pipeline to share: its layers, unless its family says
    otherwise in `stacked`."""
    return getattr(config, "stacked", config.layers)


def windows(config: FamilyConfig) -> Sequence[int | None]:
    """How many keys a query sees in each layer: all before it (None), unless its family says otherwise in `windows`."""
    return getattr(config, "windows", (None,) * config.layers)


def dropout(config: FamilyConfig) -> float:
    """The share of activations that training drops: none, unless its family says otherwise in `dropout`."""
    return getattr(config, "dropout", 0.0)


def value_dim(config: FamilyConfig) -> int:
    """How wide a head's values are: as wide as its queries, unless its family says otherwise in `value_dim`."""
    return getattr(config, "value_dim", config.head_dim)


class LanguageModel(Protocol):
    """A model: tokens to hidden states, which the loss multiplies by the unembedding.

    Attributes:
        config: what defines it.
        first_layers: a stack, under its own name, of blocks of another kind that come first; None without.
            `layer(x, *shared, attention=...)` is the stream after one of them.
        layers: its blocks, along `layers`. `layer(x, *each, *shared, attention=...)` is the stream after one of them.
        norm: of the stream after the last of them.
        unembedding: `"vocab embed"`, a parameter as it is; rows from `config.vocab` on are padding.
        unembedding_bias: `"vocab"`, added to the logits, or None.
        looks_ahead: whether the losses of parts of a batch depend on what is measured of the whole.
    """

    config: FamilyConfig
    first_layers: Stacked | None
    layers: Stacked
    norm: Callable[[NamedArray], NamedArray]
    unembedding: NamedArray
    unembedding_bias: NamedArray | None
    looks_ahead: bool

    def __call__(
        self,
        tokens: NamedArray,
        *,
        segment_ids: NamedArray | None = None,
        positions: NamedArray | None = None,
        policy: Keep | None = None,
        key: jax.Array | None = None,
        counted: NamedArray | None = None,
        ahead: Any = None,
    ) -> Output:
        """Hidden states before the unembedding, and what was measured on the way.

        Args:
            tokens: `i32["batch pos"]`.
            segment_ids: `i32["batch pos"]`, documents that do not see each other.
            positions: `i32["batch pos"]`, places within the document; 0, 1, ... if not given.
            policy: what each layer keeps for the backward pass.
            key: of dropout; None for none.
            counted: `f32["batch pos"]`, how much each token counts in what is measured; all 1 if not given.
            ahead: the sum of `measured.ahead` over the whole batch, if this is a part of it and the model looks
                ahead.

        Raises:
            UserError: the sequence is longer than the model's positions.
        """

    def start(
        self,
        tokens: NamedArray,
        segment_ids: NamedArray | None = None,
        positions: NamedArray | None = None,
        key: jax.Array | None = None,
    ) -> tuple[NamedArray, tuple, tuple]:
        """The stream before the first layer, what each layer gets of its own, and what all layers get."""
