"""Qwen3-30B-A3B on nodes of GPUs and on TPU slices."""

import dataclasses

from trellis.frozen import FrozenMap
from trellis.models import Qwen3MoeConfig, Routing
from trellis.models.llama.recipes.torus import V5P, V6E
from trellis.nn import Precision
from trellis.optim.config import AdamW, Cosine
from trellis.run.config import CheckpointRule, Evaluation, LayoutChoice, MeshSizes, Remat, Run
from trellis.run.data import Data, StoreSource


def qwen3_30b_a3b() -> Run:
    """The shape of Qwen3-30B-A3B, 30B parameters of which a token uses 3B, on a node of 8 H100 GPUs.

    trellis plan qwen3_30b_a3b --on 8xH100
    trellis train qwen3_30b_a3b --data.source.path tokens
    """
    return Run(
        name="qwen3_30b_a3b",
        model=Qwen3MoeConfig(
            vocab=151_936,
            embed=2048,
            layers=48,
            heads=32,
            kv_heads=4,
            head_dim=128,
            mlp=768,
            experts=128,
            experts_per_token=8,
            rope_theta=1_000_000.0,
            tie_embeddings=False,
            routing=Routing(balance=0.001),
        ),
        data=Data(source=StoreSource(path="tokens"), sequence_length=4096),
        batch_size=48,
        steps=100_000,
        optimizer=AdamW(learning_rate=3e-4),
        schedule=Cosine(warmup_steps=2000),
        precision=Precision(exceptions={"router": "float32"}),
        remat=Remat(policy="full"),
        mesh=MeshSizes(data=8),
        layout=LayoutChoice(preset="fsdp"),
        checkpoints=CheckpointRule(every=1000, keep_every=10_000),
        evaluation=Evaluation(every=1000, batches=32),
    )


def qwen3_30b_a3b_b200_8() -> Run:
    """qwen3_30b_a3b on a node of 8 B200 GPUs, with layers written out: less is copied.

    trellis plan qwen3_30b_a3b_b200_8 --on 8xB200
    """
    return dataclasses.replace(
        qwen3_30b_a3b(),
        name="qwen3_30b_a3b_b200_8",
        batch_size=64,
        remat=Remat(policy="saved", names=("query", "key", "value", "attention", "mlp_gate", "mlp_up")),
        scan_layers=False,
    )


def qwen3_30b_a3b_v5p_64() -> Run:
    """qwen3_30b_a3b on a v5p slice of 64 chips, 4 x 4 x 4, with layers written out: less is copied. Compiling takes a
    quarter of an hour on two cores.

    trellis plan qwen3_30b_a3b_v5p_64 --on v5p:4x4x4
    """
    return dataclasses.replace(
        qwen3_30b_a3b(),
        name="qwen3_30b_a3b_v5p_64",
        batch_size=256,
        mesh=MeshSizes(data=4, data_y=4, data_z=4),
        remat=Remat(policy="saved", names=("query", "key", "value", "attention", "mlp_gate", "mlp_up")),
        scan_layers=False,
        compiler_options=FrozenMap(V5P),
    )


def qwen3_30b_a3b_v6e_64() -> Run:
    """qwen3_30b_a3b on a v6e slice of 64 chips, 8 x 8, with layers written out: less is copied, and gathers of weights
    need not wait for their turn of a loop. Compiling takes the better part of an hour on two cores.

    trellis plan qwen3_30b_a3b_v6e_64 --on v6e:8x8
    """
    return dataclasses.replace(
        qwen3_30b_a3b(),
        name="qwen3_30b_a3b_v6e_64",
        batch_size=128,
        mesh=MeshSizes(data=32, expert=2),
        remat=Remat(policy="saved", names=("query", "key", "value", "attention")),
        scan_layers=False,
        compiler_options=FrozenMap(V6E),
    )
