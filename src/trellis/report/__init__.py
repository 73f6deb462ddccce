"""The page of a run."""

from .page import write_report

__all__ = ["write_report"]
