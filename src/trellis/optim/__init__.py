"""Schedules and update rules, over Optax."""

from .averaging import average
from .config import WSD, Adafactor, AdamW, Constant, Cosine, InverseSqrt, Linear, Lion, Muon, Optimizer, Schedule
from .finite import all_finite, select
from .groups import decayed
from .optimizer import learning_rate, make_optimizer
from .schedules import learning_rates

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
    "decayed",
    "learning_rate",
    "learning_rates",
    "make_optimizer",
    "select",
]
