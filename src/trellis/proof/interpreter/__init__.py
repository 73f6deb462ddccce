"""An interpreter of optimized HLO in numpy: all devices' programs in step."""

from trellis.proof.interpreter.machine import Interpreter
from trellis.proof.interpreter.memory import most_bytes
from trellis.proof.interpreter.values import Failed, Faulty, NotInterpreted, Team, Value
