"""Where a run's tokens come from, as configuration."""

import dataclasses
from typing import Literal

from trellis.choices import check_choices
from trellis.data.mixture import check_block
from trellis.data.tokenizer import check_bpe_size
from trellis.errors import UserError
from trellis.run.schema import at_least


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSource:
    """The Python standard library's own source files, found on this machine, with a tokenizer trained on them."""

    kind: Literal["embedded"] = "embedded"
    vocab: int
    """Tokens of the byte-level BPE that is trained once on the text and cached. Raise it with the size of the model:
    larger models gain from fewer tokens a text."""

    def __post_init__(self):
        check_choices(self)
        check_bpe_size(self.vocab, "vocab")


def _check_paths(**paths: str | None) -> None:
    """Refuses paths, given by name, that are empty. None is not a path."""
    for name, path in paths.items():
        if path == "":
            fix = "name a token store" + (", or use null for none" if name == "validation" else "")
            raise UserError("The path of a token store cannot be empty.", seen=f"{name}=''", where=name, fix=fix)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreSource:
    """A token store, written by `trellis tokenize`."""

    kind: Literal["store"] = "store"
    path: str
    """The store: a folder, or s3:// and the like. Set it to what `trellis tokenize` made of your own text."""
    validation: str | None = None
    """The store that validation reads; null means none. Give one to see whether the model learns more than its text."""

    def __post_init__(self):
        check_choices(self)
        _check_paths(path=self.path, validation=self.validation)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartWeight:
    """A source's share of a mixture, from one step on."""

    step: int
    """The first step with this weight, counted from 0. Choose the one at which the mixture is to change."""
    weight: float
    """The share, relative to the others' at the same step. Raise it for texts that late steps should see more of."""

    def __post_init__(self):
        check_choices(self)
        at_least(0, step=self.step, weight=self.weight)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixturePart:
    """One source of a mixture."""

    name: str
    """The name of its validation loss in metrics. Choose one that you will recognize there."""
    path: str
    """A token store. Set it to what `trellis tokenize` wrote."""
    weight: float | tuple[PartWeight, ...]
    """Share of the tokens, relative to the other parts'; or a list of {step, weight}. Raise it for texts that should
    count for more than their size."""
    epochs: float | None = None
    """Passes over the source after which it is left out, enough for a row at least; null repeats it for as long as the
    run lasts. Set it for small sources that would be learned by heart."""
    validation: str | None = None
    """The store that validation reads; null means none. Give one to see whether the model learns more than its text."""

    def __post_init__(self):
        check_choices(self)
        _check_paths(path=self.path, validation=self.validation)
        if isinstance(self.weight, int | float):
            at_least(0, weight=self.weight)
        elif not self.weight or [w.step for w in self.weight] != sorted({0, *(w.step for w in self.weight)}):
            raise UserError(
                "Weights must be listed in order of their steps, starting at step 0.",
                seen=f"steps {', '.join(str(w.step) for w in self.weight) or 'none'}",
                where="weight",
                fix="write [{step: 0, weight: 0.7}, {step: 1000, weight: 0.3}]",
            )
        if self.epochs is not None and not self.epochs > 0:
            fix = "use 1 for one pass, or null to repeat it as long as the run lasts"
            raise UserError("`epochs` must be positive.", seen=f"epochs={self.epochs}", where="epochs", fix=fix)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSource:
    """Several token stores, each with a share of the tokens."""

    kind: Literal["mixture"] = "mixture"
    parts: tuple[MixturePart, ...]
    """The sources, each with a name. Change them to train on other texts, or on other shares of them."""
    block: int = 2048
    """Sequences over which the shares are exact. Raise it if shares are very small; lower it if a schedule changes them
    often."""

    def __post_init__(self):
        check_choices(self)
        at_least(1, block=self.block)
        check_block(self.block, len(self.parts), "block")
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise UserError(
                "A mixture needs parts, each with its own name.",
                seen=", ".join(names) or "no parts",
                where="parts",
                fix="write [{name: web, path: ..., weight: 0.7}, {name: code, path: ..., weight: 0.3}]",
            )
        for name in names:
            if not all(name.split("/")) or any(other.startswith(f"{name}/") for other in names):
                raise UserError(
                    "A part of a mixture cannot be named like a group of other parts, nor have an empty name.",
                    seen=", ".join(f"`{name}`" for name in names),
                    where="parts",
                    fix="write web/c4 and web/news, and call no part web",
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Where tokens come from, and how they become sequences. The order is a function of the seed and the step."""

    source: EmbeddedSource | StoreSource | MixtureSource
    """The tokens. Change it to train on your own text."""
    sequence_length: int
    """Tokens in a sequence. Raise it if documents are longer; attention's cost and memory grow with it."""
    packing: Literal["concatenate", "pack", "pad"] = "concatenate"
    """concatenate cuts the stream of documents into sequences; pack puts whole documents together as they fit best; pad
    gives each document a sequence of its own. Choose pack if documents must not be cut, and pad if each must stand
    alone."""
    mask_documents: bool = True
    """Whether attention stays inside a document. Set it to false to let attention read across documents, which is a
    little faster."""
    tokenizer: str | None = None
    """A tokenizer.json or a Hugging Face folder; null takes the one that the source was tokenized with. Set it if the
    source holds none, or to check that it is the one you mean."""
    shuffle_block: int = 1
    """Sequences that stay together in the shuffle, so that object stores are read in whole chunks. Raise it for stores
    that are read over a network."""
    seed: int = 0
    """The seed of the shuffle. Change it to see how much of a difference is due to the order of the data."""

    def __post_init__(self):
        check_choices(self)
        at_least(1, sequence_length=self.sequence_length, shuffle_block=self.shuffle_block)
        at_least(0, seed=self.seed)
