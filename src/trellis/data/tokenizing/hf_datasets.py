"""Hugging Face datasets, stored or streaming, as a source of documents."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from trellis.data.blocks import Block
from trellis.data.tokenizing.formats import in_blocks
from trellis.data.tokenizing.sources import SourceFile
from trellis.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetSource:
    """A `datasets.Dataset` or `datasets.IterableDataset`; its records come in its own order.

    Attributes:
        dataset: the dataset; a streaming one is skipped forward when an interrupted run continues.
        name: what the store records.
        field: the field that holds the text.
    """

    dataset: Any
    name: str
    field: str | None = None
    separator = None

    @property
    def text_field(self) -> str:
        """The field that holds the text."""
        return self.field or "text"

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The one input: the dataset."""
        return (SourceFile(self.name, self.name, None),)

    def describe(self) -> dict:
        """What the tokens depend on; it goes into the store's recipe."""
        return {"dataset": self.name, "field": self.text_field}

    def blocks(self, index: int, start: tuple[int, int], *, all_fields: bool) -> Iterator[Block]:
        """Blocks of records from `start` on."""
        dataset = self.dataset
        if not all_fields:
            names, wanted = getattr(dataset, "column_names", None), (self.text_field, self.text_field.split(".")[0])
            if columns := [name for name in names or () if name in wanted]:
                dataset = dataset.select_columns(columns)
        if start[0]:
            dataset = dataset.skip(start[0])
        yield from in_blocks(iter(dataset), self.name, start[0], lambda: 0)


def dataset_source(spec: str, *, field: str | None = None) -> DatasetSource:
    """The dataset called NAME[:CONFIG][@SPLIT], from the hub, or from a folder that `save_to_disk` wrote.

    Raises:
        UserError: the `datasets` package is missing, or the dataset cannot be opened.
    """
    name, _, split = spec.partition("@")
    split = split or "train"
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "Reading Hugging Face datasets needs the package datasets.",
            seen=error,
            where=f"dataset:{spec}",
            fix="pip install 'trellis[hf]'",
        ) from error
    try:
        if os.path.isdir(name) and any(os.path.exists(os.path.join(name, f)) for f in _STORED):
            stored = datasets.load_from_disk(name)
            several = isinstance(stored, datasets.DatasetDict)
            named: list[str] = [] if several or stored.split is None else [str(stored.split)]
            splits: list[str] = sorted(map(str, stored)) if several else named
            if split not in splits and (several or "@" in spec):
                raise UserError(
                    "The dataset must have the requested split.",
                    seen=f"{split}, but it has {', '.join(splits) or 'one without a name'}",
                    where=f"dataset:{spec}",
                    fix=f"use dataset:{'@'.join((name, *splits[:1]))}",
                )
            dataset = stored[split] if several else stored
        else:
            path, _, config = name.partition(":")
            dataset = datasets.load_dataset(path, config or None, split=split, streaming=True)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            "A dataset must be a folder written by save_to_disk or a dataset on the Hugging Face hub.",
            seen=f"{type(error).__name__}: {error}",
            where=f"dataset:{spec}",
            fix="check the name, the split and the network",
        ) from error
    return DatasetSource(dataset=dataset, name=f"dataset:{spec}", field=field)


_STORED = ("state.json", "dataset_dict.json")
