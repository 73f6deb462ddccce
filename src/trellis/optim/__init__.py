"""Schedules and update rules, over Optax."""

from trellis.optim.averaging import average
from trellis.optim.by_compiler import by_compiler
from trellis.optim.config import (
    WSD,
    Adafactor,
    AdamW,
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    Lion,
    Muon,
    Optimizer,
    Schedule,
)
from trellis.optim.finite import all_finite, select
from trellis.optim.groups import decayed, on_arrays
from trellis.optim.optimizer import learning_rate, make_optimizer
from trellis.optim.schedules import learning_rates

__all__ = [
    "WSD",
    "Adafactor",
    "AdamW",
    "Constant",
    "Cosine",
    "InverseSqrt",
    "Linear",
    "Lion",
    "Muon",
    "Optimizer",
    "Schedule",
    "all_finite",
    "average",
    "by_compiler",
    "decayed",
    "learning_rate",
    "learning_rates",
    "make_optimizer",
    "on_arrays",
    "select",
]
