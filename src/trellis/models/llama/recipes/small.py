"""Llamas of 84M to 2B parameters on the user's token store.

They have the shapes for which seqax publishes utilisations on 8 A100 GPUs; its configurations are the source of the
sizes, the batch, the steps and the learning rates. They use one key and value head for each query head and a wide
feed-forward layer. Parameters in blocks do not include the two tables of the vocabulary. On that node all of them keep
everything for the backward pass.
"""

import dataclasses

from trellis.models import LlamaConfig
from trellis.optim.config import AdamW, Cosine
from trellis.run.config import CheckpointRule, Evaluation, LayoutChoice, Run
from trellis.run.data import Data, StoreSource


def llama_84m() -> Run:
    """67M parameters in blocks, 84M with one of the two tables; 1.7 billion tokens.

    trellis plan llama_84m --on 8xA100
    trellis train llama_84m --data.source.path tokens
    """
    return Run(
        name="llama_84m",
        model=LlamaConfig(
            vocab=32_768,
            embed=512,
            layers=8,
            heads=8,
            kv_heads=8,
            head_dim=128,
            mlp=4096,
            rope_theta=10_000.0,
            rope_scaling=None,
            norm_eps=1e-6,
            tie_embeddings=False,
        ),
        data=Data(source=StoreSource(path="tokens"), sequence_length=1024),
        batch_size=64,
        steps=26_000,
        optimizer=AdamW(learning_rate=3e-3),
        schedule=Cosine(warmup_steps=2600),
        layout=LayoutChoice(preset="fsdp"),
        checkpoints=CheckpointRule(every=2600),
        evaluation=Evaluation(every=2600, batches=64),
    )


def _wider(name: str, steps: int, learning_rate: float, checkpoint: int, **sizes: int) -> Run:
    """llama_84m with 16 heads and other sizes, over ten times its warmup."""
    base = llama_84m()
    return dataclasses.replace(
        base,
        name=name,
        model=dataclasses.replace(base.model, heads=16, kv_heads=16, **sizes),
        steps=steps,
        optimizer=AdamW(learning_rate=learning_rate),
        schedule=Cosine(warmup_steps=steps // 10),
        checkpoints=CheckpointRule(every=checkpoint),
        evaluation=Evaluation(every=checkpoint, batches=64),
    )


def llama_270m() -> Run:
    """268M parameters in blocks, 6 billion tokens.

    trellis plan llama_270m --on 8xA100
    trellis train llama_270m --data.source.path tokens
    """
    return _wider("llama_270m", 92_000, 3e-4, 9200, embed=1024, mlp=8192)


def llama_540m() -> Run:
    """537M parameters in blocks, 12 billion tokens.

    trellis plan llama_540m --on 8xA100
    trellis train llama_540m --data.source.path tokens
    """
    return _wider("llama_540m", 185_000, 3e-4, 4000, embed=2048, mlp=8192)


def llama_1b() -> Run:
    """0.94B parameters in blocks, 24 billion tokens.

    trellis plan llama_1b --on 8xA100
    trellis train llama_1b --data.source.path tokens
    """
    return _wider("llama_1b", 370_000, 1e-5, 10_000, embed=2048, mlp=16_384)


def llama_2b() -> Run:
    """1.9B parameters in blocks, 48 billion tokens.

    trellis plan llama_2b --on 8xA100
    trellis train llama_2b --data.source.path tokens
    """
    return _wider("llama_2b", 740_000, 1e-5, 10_000, embed=4096, mlp=16_384)
