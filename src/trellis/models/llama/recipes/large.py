"""Llamas of 8B, 70B and 405B parameters on nodes of GPUs, on the user's token store."""

import dataclasses

from trellis.models import Llama3Scaling, LlamaConfig
from trellis.optim.config import AdamW, Cosine
from trellis.run.config import CheckpointRule, Evaluation, LayoutChoice, Remat, Run
from trellis.run.data import Data, StoreSource


def llama_8b() -> Run:
    """The shape of Llama 3.1 8B, on one node of 8 H100 GPUs: FSDP over all of them.

    trellis plan llama_8b --on 8xH100
    trellis train llama_8b --data.source.path tokens
    """
    return Run(
        name="llama_8b",
        model=LlamaConfig(
            vocab=128_256,
            embed=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14_336,
            rope_theta=500_000.0,
            rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192),
            norm_eps=1e-5,
            tie_embeddings=False,
        ),
        data=Data(source=StoreSource(path="tokens"), sequence_length=8192),
        batch_size=16,
        steps=100_000,
        optimizer=AdamW(learning_rate=3e-4),
        schedule=Cosine(warmup_steps=2000),
        remat=Remat(policy="saved"),
        layout=LayoutChoice(preset="fsdp"),
        checkpoints=CheckpointRule(every=1000, keep_every=10_000),
        evaluation=Evaluation(every=1000, batches=32),
    )


def llama_70b() -> Run:
    """The shape of Llama 3.1 70B, on 32 nodes of 8 H100 GPUs: FSDP over all of them.

    trellis plan llama_70b --on 32x8xH100
    trellis train llama_70b --data.source.path tokens
    """
    base = llama_8b()
    return dataclasses.replace(
        base,
        name="llama_70b",
        model=dataclasses.replace(base.model, embed=8192, layers=80, heads=64, mlp=28_672),
        batch_size=256,
        optimizer=AdamW(learning_rate=1.5e-4),
        remat=Remat(policy="saved", names=("query", "key", "value", "mlp_up")),
    )


def llama_70b_h200_256() -> Run:
    """llama_70b on 32 nodes of 8 H200 GPUs, whose memory holds what the H100s compute again.

    trellis plan llama_70b_h200_256 --on 32x8xH200
    """
    return dataclasses.replace(llama_70b(), name="llama_70b_h200_256", remat=Remat(policy="saved"))


def llama_405b() -> Run:
    """The shape of Llama 3.1 405B, on 128 nodes of 8 H100 GPUs.

    trellis plan llama_405b --on 128x8xH100
    trellis train llama_405b --data.source.path tokens
    """
    base = llama_70b()
    return dataclasses.replace(
        base,
        name="llama_405b",
        model=dataclasses.replace(base.model, embed=16_384, layers=126, heads=128, mlp=53_248),
        batch_size=1024,
        optimizer=AdamW(learning_rate=8e-5),
        remat=Remat(policy="full"),
    )


def llama_405b_h200_512() -> Run:
    """llama_405b on 64 nodes of 8 H200 GPUs.

    trellis plan llama_405b_h200_512 --on 64x8xH200
    """
    remat = Remat(policy="saved", names=("query", "key", "value", "attention"))
    return dataclasses.replace(llama_405b(), name="llama_405b_h200_512", batch_size=512, remat=remat)
