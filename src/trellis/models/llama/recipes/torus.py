"""Llamas on TPU slices: FSDP with a mesh axis along each side of the torus.

The options of the TPU's compiler are those that gave its best programs (docs/plan.md).
"""

import dataclasses

from trellis.frozen import FrozenMap
from trellis.models.llama.recipes.large import llama_8b, llama_70b, llama_405b
from trellis.run.config import LayoutChoice, MeshSizes, Remat, Run

# Compiler options with which a v5e, which has no SparseCores, reduces gradients beside computation: sums over two sides
# of the torus at once, and scatters over one. Products get 32 MiB of the vector memory instead of 16.
FUSED_REDUCTIONS = {
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_jf_crs_combiner_threshold_in_bytes": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_scoped_vmem_limit_kib": "32768",
}
FUSED_SCATTERS = {
    "xla_enable_async_reduce_scatter_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": "true",
}


def _beside_computation(gather: str, vector_memory: int) -> dict[str, str]:
    """Compiler options with which the SparseCores of a chip move gathers and reductions beside computation."""
    offload = "xla_tpu_enable_sparse_core_collective_offload"
    options = {f"{offload}_{what}": "true" for what in ("all_gather", gather, "all_reduce", "reduce_scatter")}
    prefer = {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}
    return options | prefer | {"xla_tpu_scoped_vmem_limit_kib": str(vector_memory)}


V5E = FUSED_REDUCTIONS | FUSED_SCATTERS
V5P = _beside_computation("3d_all_gather", 65536)
V5P_AND_TWO_SIDES = V5P | _beside_computation("2d_all_gather", 65536)  # if some gathers are over two of its three
V6E = _beside_computation("2d_all_gather", 98304)


def on_torus(run: Run, name: str, batch_size: int, mesh: MeshSizes, remat: Remat, options: dict[str, str]) -> Run:
    """FSDP over a whole TPU slice, one mesh axis along each dimension of its torus.

    The two tables are sliced by words and not by columns: what is gathered then comes out in order, which saves a copy
    of a gigabyte each. Weights are gathered over one side of the torus after the other, so that their gradients are
    scattered in the same way: over both at once libtpu sums everything (by its layouts and programs; docs/plan.md).

    Args:
        run: the model and its data.
        name: the recipe's.
        batch_size: sequences in a step.
        mesh: sizes of data, data_y and data_z.
        remat: what is kept for the backward pass.
        options: of the TPU's compiler.
    """
    data = "data/data_y/data_z"
    return dataclasses.replace(
        run,
        name=name,
        batch_size=batch_size,
        remat=remat,
        mesh=mesh,
        layout=LayoutChoice(preset="data", params=FrozenMap(vocab=data, embed=data), gather="per_axis"),
        compiler_options=FrozenMap(options),
    )


# The feed-forward block is computed again in the backward pass, attention is not.
ATTENTION_KEPT = Remat(policy="saved", names=("query", "key", "value", "attention"))
MARKED_KEPT = Remat(policy="saved")
# One of the two products before the gate is computed again.
HALF_AGAIN = Remat(policy="saved", names=("query", "key", "value", "attention", "mlp_up"))


def llama_8b_v5e_256() -> Run:
    """llama_8b on a v5e-256 slice, 16 x 16, one sequence a chip.

    trellis plan llama_8b_v5e_256 --on v5e:16x16
    """
    return on_torus(llama_8b(), "llama_8b_v5e_256", 256, MeshSizes(data=16, data_y=16), ATTENTION_KEPT, V5E)


def llama_8b_v5p_64() -> Run:
    """llama_8b on a v5p slice of 64 chips, 4 x 4 x 4, two sequences a chip.

    trellis plan llama_8b_v5p_64 --on v5p:4x4x4
    """
    return on_torus(llama_8b(), "llama_8b_v5p_64", 128, MeshSizes(data=4, data_y=4, data_z=4), MARKED_KEPT, V5P)


def llama_8b_v6e_256() -> Run:
    """llama_8b on a v6e-256 slice, 16 x 16, one sequence a chip.

    trellis plan llama_8b_v6e_256 --on v6e:16x16
    """
    return on_torus(llama_8b(), "llama_8b_v6e_256", 256, MeshSizes(data=16, data_y=16), MARKED_KEPT, V6E)


def llama32_1b_v5e_16() -> Run:
    """The shape of Llama 3.2 1B with untied tables (1.5B parameters), on a v5e slice of 16 chips, 4 x 4.

    trellis plan llama32_1b_v5e_16 --on v5e:4x4
    """
    base = llama_8b()
    return dataclasses.replace(
        base,
        name="llama32_1b_v5e_16",
        model=dataclasses.replace(base.model, embed=2048, layers=16, head_dim=64, mlp=8192),
        data=dataclasses.replace(base.data, sequence_length=2048),
        batch_size=64,
        mesh=MeshSizes(data=4, data_y=4),
        compiler_options=FrozenMap(FUSED_REDUCTIONS),
    )


def llama_70b_v5p_512() -> Run:
    """llama_70b on a v5p slice of 512 chips, 8 x 8 x 8, one sequence a chip.

    trellis plan llama_70b_v5p_512 --on v5p:8x8x8
    """
    return on_torus(llama_70b(), "llama_70b_v5p_512", 512, MeshSizes(data=8, data_y=8, data_z=8), HALF_AGAIN, V5P)


def llama_70b_v6e_256() -> Run:
    """llama_70b on a v6e-256 slice, 16 x 16, one sequence a chip.

    trellis plan llama_70b_v6e_256 --on v6e:16x16
    """
    return on_torus(llama_70b(), "llama_70b_v6e_256", 256, MeshSizes(data=16, data_y=16), Remat(policy="full"), V6E)


def llama_405b_v5p_1024() -> Run:
    """llama_405b on a v5p slice of 1,024 chips, 8 x 8 x 16, one sequence a chip.

    trellis plan llama_405b_v5p_1024 --on v5p:8x8x16
    """
    mesh = MeshSizes(data=8, data_y=8, data_z=16)
    return on_torus(llama_405b(), "llama_405b_v5p_1024", 1024, mesh, Remat(policy="full"), V5P)


def llama_405b_v6e_1024() -> Run:
    """llama_405b on four v6e-256 slices, 16 x 16 each: too many chips for FSDP alone at a batch of two million tokens.

    trellis plan llama_405b_v6e_1024 --on 4xv6e:16x16
    """
    return dataclasses.replace(
        llama_405b(),
        name="llama_405b_v6e_1024",
        batch_size=256,
        mesh=MeshSizes(data=128, context=4, model=2),
        layout=LayoutChoice(preset="auto"),
        remat=Remat(policy="full"),
        compiler_options=FrozenMap(V6E),
    )
