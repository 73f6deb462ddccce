"""What a program does before it runs: its communication, its memory, where its arrays are."""

from trellis.frames import hide_frames

from .buffers import Buffer
from .compiled import (
    CompiledMemory,
    collectives,
    compare,
    compiled_memory,
    flops,
    products,
    scheduled_cycles,
)
from .ledger import ledger
from .memory import Memory, NotEnoughMemory, live_bytes, live_memory, memory
from .pictures import Picture, show
from .rows import Ledger, Row

hide_frames(__file__)

__all__ = [
    "Buffer",
    "CompiledMemory",
    "Ledger",
    "Memory",
    "NotEnoughMemory",
    "Picture",
    "Row",
    "collectives",
    "compare",
    "compiled_memory",
    "flops",
    "ledger",
    "live_bytes",
    "live_memory",
    "memory",
    "products",
    "scheduled_cycles",
    "show",
]
