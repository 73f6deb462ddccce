"""Attention over positions in slices: rings of keys, keys gathered, and neighbours under a window."""
