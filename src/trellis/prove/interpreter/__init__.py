"""An interpreter of optimized HLO in numpy: all devices' programs in step."""

from trellis.prove.interpreter.machine import Interpreter
from trellis.prove.interpreter.values import Failed, Faulty, NotInterpreted, Team, Value
