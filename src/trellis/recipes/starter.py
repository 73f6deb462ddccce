"""The first run on a new machine, and its seconds-long sibling for tests."""

import dataclasses

from trellis.models import LlamaConfig
from trellis.nn import Precision
from trellis.optim.config import AdamW, Cosine
from trellis.run.config import CheckpointRule, Evaluation, Logging, Run
from trellis.run.data import Data, EmbeddedSource


def starter() -> Run:
    """A Llama of 5.0M parameters on the Python standard library's sources: a few minutes on two cores.

    Its training loss falls from 7.6 after 10 steps to about 3.1 after 600, with a validation loss of 2.83 (1.16 bits
    a byte), within 0.05 on any number of devices and under any layout. It samples every 150 steps, and reads like code
    from the second time on.

    make train
    trellis train starter
    trellis train starter --devices 8 --mesh.data 4 --mesh.model 2
    """
    return Run(
        name="starter",
        model=LlamaConfig(
            vocab=4096,
            embed=256,
            layers=5,
            heads=8,
            kv_heads=4,
            head_dim=32,
            mlp=768,
            rope_theta=10_000.0,
            rope_scaling=None,
            norm_eps=1e-5,
            tie_embeddings=True,
        ),
        data=Data(source=EmbeddedSource(vocab=4096), sequence_length=256),
        batch_size=16,
        steps=600,
        optimizer=AdamW(learning_rate=3e-3),
        schedule=Cosine(warmup_steps=60),
        precision=Precision(compute="float32"),
        checkpoints=CheckpointRule(every=150),
        evaluation=Evaluation(every=150, batches=16, sample=True),
        logging=Logging(every=10),
    )


def tiny() -> Run:
    """A Llama of 0.1M parameters on the same text, with a vocabulary of 512: seconds, for tests.

    trellis train tiny --run-dir runs/tiny --devices 8 --mesh.data 4 --mesh.model 2
    """
    base = starter()
    model = LlamaConfig(
        vocab=512,
        embed=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=128,
        rope_theta=10_000.0,
        rope_scaling=None,
        norm_eps=1e-5,
        tie_embeddings=True,
    )
    return dataclasses.replace(
        base,
        name="tiny",
        model=model,
        data=Data(source=EmbeddedSource(vocab=512), sequence_length=64),
        batch_size=8,
        steps=20,
        optimizer=AdamW(learning_rate=1e-2),
        schedule=Cosine(warmup_steps=4),
        checkpoints=CheckpointRule(every=10),
        evaluation=Evaluation(every=10, batches=2, sample=False),
        logging=Logging(every=1),
    )
