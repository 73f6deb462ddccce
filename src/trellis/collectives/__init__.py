"""Programs for one device's slices whose communication hides behind their products."""

from trellis.mesh.ring import Ring, RingError

from .feed_forward import feed_forward
from .matmuls import gather_matmul, matmul_reduce, matmul_scatter

__all__ = ["Ring", "RingError", "feed_forward", "gather_matmul", "matmul_reduce", "matmul_scatter"]
