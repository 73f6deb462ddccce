"""Mixtures of experts: routing and its losses, the ways of tokens to experts, and the experts' products."""

from trellis.nn.moe.config import Dispatch, Routing, Way
from trellis.nn.moe.exchange import ExpertsError, exchange_experts, gather_experts
from trellis.nn.moe.experts import Experts, Shared
from trellis.nn.moe.grouped import grouped_matmul
from trellis.nn.moe.hierarchical import hierarchical_experts
from trellis.nn.moe.interleave import begun_after, cut, for_each_part, held_once, joined, parts_of
from trellis.nn.moe.measures import Routed, measure, shift
from trellis.nn.moe.mixing import Biases, mix
from trellis.nn.moe.routing import Choices, check_count, choose, limit, score
from trellis.nn.moe.rows import local_experts

__all__ = [
    "Biases",
    "Choices",
    "Dispatch",
    "Experts",
    "ExpertsError",
    "Routed",
    "Routing",
    "Shared",
    "Way",
    "begun_after",
    "check_count",
    "choose",
    "cut",
    "exchange_experts",
    "for_each_part",
    "gather_experts",
    "grouped_matmul",
    "held_once",
    "hierarchical_experts",
    "joined",
    "limit",
    "local_experts",
    "measure",
    "mix",
    "parts_of",
    "score",
    "shift",
]
