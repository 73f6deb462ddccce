"""Mixtral 8x7B on nodes of GPUs and on TPU slices."""

import dataclasses

from trellis.frozen import FrozenMap
from trellis.models import MixtralConfig, Routing
from trellis.models.llama.recipes.torus import V5P_AND_TWO_SIDES, V6E
from trellis.nn import Precision
from trellis.optim.config import AdamW, Cosine
from trellis.run.config import CheckpointRule, Evaluation, LayoutChoice, MeshSizes, Remat, Run
from trellis.run.data import Data, StoreSource


def mixtral_8x7b() -> Run:
    """The shape of Mixtral 8x7B, 47B parameters of which a token uses 13B, on 8 nodes of 8 H100 GPUs.

    FSDP over all of them gathers a layer's experts as it does other weights, and no token leaves its GPU. The router
    stays in float32.

    trellis plan mixtral_8x7b --on 8x8xH100
    trellis train mixtral_8x7b --data.source.path tokens
    """
    return Run(
        name="mixtral_8x7b",
        model=MixtralConfig(
            vocab=32_000,
            embed=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14_336,
            experts=8,
            experts_per_token=2,
            rope_theta=1_000_000.0,
            norm_eps=1e-5,
            tie_embeddings=False,
            routing=Routing(balance=0.02, z_loss=0.001),
        ),
        data=Data(source=StoreSource(path="tokens"), sequence_length=8192),
        batch_size=64,
        steps=100_000,
        optimizer=AdamW(learning_rate=3e-4),
        schedule=Cosine(warmup_steps=2000),
        precision=Precision(exceptions={"router": "float32"}),
        remat=Remat(policy="saved"),
        mesh=MeshSizes(data=64),
        layout=LayoutChoice(preset="fsdp"),
        checkpoints=CheckpointRule(every=1000, keep_every=10_000),
        evaluation=Evaluation(every=1000, batches=32),
    )


def mixtral_8x7b_v5p_64() -> Run:
    """mixtral_8x7b on a v5p slice of 64 chips, 4 x 4 x 4.

    Eight chips have one expert each and exchange tokens; FSDP runs beside it. Layers are written out: a loop copies
    what kernels make for the backward pass, a tenth of a step. Compiling takes a quarter of an hour on two cores.

    trellis plan mixtral_8x7b_v5p_64 --on v5p:4x4x4
    """
    return dataclasses.replace(
        mixtral_8x7b(),
        name="mixtral_8x7b_v5p_64",
        remat=Remat(policy="saved"),
        scan_layers=False,
        mesh=MeshSizes(data=8, expert=8),
        compiler_options=FrozenMap(V5P_AND_TWO_SIDES),
    )


def mixtral_8x7b_v6e_64() -> Run:
    """mixtral_8x7b on a v6e slice of 64 chips, 8 x 8.

    Four chips have two experts each and exchange tokens (over eight, they cross twice the links); FSDP runs beside it.

    trellis plan mixtral_8x7b_v6e_64 --on v6e:8x8
    """
    return dataclasses.replace(
        mixtral_8x7b(),
        name="mixtral_8x7b_v6e_64",
        remat=Remat(policy="saved", names=("attention",)),
        mesh=MeshSizes(data=16, expert=4),
        compiler_options=FrozenMap(V6E),
    )


def mixtral_8x7b_b200_32() -> Run:
    """mixtral_8x7b on 4 nodes of 8 B200 GPUs.

    trellis plan mixtral_8x7b_b200_32 --on 4x8xB200
    """
    return dataclasses.replace(mixtral_8x7b(), name="mixtral_8x7b_b200_32", mesh=MeshSizes(data=32))
