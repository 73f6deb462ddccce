"""One reading of a program: operations, loops, sizes on a device, lines of the source, and what they move."""

from trellis.frames import hide_frames
from trellis.program.reading import Argument, Body, Operation, Program, Value
from trellis.program.trace import trace
from trellis.program.wrong import refuse_traced, refuse_wrong

hide_frames(__file__)

__all__ = ["Argument", "Body", "Operation", "Program", "Value", "refuse_traced", "refuse_wrong", "trace"]
