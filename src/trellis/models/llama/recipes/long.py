"""Llamas trained further on long sequences, of 131,072 and 1,048,576 positions, in slices of positions.

Each continues from a model of 8,192 positions, at a lower learning rate. At 1,048,576 the base of the rotary angles is
the one that a published model of that length was trained with (Llama-3-8B-Instruct-Gradient-1048k: 2.8e9).
"""

import dataclasses

from trellis.frozen import FrozenMap
from trellis.models.llama.recipes.large import llama_8b, llama_70b
from trellis.models.llama.recipes.torus import V5P, V6E
from trellis.optim.config import AdamW
from trellis.run.config import CheckpointRule, Evaluation, LayoutChoice, MeshSizes, Remat, Run

K128, M1 = 131_072, 1_048_576
# Attention's results are kept, since it takes most of the time; its operands too, if there is room.
RESULTS = Remat(policy="saved", names=("attention",))
OPERANDS = Remat(policy="saved", names=("query", "key", "value", "attention"))


def _long(base: Run, name: str, length: int, **changes) -> Run:
    """`base` at a length, for a thousand steps."""
    model = base.model
    if length > K128:
        model = dataclasses.replace(model, rope_theta=2.8e9, rope_scaling=None)
    common = dataclasses.replace(
        base,
        name=name,
        model=model,
        data=dataclasses.replace(base.data, sequence_length=length),
        steps=1000,
        optimizer=AdamW(learning_rate=2e-5),
        schedule=dataclasses.replace(base.schedule, warmup_steps=50),
        layout=LayoutChoice(preset="auto"),
        checkpoints=CheckpointRule(every=100),
        evaluation=Evaluation(every=100, batches=4),
    )
    return dataclasses.replace(common, **changes)


def llama_8b_128k_v5p_64() -> Run:
    """llama_8b at 131,072 positions, on a v5p slice of 64 chips, 4 x 4 x 4.

    trellis plan llama_8b_128k_v5p_64 --on v5p:4x4x4
    """
    return _long(
        llama_8b(), "llama_8b_128k_v5p_64", K128, batch_size=16, mesh=MeshSizes(data=2, context=32),
        remat=Remat(policy="saved", names=(*OPERANDS.names, "mlp_up")), compiler_options=FrozenMap(V5P),
    )  # fmt: skip


def llama_8b_128k_v6e_256() -> Run:
    """llama_8b at 131,072 positions, on a v6e-256 slice, 16 x 16.

    trellis plan llama_8b_128k_v6e_256 --on v6e:16x16
    """
    return _long(
        llama_8b(), "llama_8b_128k_v6e_256", K128, batch_size=32, mesh=MeshSizes(data=16, context=16),
        remat=OPERANDS, compiler_options=FrozenMap(V6E),
    )  # fmt: skip


def llama_8b_128k_h100_32() -> Run:
    """llama_8b at 131,072 positions, on 4 nodes of 8 H100 GPUs.

    trellis plan llama_8b_128k_h100_32 --on 4x8xH100
    """
    return _long(
        llama_8b(), "llama_8b_128k_h100_32", K128, batch_size=8, mesh=MeshSizes(data=8, context=4),
        remat=OPERANDS,
    )  # fmt: skip


def llama_8b_1m_v5p_64() -> Run:
    """llama_8b at 1,048,576 positions, on a v5p slice of 64 chips, 4 x 4 x 4.

    trellis plan llama_8b_1m_v5p_64 --on v5p:4x4x4
    """
    return _long(
        llama_8b(), "llama_8b_1m_v5p_64", M1, batch_size=4, mesh=MeshSizes(data=4, context=16),
        remat=RESULTS, compiler_options=FrozenMap(V5P),
    )  # fmt: skip


def llama_8b_1m_v6e_256() -> Run:
    """llama_8b at 1,048,576 positions, on a v6e-256 slice, 16 x 16.

    trellis plan llama_8b_1m_v6e_256 --on v6e:16x16
    """
    return _long(
        llama_8b(), "llama_8b_1m_v6e_256", M1, batch_size=8, mesh=MeshSizes(data=8, context=32),
        remat=RESULTS, compiler_options=FrozenMap(V6E),
    )  # fmt: skip


def llama_8b_1m_h100_64() -> Run:
    """llama_8b at 1,048,576 positions, on 8 nodes of 8 H100 GPUs.

    trellis plan llama_8b_1m_h100_64 --on 8x8xH100
    """
    return _long(
        llama_8b(), "llama_8b_1m_h100_64", M1, batch_size=4, mesh=MeshSizes(data=4, context=16),
        remat=RESULTS,
    )  # fmt: skip


def llama_70b_128k_v5p_512() -> Run:
    """llama_70b at 131,072 positions, on a v5p slice of 512 chips, 8 x 8 x 8.

    trellis plan llama_70b_128k_v5p_512 --on v5p:8x8x8
    """
    return _long(
        llama_70b(), "llama_70b_128k_v5p_512", K128, batch_size=64, mesh=MeshSizes(data=32, context=16),
        remat=OPERANDS, compiler_options=FrozenMap(V5P),
    )  # fmt: skip


def llama_70b_128k_h200_256() -> Run:
    """llama_70b at 131,072 positions, on 32 nodes of 8 H200 GPUs.

    trellis plan llama_70b_128k_h200_256 --on 32x8xH200
    """
    return _long(
        llama_70b(), "llama_70b_128k_h200_256", K128, batch_size=32, mesh=MeshSizes(data=32, context=8),
        remat=OPERANDS,
    )  # fmt: skip


def llama_70b_1m_v5p_512() -> Run:
    """llama_70b at 1,048,576 positions, on a v5p slice of 512 chips, 8 x 8 x 8.

    trellis plan llama_70b_1m_v5p_512 --on v5p:8x8x8
    """
    return _long(
        llama_70b(), "llama_70b_1m_v5p_512", M1, batch_size=8, mesh=MeshSizes(data=8, context=32, model=2),
        remat=RESULTS, compiler_options=FrozenMap(V5P),
    )  # fmt: skip


def llama_70b_1m_h200_256() -> Run:
    """llama_70b at 1,048,576 positions, on 32 nodes of 8 H200 GPUs.

    trellis plan llama_70b_1m_h200_256 --on 32x8xH200
    """
    return _long(
        llama_70b(), "llama_70b_1m_h200_256", M1, batch_size=8, mesh=MeshSizes(data=8, context=32),
        remat=RESULTS,
    )  # fmt: skip


def llama_70b_128k_v6e_256() -> Run:
    """llama_70b at 131,072 positions, on a v6e-256 slice, 16 x 16.

    trellis plan llama_70b_128k_v6e_256 --on v6e:16x16
    """
    return _long(
        llama_70b(), "llama_70b_128k_v6e_256", K128, batch_size=8, mesh=MeshSizes(data=8, context=32),
        remat=OPERANDS, compiler_options=FrozenMap(V6E),
    )  # fmt: skip


def llama_70b_1m_v6e_256() -> Run:
    """llama_70b at 1,048,576 positions, on a v6e-256 slice, 16 x 16.

    trellis plan llama_70b_1m_v6e_256 --on v6e:16x16
    """
    return _long(
        llama_70b(), "llama_70b_1m_v6e_256", M1, batch_size=1, mesh=MeshSizes(data=1, context=32, model=8),
        remat=RESULTS, compiler_options=FrozenMap(V6E),
    )  # fmt: skip
