"""DeepSeek-V3 on nodes of GPUs and on TPU slices."""

import dataclasses

from trellis.frozen import FrozenMap
from trellis.models import DeepseekV3Config, Routing, YarnScaling
from trellis.models.llama.recipes.torus import V5P, V6E
from trellis.nn import Precision
from trellis.optim.config import AdamW, Cosine
from trellis.run.config import CheckpointRule, Evaluation, LayoutChoice, MeshSizes, Remat, Run
from trellis.run.data import Data, StoreSource

# What belongs to no expert is sliced over all devices, latents over as many as divide them: to gather it from all costs
# as much as from a few.
EXPERT = "expert_y/expert"
ATTENTION = {"embed": f"data/{EXPERT}", "q_latent": EXPERT, "kv_latent": EXPERT}


ROUTING = Routing(
    scores="sigmoid",
    scale=2.5,
    groups=8,
    groups_per_token=4,
    balance=0.0001,
    balance_over="sequence",
    bias_rate=0.001,
)


def deepseek_v3() -> Run:
    """The shape of DeepSeek-V3, 671B parameters of which a token uses 37B, on 64 nodes of 8 H100 GPUs.

    trellis plan deepseek_v3 --on 64x8xH100
    trellis train deepseek_v3 --data.source.path tokens
    """
    return Run(
        name="deepseek_v3",
        model=DeepseekV3Config(
            vocab=129_280,
            embed=7168,
            layers=61,
            dense_layers=3,
            heads=128,
            q_latent=1536,
            kv_latent=512,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            dense_mlp=18_432,
            mlp=2048,
            shared_mlp=2048,
            experts=256,
            experts_per_token=8,
            rope_theta=10_000.0,
            rope_scaling=YarnScaling(factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0),
            tie_embeddings=False,
            # One of a device's two sequences is exchanged at a time, in eight bits on its way to experts.
            routing=dataclasses.replace(ROUTING, interleave=2, dispatch="mxfp8"),
        ),
        data=Data(source=StoreSource(path="tokens"), sequence_length=4096),
        batch_size=1024,
        steps=100_000,
        optimizer=AdamW(learning_rate=2.2e-4),
        schedule=Cosine(warmup_steps=2000),
        precision=Precision(exceptions={"router": "float32"}),
        remat=Remat(policy="saved", names=("attention", "expert_weights")),
        mesh=MeshSizes(data=8, expert=8, expert_y=8),
        layout=LayoutChoice(preset="fsdp", params=FrozenMap(ATTENTION)),
        checkpoints=CheckpointRule(every=1000, keep_every=10_000),
        evaluation=Evaluation(every=1000, batches=32),
    )


def deepseek_v3_b200_256() -> Run:
    """deepseek_v3 on 32 nodes of 8 B200 GPUs.

    trellis plan deepseek_v3_b200_256 --on 32x8xB200
    """
    return dataclasses.replace(
        deepseek_v3(),
        name="deepseek_v3_b200_256",
        remat=Remat(policy="saved", names=("latents", "attention", "expert_weights", "far_rows")),
        mesh=MeshSizes(data=4, expert=8, expert_y=8),
    )


def deepseek_v3_v5p_512() -> Run:
    """deepseek_v3 on a v5p slice of 512 chips, 8 x 8 x 8.

    trellis plan deepseek_v3_v5p_512 --on v5p:8x8x8
    """
    return dataclasses.replace(
        deepseek_v3(),
        name="deepseek_v3_v5p_512",
        model=dataclasses.replace(deepseek_v3().model, routing=ROUTING),
        remat=Remat(policy="saved", names=("latents", "attention")),
        mesh=MeshSizes(data=4, expert=128),
        compiler_options=FrozenMap(V5P),
    )


def deepseek_v3_v6e_1024() -> Run:
    """deepseek_v3 on four v6e-256 slices, 16 x 16 each.

    trellis plan deepseek_v3_v6e_1024 --on 4xv6e:16x16
    """
    return dataclasses.replace(
        deepseek_v3(),
        name="deepseek_v3_v6e_1024",
        model=dataclasses.replace(deepseek_v3().model, routing=ROUTING),
        mesh=MeshSizes(data=16, expert=64),
        remat=Remat(policy="full"),
        compiler_options=FrozenMap(V6E),
    )
