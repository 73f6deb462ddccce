"""What a program does before it runs: its communication, its memory, where its arrays are."""

from trellis.frames import hide_frames
from trellis.inspect.buffers import Buffer
from trellis.inspect.compiled import (
    CompiledMemory,
    collectives,
    compare,
    compiled_memory,
    flops,
    products,
    scheduled_cycles,
)
from trellis.inspect.graph import step_svg
from trellis.inspect.hlo import parse_program
from trellis.inspect.ledger import ledger
from trellis.inspect.meeting import keep_what_loads_right
from trellis.inspect.memory import Memory, NotEnoughMemory, live_bytes, live_memory, memory
from trellis.inspect.pictures import Picture, show
from trellis.inspect.rows import Ledger, Row
from trellis.inspect.structure import Structure, structure_of

hide_frames(__file__)
keep_what_loads_right()

__all__ = [
    "Buffer",
    "CompiledMemory",
    "Ledger",
    "Memory",
    "NotEnoughMemory",
    "Picture",
    "Row",
    "Structure",
    "collectives",
    "compare",
    "compiled_memory",
    "flops",
    "ledger",
    "live_bytes",
    "live_memory",
    "memory",
    "parse_program",
    "products",
    "scheduled_cycles",
    "show",
    "step_svg",
    "structure_of",
]
