"""Llamas from 84M to 70B parameters on a token store of the user's.

The five smallest have the shapes that seqax publishes utilisations for on 8 A100 GPUs; its configurations are the
source of the sizes, the batch, the steps and the learning rates. They use one key and value head for each query head
and a wide feed-forward layer. Parameters in blocks are without the two tables of the vocabulary.
"""

import dataclasses

from trellis.frozen import FrozenMap
from trellis.models import Llama3Scaling, LlamaConfig
from trellis.optim.config import AdamW, Cosine
from trellis.run.config import CheckpointRule, Evaluation, LayoutChoice, MeshSizes, Remat, Run
from trellis.run.data import Data, StoreSource


def llama_84m() -> Run:
    """67M parameters in blocks, 84M with one of the two tables; 1.7 billion tokens.

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
        remat=Remat(policy="saved"),
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

    trellis train llama_270m --data.source.path tokens
    """
    return _wider("llama_270m", 92_000, 3e-4, 9200, embed=1024, mlp=8192)


def llama_540m() -> Run:
    """537M parameters in blocks, 12 billion tokens.

    trellis train llama_540m --data.source.path tokens
    """
    return _wider("llama_540m", 185_000, 3e-4, 4000, embed=2048, mlp=8192)


def llama_1b() -> Run:
    """0.94B parameters in blocks, 24 billion tokens.

    trellis train llama_1b --data.source.path tokens
    """
    return _wider("llama_1b", 370_000, 1e-5, 10_000, embed=2048, mlp=16_384)


def llama_2b() -> Run:
    """1.9B parameters in blocks, 48 billion tokens.

    trellis train llama_2b --data.source.path tokens
    """
    return _wider("llama_2b", 740_000, 1e-5, 10_000, embed=4096, mlp=16_384)


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


def _on_torus(run: Run, name: str, batch_size: int, mesh: MeshSizes, **options: str) -> Run:
    """FSDP over a whole TPU slice, one mesh axis along each dimension of its torus, full recomputation.

    The two tables are sliced by words and not by columns: what is gathered then comes out in order and is not copied,
    a gigabyte each. Weights are gathered over one side of the torus after the other, so that their gradients are
    scattered so: over both at once libtpu sums everything (by its layouts and programs; docs/plan.md).

    Args:
        run: the model and its data.
        name: the recipe's.
        batch_size: sequences in a step.
        mesh: sizes of data, data_y and data_z.
        **options: of the TPU's compiler.
    """
    data = "data/data_y/data_z"
    return dataclasses.replace(
        run,
        name=name,
        batch_size=batch_size,
        remat=Remat(policy="full"),
        mesh=mesh,
        layout=LayoutChoice(preset="data", params=FrozenMap(vocab=data, embed=data), gather="per_axis"),
        compiler_options=FrozenMap(options),
    )


# Compiler options with which a v5e, which has no SparseCores, reduces gradients beside computation: sums over two sides
# of the torus at once, and scatters over one. Products get 32 MiB of the vector memory instead of 16.
_FUSED_REDUCTIONS = {
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_jf_crs_combiner_threshold_in_bytes": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_scoped_vmem_limit_kib": "32768",
}
_FUSED_SCATTERS = {
    "xla_enable_async_reduce_scatter_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": "true",
}


def llama_8b_v5e_256() -> Run:
    """llama_8b on a v5e-256 slice, 16 x 16, one sequence a chip.

    trellis plan llama_8b_v5e_256 --on v5e:16x16
    """
    options = _FUSED_REDUCTIONS | _FUSED_SCATTERS
    return _on_torus(llama_8b(), "llama_8b_v5e_256", 256, MeshSizes(data=16, data_y=16), **options)


def llama_8b_v5p_64() -> Run:
    """llama_8b on a v5p slice of 64 chips, 4 x 4 x 4, two sequences a chip.

    trellis plan llama_8b_v5p_64 --on v5p:4x4x4
    """
    mesh = MeshSizes(data=4, data_y=4, data_z=4)
    options = _beside_computation("3d_all_gather") | {"xla_tpu_scoped_vmem_limit_kib": "65536"}
    return _on_torus(llama_8b(), "llama_8b_v5p_64", 128, mesh, **options)


def _beside_computation(gather: str) -> dict[str, str]:
    """Compiler options with which the SparseCores of a chip move gathers and reductions beside computation."""
    offload = "xla_tpu_enable_sparse_core_collective_offload"
    options = {f"{offload}_{what}": "true" for what in ("all_gather", gather, "all_reduce", "reduce_scatter")}
    return options | {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}


def llama_8b_v6e_256() -> Run:
    """llama_8b on a v6e-256 slice, 16 x 16, one sequence a chip.

    trellis plan llama_8b_v6e_256 --on v6e:16x16
    """
    mesh = MeshSizes(data=16, data_y=16)
    options = _beside_computation("2d_all_gather") | {"xla_tpu_scoped_vmem_limit_kib": "98304"}
    return _on_torus(llama_8b(), "llama_8b_v6e_256", 256, mesh, **options)


def llama32_1b_v5e_16() -> Run:
    """The shape of Llama 3.2 1B with a table for each end (1.5B parameters), on a v5e slice of 16 chips, 4 x 4.

    trellis plan llama32_1b_v5e_16 --on v5e:4x4
    """
    base = llama_8b()
    return dataclasses.replace(
        base,
        name="llama32_1b_v5e_16",
        model=dataclasses.replace(base.model, embed=2048, layers=16, head_dim=64, mlp=8192),
        data=dataclasses.replace(base.data, sequence_length=2048),
        batch_size=64,
        remat=Remat(policy="full"),
        mesh=MeshSizes(data=4, data_y=4),
        compiler_options=FrozenMap(_FUSED_REDUCTIONS),
    )


def llama_70b() -> Run:
    """The shape of Llama 3.1 70B, on 32 nodes of 8 H100 GPUs: tensor parallel inside a node, FSDP across nodes.

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
        remat=Remat(policy="full"),
        mesh=MeshSizes(model=8),
        layout=LayoutChoice(preset="fsdp_tensor_sequence"),
    )


def llama_70b_v5p_512() -> Run:
    """llama_70b on a v5p slice of 512 chips, 8 x 8 x 8: FSDP over two dimensions of its torus, tensor over the third.

    trellis plan llama_70b_v5p_512 --on v5p:8x8x8
    """
    return dataclasses.replace(llama_70b(), name="llama_70b_v5p_512", mesh=MeshSizes(data=8, data_y=8, model=8))
