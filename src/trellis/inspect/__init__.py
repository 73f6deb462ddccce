"""What a program does before it runs: its communication, its memory, where its arrays are."""

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
from .pictures import Picture, show
from .rows import Ledger, Row

__all__ = [
    "CompiledMemory",
    "Ledger",
    "Picture",
    "Row",
    "collectives",
    "compare",
    "compiled_memory",
    "flops",
    "ledger",
    "products",
    "scheduled_cycles",
    "show",
]
