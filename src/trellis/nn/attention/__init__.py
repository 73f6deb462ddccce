"""Attention on named and on plain arrays: one function for each, with several implementations."""

from trellis.nn.attention.attend import attend, attend_cached
from trellis.nn.attention.decode import decode_attention
from trellis.nn.attention.dispatch import AttentionError, dot_product_attention

__all__ = ["AttentionError", "attend", "attend_cached", "decode_attention", "dot_product_attention"]
