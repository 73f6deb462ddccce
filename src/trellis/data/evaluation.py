"""Losses of several validation sets, told apart and together."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from ..errors import UserError
from .packing import Batch
from .store import TokenStore


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """What a validation set adds up to: the loss in nats, the targets counted, the UTF-8 bytes they stand for."""

    nats: float = 0.0
    tokens: float = 0.0
    text_bytes: float = 0.0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.nats + other.nats, self.tokens + other.tokens, self.text_bytes + other.text_bytes)

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of text: comparable between tokenizers."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else math.nan


def count_bytes(store: TokenStore, batch: Batch) -> float:
    """The UTF-8 bytes of text that a batch's counted targets stand for.

    Exact where the store holds a byte-level tokenizer; else the store's average.
    """
    mask = np.asarray(batch.loss_mask)
    try:
        token_bytes = store.tokenizer().token_bytes
    except UserError:
        return float(mask.sum()) * store.bytes_per_token
    return float((token_bytes[np.asarray(batch.targets)] * mask).sum())


def summarize(totals: Mapping[str, Totals]) -> dict[str, float]:
    """Loss and bits per byte of every set and group, and of all.

    Slashes in names make groups. ``micro`` counts every token the same, ``macro`` every set.

    >>> sets = {"web/c4": Totals(200.0, 100.0, 400.0), "web/news": Totals(30.0, 10.0, 40.0), "code": Totals(10, 10, 20)}
    >>> for name, value in summarize(sets).items():
    ...     if name.endswith("loss"):
    ...         print(name, round(value, 3))
    web/c4/loss 2.0
    web/news/loss 3.0
    code/loss 1.0
    web/macro_loss 2.5
    web/micro_loss 2.091
    macro_loss 2.0
    micro_loss 2.0
    """
    out = {}
    for name, total in totals.items():
        out |= {f"{name}/loss": total.loss, f"{name}/bits_per_byte": total.bits_per_byte}
    groups = sorted({name[:i] for name in totals for i, c in enumerate(name) if c == "/"})
    for group in [*groups, ""]:
        prefix = f"{group}/" if group else ""
        members = [total for name, total in totals.items() if name.startswith(prefix)]
        micro = sum(members, Totals())
        out |= {
            f"{prefix}macro_loss": sum(m.loss for m in members) / len(members),
            f"{prefix}micro_loss": micro.loss,
            f"{prefix}macro_bits_per_byte": sum(m.bits_per_byte for m in members) / len(members),
            f"{prefix}micro_bits_per_byte": micro.bits_per_byte,
        }
    return out
