"""Checkpoints: written whole or not at all, restored onto any mesh."""
