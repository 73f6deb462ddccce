"""Layers as a pipeline: stages of a mesh axis hold them in parts, and microbatches pass through."""
