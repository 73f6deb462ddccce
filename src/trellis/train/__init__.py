"""Training: what a run is, its step on the devices at hand, and what else you need to write a loop of your own.

`Run` and its fields say what a run is; `assemble` makes its layout, optimizer, state and step; `CompiledStep` runs it.
For a loop of your own: `Checkpoints`, `Guard`, `Profiler`, `known_peak`, `use_persistent_cache`. `trellis.recipes` has
ready-made runs, and reads runs from YAML files.
"""

from trellis.checkpoints.checkpoints import Checkpoints, LastGood, Restored
from trellis.run.config import (
    BatchSize,
    CheckpointRule,
    DeadlineRule,
    Distributed,
    Evaluation,
    GuardRule,
    Logging,
    Profile,
    Remat,
    Run,
    SequenceLength,
)
from trellis.run.data import Data, EmbeddedSource, MixturePart, MixtureSource, PartWeight, StoreSource
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.assemble import Assembled, assemble
from trellis.train.compilation import CompiledStep, options_for, use_persistent_cache
from trellis.train.devices import find_devices
from trellis.train.flops import flops_per_token, known_peak
from trellis.train.guard import Guard
from trellis.train.profile import Profiler
from trellis.train.state import TrainState
from trellis.train.step import StepOptions, batch_loss

__all__ = [
    "Assembled",
    "BatchSize",
    "CheckpointRule",
    "Checkpoints",
    "CompiledStep",
    "Data",
    "DeadlineRule",
    "Distributed",
    "EmbeddedSource",
    "Evaluation",
    "Guard",
    "GuardRule",
    "LastGood",
    "LayoutChoice",
    "Logging",
    "MeshSizes",
    "MixturePart",
    "MixtureSource",
    "PartWeight",
    "Profile",
    "Profiler",
    "Remat",
    "Restored",
    "Run",
    "SequenceLength",
    "StepOptions",
    "StoreSource",
    "TrainState",
    "assemble",
    "batch_loss",
    "find_devices",
    "flops_per_token",
    "known_peak",
    "make_layout",
    "options_for",
    "use_persistent_cache",
]
