"""Token stores in the formats of other projects, opened by what lies at a path."""

from .store import TokenStore


def open_foreign(url: str) -> TokenStore | None:
    """The store at ``url`` if it has another project's format, else None."""
    return None
