"""Mixtures of experts: routing, its losses, and the products."""

from .grouped import grouped_matmul
from .measures import Routed, measure, shift, summary
from .mixing import Way, mix
from .routing import Choices, check_count, choose, limit, score

__all__ = [
    "Choices",
    "Routed",
    "Way",
    "check_count",
    "choose",
    "grouped_matmul",
    "limit",
    "measure",
    "mix",
    "score",
    "shift",
    "summary",
]
