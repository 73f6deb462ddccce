"""From a run's data to batches: the training data, the validation sets and the tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from trellis.data import (
    Batches,
    Mixture,
    Tokenizer,
    TokenStore,
    check_tokenizer,
    check_vocabulary,
    embedded_stores,
    load_tokenizer,
    open_store,
)
from trellis.data.order.order import Shuffle
from trellis.errors import UserError
from trellis.files import typed
from trellis.run.config import Run
from trellis.run.data import EmbeddedSource, MixtureSource, StoreSource
from trellis.train.evaluation import ValidationSet

_PACKINGS = {"concatenate": "chunk", "pack": "best_fit", "pad": "pad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What a run reads.

    Attributes:
        batches: the batches of training, by step.
        validation: the validation sets, by name, in sequences of the run's first length; empty if there are none.
        tokenizer: turns text into tokens and back; None if the store holds none.
    """

    batches: Batches
    validation: dict[str, ValidationSet]
    tokenizer: Tokenizer | None

    @property
    def stores(self) -> dict[str, TokenStore]:
        """All stores that are trained on: a mixture's parts by name, a single store by ""."""
        data = self.batches.data
        return dict(data.stores) if isinstance(data, Mixture) else {"": data}

    @property
    def all_stores(self) -> dict[str, TokenStore]:
        """All stores that are read: those that are trained on, and those of the validation sets by `/NAME`, which no
        part of a mixture is called."""
        return self.stores | {f"/{name}": each.store for name, each in self.validation.items()}

    @property
    def num_tokens(self) -> int:
        """Tokens of all stores that are trained on."""
        return sum(store.num_tokens for store in self.stores.values())

    @property
    def all_count(self) -> bool:
        """Whether every token that is trained on counts in the loss. Those of a chat's prompts do not."""
        return not any(store.has_loss_mask for store in self.stores.values())


def open_corpus(run: Run, *, progress: bool = False) -> Corpus:
    """Opens what a run reads. The embedded corpus is first tokenized, if that was not done yet.

    Args:
        run: the run.
        progress: whether to show the progress of tokenizing.

    Raises:
        UserError: a store is not there or not complete, has more tokens than the model's vocabulary, or was made by
            another tokenizer than the run's.
    """
    data = run.data
    source, held_out = _stores(run, progress)
    stores = list(source.stores.values()) if isinstance(source, Mixture) else [source]
    tokenizer = _tokenizer_of(stores[0])
    if data.tokenizer is not None and (named := load_tokenizer(data.tokenizer)).json != getattr(tokenizer, "json", ""):
        tokenizer = named  # if it is the same, the store knows which of its tokens ends a document
    for store in [*stores, *held_out.values()]:
        if tokenizer is not None and _tokenizer_of(store) is not None:
            check_tokenizer(store, tokenizer, _fix_of_text(run))
        check_vocabulary(store, run.model.vocab)
        _check_counts(store)
    end = None if tokenizer is None else tokenizer.end_of_document
    if tokenizer is not None and end is not None and end >= run.model.vocab:
        raise UserError(
            "The model's vocabulary must include the token that ends a document.",
            seen=f"{tokenizer.end_of_document_text}, token {end}, vocab={run.model.vocab}",
            where="model.vocab",
            fix=f"use --model.vocab {tokenizer.vocab_size} or more, or the tokenizer that the model was made for",
        )
    how = {"packing": _PACKINGS[data.packing], "mask_documents": data.mask_documents}
    phases = run.phases()
    sizes = [(entry.step or phase.start, entry.size) for phase in phases for entry in phase.run.batch_sizes()]
    lengths = [(phase.start, phase.run.data.sequence_length) for phase in phases]
    shuffle = Shuffle(block=data.shuffle_block if data.shuffle_block > 1 else None)
    batches = Batches(source, batch_size=sizes, sequence_length=lengths, seed=data.seed, shuffle=shuffle, **how)
    first = {"batch_size": sizes[0][1], "sequence_length": lengths[0][1]}
    in_order = {"shuffle": False, "max_epochs": 1, "pad_last": True, **first, **how}
    validation = {
        name: ValidationSet(Batches(store, **in_order), store, run.evaluation.batches)
        for name, store in held_out.items()
    }
    return Corpus(batches=batches, validation=validation, tokenizer=tokenizer)


