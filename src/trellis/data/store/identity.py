"""Identities of stores, which show that a run continues with the text that it began with."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from trellis.data.store.token_store import TokenStore
from trellis.errors import UserError

# The tokens of a span that is read, and the number of spans.
SPAN, SPANS = 1024, 5


def identity(store: TokenStore) -> dict[str, Any]:
    """Counts of a store, and digests of its first tokens and of spans spread over all of them, with what counts there.

    Args:
        store: a store of any format. For one that is still being written, only the first tokens are certain to stay.

    Returns:
        Plain values: `first`, and for a complete store `tokens`, `documents`, `spans` and `counted`.
    """
    count = store.num_tokens
    first = _digest(store.tokens(0, min(SPAN, count)))
    if not store.complete:
        return {"first": first}
    begins = sorted({int(begin) for begin in np.linspace(0, max(count - SPAN, 0), SPANS)})
    spans = [(begin, min(begin + SPAN, count)) for begin in begins]
    return {
        "first": first,
        "tokens": count,
        "documents": store.num_documents,
        "spans": _digest(*(store.tokens(*span) for span in spans)),
        "counted": _digest(*(store.loss_mask(*span) for span in spans)),
    }


def _digest(*parts: np.ndarray) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(np.ascontiguousarray(part, np.uint32).tobytes())
    return found.hexdigest()[:16]


def check_identities(before: Mapping[str, Mapping], now: Mapping[str, Mapping], urls: Mapping[str, str]) -> None:
    """Refuses a store that holds something other than it did.

    Args:
        before: identities of the stores of a run by name, as a checkpoint has them.
        now: the current ones.
        urls: where the stores are, by name.

    Raises:
        UserError: a store's two identities differ in something that both contain.
    """
    for name in before.keys() & now.keys():
        differ = [what for what in before[name].keys() & now[name].keys() if before[name][what] != now[name][what]]
        if differ:
            counts = [f"{each['tokens']:,} tokens" for each in (before[name], now[name]) if "tokens" in each]
            seen = "other tokens" + (f": {counts[0]} before, {counts[1]} now" if len(counts) == 2 else "")
            raise UserError(
                "A resumed run must read the same tokens as before.",
                seen="the same tokens, of which others count in the loss" if differ == ["counted"] else seen,
                where=urls[name],
                fix="restore the store that the run began with, or start a new run with --run-dir DIR",
            )
