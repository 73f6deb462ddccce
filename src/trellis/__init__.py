"""Trellis: pretrain language models on a mesh."""
