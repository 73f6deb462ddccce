"""Programs for one device's slices: overlapped products, and tokens on their way to experts."""

from trellis.frames import hide_frames
from trellis.mesh.ring import Ring, RingError

from .experts import ExpertsError, exchange_experts, gather_experts
from .experts_rows import local_experts
from .feed_forward import feed_forward
from .matmuls import gather_matmul, matmul_reduce, matmul_scatter

hide_frames(__file__)

__all__ = [
    "ExpertsError",
    "Ring",
    "RingError",
    "exchange_experts",
    "feed_forward",
    "gather_experts",
    "gather_matmul",
    "local_experts",
    "matmul_reduce",
    "matmul_scatter",
]
