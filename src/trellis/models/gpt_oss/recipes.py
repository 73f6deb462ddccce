"""GPT-OSS-20B on nodes of GPUs and on TPU slices."""

import dataclasses

from trellis.frozen import FrozenMap
from trellis.models import GptOssConfig, Routing, YarnScaling
from trellis.models.llama.recipes.torus import V5P_AND_TWO_SIDES, V6E
from trellis.nn import Precision
from trellis.optim.config import AdamW, Cosine
from trellis.run.config import CheckpointRule, Evaluation, LayoutChoice, MeshSizes, Remat, Run
from trellis.run.data import Data, StoreSource


def gpt_oss_20b() -> Run:
    """The shape of GPT-OSS-20B, 21B parameters of which a token uses 3.6B, on a node of 8 H100 GPUs.

    trellis plan gpt_oss_20b --on 8xH100
    trellis train gpt_oss_20b --data.source.path tokens
    """
    return Run(
        name="gpt_oss_20b",
        model=GptOssConfig(
            vocab=201_088,
            embed=2880,
            layers=24,
            heads=64,
            kv_heads=8,
            head_dim=64,
            window=128,
            mlp=2880,
            experts=32,
            experts_per_token=4,
            rope_theta=150_000.0,
            rope_scaling=YarnScaling(factor=32.0, original_context=4096, truncate=False),
            tie_embeddings=False,
            routing=Routing(balance=0.001),
        ),
        data=Data(source=StoreSource(path="tokens"), sequence_length=4096),
        batch_size=32,
        steps=100_000,
        optimizer=AdamW(learning_rate=3e-4),
        schedule=Cosine(warmup_steps=2000),
        precision=Precision(exceptions={"router": "float32"}),
        remat=Remat(policy="saved", names=("attention", "mlp_gate", "mlp_up")),
        mesh=MeshSizes(data=8),
        layout=LayoutChoice(preset="fsdp"),
        checkpoints=CheckpointRule(every=1000, keep_every=10_000),
        evaluation=Evaluation(every=1000, batches=32),
    )


def gpt_oss_20b_b200_8() -> Run:
    """gpt_oss_20b on a node of 8 B200 GPUs.

    trellis plan gpt_oss_20b_b200_8 --on 8xB200
    """
    return dataclasses.replace(gpt_oss_20b(), name="gpt_oss_20b_b200_8", batch_size=64, remat=Remat(policy="saved"))


def gpt_oss_20b_v5p_64() -> Run:
    """gpt_oss_20b on a v5p slice of 64 chips, 4 x 4 x 4.

    Layers are written out: a loop copies what kernels make for the backward pass, a tenth of a step.

    trellis plan gpt_oss_20b_v5p_64 --on v5p:4x4x4
    """
    return dataclasses.replace(
        gpt_oss_20b(),
        name="gpt_oss_20b_v5p_64",
        batch_size=256,
        mesh=MeshSizes(data=4, data_y=4, data_z=4),
        layout=LayoutChoice(preset="fsdp", params=FrozenMap(experts="data/data_y")),
        remat=Remat(policy="saved", names=("query", "key", "value", "attention", "mlp_gate", "mlp_up")),
        scan_layers=False,
        compiler_options=FrozenMap(V5P_AND_TWO_SIDES),
    )


def gpt_oss_20b_v6e_64() -> Run:
    """gpt_oss_20b on a v6e slice of 64 chips, 8 x 8, with layers written out.

    trellis plan gpt_oss_20b_v6e_64 --on v6e:8x8
    """
    return dataclasses.replace(
        gpt_oss_20b(),
        name="gpt_oss_20b_v6e_64",
        batch_size=128,
        mesh=MeshSizes(data=16, data_y=2, data_z=2),  # neighbours along the second side are along data_z
        layout=LayoutChoice(preset="fsdp", params=FrozenMap(experts="data/data_z")),
        remat=Remat(policy="saved", names=("query", "key", "value", "attention")),
        scan_layers=False,
        compiler_options=FrozenMap(V6E),
    )
