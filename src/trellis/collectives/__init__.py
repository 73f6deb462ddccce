"""Programs for one device's slices whose communication hides behind their products."""

from .feed_forward import feed_forward
from .matmuls import gather_matmul, matmul_reduce, matmul_scatter
from .ring import Ring, RingError

__all__ = ["Ring", "RingError", "feed_forward", "gather_matmul", "matmul_reduce", "matmul_scatter"]
