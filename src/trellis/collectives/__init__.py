"""Products that overlap with their own communication, as programs for one device's slices (manual mode)."""

from trellis.collectives.feed_forward import feed_forward
from trellis.collectives.matmuls import gather_matmul, matmul_reduce, matmul_scatter
from trellis.frames import hide_frames
from trellis.mesh.ring import Ring, RingError

hide_frames(__file__)

__all__ = ["Ring", "RingError", "feed_forward", "gather_matmul", "matmul_reduce", "matmul_scatter"]
