"""One reading of a program: operations, loops, sizes on a device, lines of the source, and what they move."""

from trellis.frames import hide_frames

from .reading import Argument, Body, Operation, Program, Value
from .settled import refuse_resettled
from .trace import trace

hide_frames(__file__)

__all__ = ["Argument", "Body", "Operation", "Program", "Value", "refuse_resettled", "trace"]
