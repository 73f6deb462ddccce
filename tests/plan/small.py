"""A run that is planned in a second."""

from trellis.recipes import load_run
from trellis.run.config import Run

SMALL = {
    "model.embed": "256", "model.layers": "2", "model.heads": "4", "model.kv_heads": "2", "model.head_dim": "64",
    "model.mlp": "512", "model.vocab": "1024", "data.sequence_length": "256", "microbatches": "1", "batch_size": "32",
    "remat.policy": "full",
}  # fmt: skip


def small(**options: str) -> Run:
    """Llama's with few layers, and with options in which `__` stands for a dot."""
    return load_run("llama_8b", SMALL | {name.replace("__", "."): value for name, value in options.items()})