def _check_counts(store: TokenStore) -> None:
    """Refuses a store of which no token counts in the loss, as of chats without an answer."""
    count, step = store.num_tokens, 1 << 20
    if not (store.has_loss_mask and store.complete and count):
        return
    if not any(store.loss_mask(first, min(first + step, count)).any() for first in range(0, count, step)):
        raise UserError(
            "A store must have tokens that count in the loss.",
            seen=f"{count:,} tokens, none of which counts",
            where=store.url,
            fix="tokenize chats with messages of the role assistant",
        )


def check_lasts(run: Run, corpus: Corpus) -> None:
    """Refuses a run that is longer than its data, as with a mixture whose parts all have a limited number of epochs.

    Raises:
        UserError: there are fewer batches than steps.
    """
    there = corpus.batches.num_steps
    if there is not None and there < run.steps:
        raise UserError(
            "The data must last as long as the run.",
            seen=f"{there} batches for {run.steps} steps",
            where="data.source",
            fix=(f"use --steps {there}, or " if there else "use ") + "more epochs: null repeats a part without end",
        )


def _stores(run: Run, progress: bool) -> tuple[TokenStore | Mixture, dict[str, TokenStore]]:
    source = run.data.source
    match source:
        case EmbeddedSource(vocab=vocab):
            if lacks_tokenizer(run):
                raise UserError(
                    "An imported model must have its own tokenizer to be trained on text.",
                    seen="no tokenizer.json",
                    where=str(run.data.tokenizer),
                    fix=f"put the model's own tokenizer.json there, and {_fix_of_text(run)}",
                )
            if vocab > run.model.vocab:  # before a tokenizer is trained
                raise UserError(
                    "The model's vocabulary must include every token of the text.",
                    seen=f"vocab={vocab} of the text, vocab={run.model.vocab} of the model",
                    where="data.source.vocab",
                    fix=_fix_of_text(run)
                    or f"use --model.vocab {vocab} or more, or --data.source.vocab {run.model.vocab} or less",
                )
            found = embedded_stores(vocab_size=vocab, progress=progress)
            return found["train"], {"validation": found["validation"]}
        case StoreSource(path=path, validation=validation):
            return open_store(path), {"validation": open_store(validation)} if validation else {}
        case MixtureSource(parts=parts):
            stores = {part.name: open_store(part.path) for part in parts}
            held_out = {part.name: open_store(part.validation) for part in parts if part.validation}
            return _mixture(source, stores, held_out), held_out


def lacks_tokenizer(run: Run) -> bool:
    """Whether the tokenizer that a run names is a folder without one, as of a model that was imported without."""
    named = None if run.data.tokenizer is None else Path(run.data.tokenizer)
    return named is not None and named.is_dir() and not (named / "tokenizer.json").exists()


def _fix_of_text(run: Run) -> str | None:
    """What to do if a run that names a tokenizer, as an import does, reads the embedded text, which has its own."""
    if run.data.tokenizer is None or not isinstance(run.data.source, EmbeddedSource):
        return None
    words = f"trellis tokenize TEXTS --tokenizer {typed(run.data.tokenizer)} --out STORE"
    return (
        f"tokenize text with the model's tokenizer: {words}; then import or begin anew with --data.source store "
        "--data.source.path STORE"
    )


def _mixture(config: MixtureSource, stores: dict, held_out: dict) -> Mixture:
    weights = {p.name: [(0, p.weight)] if not isinstance(p.weight, tuple) else p.weight for p in config.parts}
    pairs = {name: [w if isinstance(w, tuple) else (w.step, w.weight) for w in ws] for name, ws in weights.items()}
    starts = sorted({step for given in pairs.values() for step, _ in given})
    schedule = [
        (start, {name: [w for step, w in given if step <= start][-1] for name, given in pairs.items()})
        for start in starts
    ]
    epochs = {part.name: part.epochs for part in config.parts if part.epochs is not None}
    return Mixture(stores=stores, weights=schedule, max_epochs=epochs, validation=held_out, block=config.block)


def _tokenizer_of(store: TokenStore) -> Tokenizer | None:
    """The tokenizer that made a store, or None: other projects' formats hold none, and training needs none.

    Raises:
        UserError: it is missing or damaged.
    """
    return None if store.tokenizer_sha256 is None else store.tokenizer()
