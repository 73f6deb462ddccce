"""Attention on plain arrays: one function, several implementations of it."""

from trellis.nn.attention.decode import decode_attention as decode_attention
from trellis.nn.attention.dispatch import attention as attention
