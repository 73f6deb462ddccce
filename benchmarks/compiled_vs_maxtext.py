"""Trellis's own train step compiled for TPU slices, beside MaxText's and a plain JAX step's.

    python benchmarks/compiled_vs_maxtext.py [ROW ...]        all rows if none is named; needs libtpu 0.0.42.*, no TPU

The runs are recipes, with their layouts and compiler options; only sequence length and batch are MaxText's. Two rows
more have the other choice between gathering weights over both sides of a torus at once (fewer predicted seconds on v5e)
and over one after the other (the closed form's bytes).

Nothing runs: both sides are the compiler's figures for the same models, slices, batches, JAX 0.10.2 and libtpu
0.0.42.1. "compute" is libtpu's estimated cycles times loop counts over the clock, without collectives and Pallas
kernels, of which libtpu has no estimate; "kernels" are these, counted alike on both sides: two products for each pair
of a query and a key that see each other forward, as often as the program calls the kernel, five or seven backward (one
kernel or two), and the rows of each expert, whole tiles, all at the chip's peak. "counted" is arguments and temporaries
as libtpu adds them up, which counts what is lost between buffers twice and takes what loops carry for lost; "laid out"
is what it really lays out in memory, code included (of MaxText's the highest point by its memory analysis, which is 1
to 3 % less than what is laid out where both were kept); "wire" is bytes a device sends over links in a step, "sync" the
part that nothing hides; "closed form" is what the layout requires: every weight gathered once forward and once for the
recomputation, every gradient scattered once. MaxText's and the plain step's figures were measured in November 2026 with
MaxText's August 2026 main through its compile-only entry point; rows with MaxText's arguments, by
`workers/compile_maxtext.py`.
"""

import argparse
import dataclasses
import shlex
from pathlib import Path

from tables import aligned

from trellis.plan import compile_run, judge, plan_of, target
from trellis.recipes import load_run

RESULTS = Path(__file__).parent / "results" / "compiled_vs_maxtext.txt"


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another's figures: GiB, seconds and GB on one device; None or 0 for what was not kept."""

    laid_out: float
    compute: float
    wire: float
    sync: float
    counted: float | None = None
    kernels: float | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: unique.
        title: model, slice, layout.
        on: the slice.
        recipe: Trellis's run.
        options: what it differs in from the recipe.
        maxtext: the best of MaxText's settings that were compiled; of the pipeline and the mixture one was.
        plain: a plain JAX step, where one was compiled.
        arguments: MaxText's, where they were kept.
    """

    name: str
    title: str
    on: str
    recipe: str
    options: dict
    maxtext: Peer
    plain: Peer | None = None
    arguments: str = ""


# MaxText's runs compute everything again, but for one, and are short; what llama_8b_v5e_256 has for scatters over one
# side of a torus.
FULL = {"remat.policy": "full", "remat.names": ""}
SHORT = {"data.sequence_length": "4096"} | FULL
SCATTERS = ("xla_enable_async_reduce_scatter_fusion", "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter")
# Kinds of work of which libtpu has no estimate.
KERNELS = ("attention", "kernel", "grouped")
# Of MaxText's arguments: blocks of its attention, and what its own recipes give the compiler, with our vector memory.
BLOCKS = (
    "sa_block_q=1024 sa_block_kv=1024 sa_block_kv_compute=1024 sa_block_q_dkv=1024 sa_block_kv_dkv=1024 "
    "sa_block_kv_dkv_compute=1024 sa_use_fused_bwd_kernel=true"
)
BESIDE = (
    "'compile_xla_flags=--xla_tpu_scoped_vmem_limit_kib=65536 --xla_tpu_enable_async_collective_fusion=true "
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true "
    "--xla_enable_async_all_gather=true --xla_tpu_enable_data_parallel_all_reduce_opt=true "
    "--xla_tpu_data_parallel_opt_different_sized_ops=true'"
)
# Beside Mixtral as its recipe has it, and with less kept.
MIXTRAL = Peer(50.93, 1.070, 367.7, 305.9, counted=59.61, kernels=1.643)
ROWS = (
    Row(
        "1b-fsdp", "1B, v5e 4x4, FSDP 16", "v5e:4x4", "llama32_1b_v5e_16", FULL,
        Peer(4.67, 0.573, 8.8, 5.3, counted=5.20, kernels=0.031), Peer(4.66, 0.563, 10.3, 6.7),
        "compile_topology=v5e-16 compile_topology_num_slices=1 model_name=default override_model_config=true "
        "base_emb_dim=2048 base_num_decoder_layers=16 base_num_query_heads=32 base_num_kv_heads=8 head_dim=64 "
        "base_mlp_dim=8192 vocab_size=128256 logits_via_embedding=false max_target_length=2048 "
        "per_device_batch_size=4 remat_policy=full ici_fsdp_parallelism=16 "
        "compile_xla_flags=--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
    ),
    Row(
        "1b-fsdp-sides", "1B, v5e 4x4, FSDP 4 x 4, side by side", "v5e:4x4", "llama32_1b_v5e_16",
        FULL | {"layout.gather": "per_axis"} | {f"compiler_options.{option}": "true" for option in SCATTERS},
        Peer(4.63, 0.573, 8.8, 5.3),
    ),
    Row(
        "1b-tensor", "1B, v5e 4x4, FSDP 4 x tensor 4", "v5e:4x4", "llama32_1b_v5e_16",
        FULL | {"mesh.data_y": "1", "mesh.model": "4"}
        | {"layout.preset": "fsdp_tensor_sequence", "layout.overlap": "[mlp, heads]"},
        Peer(5.53, 0.719, 23.6, 10.4), Peer(4.02, 0.713, 21.8, 15.3),
    ),
    Row(
        "8b-v5e", "8B, v5e 16x16, FSDP 256", "v5e:16x16", "llama_8b_v5e_256", SHORT,
        Peer(4.39, 1.675, 59.9, 33.2), Peer(4.37, 1.671, 63.0, 36.2),
    ),
    Row(
        "8b-v5e-joint", "8B, v5e 16x16, FSDP 256, both sides at once", "v5e:16x16", "llama_8b_v5e_256",
        SHORT | {"layout.gather": "joint"}, Peer(4.39, 1.675, 59.9, 33.2),
    ),
    Row(
        "8b-v5e-saved", "8B, v5e 16x16, FSDP 256, lighter policy", "v5e:16x16", "llama_8b_v5e_256",
        SHORT | {"remat.policy": "saved"}, Peer(13.88, 1.380, 59.9, 34.2),
    ),
    Row(
        "8b-v5p", "8B, v5p 4x4x4, FSDP 64", "v5p:4x4x4", "llama_8b_v5p_64", SHORT | {"batch_size": "64"},
        Peer(5.58, 0.645, 61.2, 34.7), Peer(5.11, 0.689, 61.2, 61.2),
    ),
    Row(
        "8b-v6e", "8B, v6e 16x16, FSDP 256", "v6e:16x16", "llama_8b_v6e_256", SHORT,
        Peer(4.40, 0.418, 61.9, 34.6), Peer(3.51, 0.529, 61.9, 61.9),
    ),
    Row(
        "8b-stages", "8B, v5p 4x4x4, 4 stages x FSDP 16", "v5p:4x4x4", "llama_8b_v5p_64",
        SHORT | {"batch_size": "256", "layout.preset": "auto", "layout.params": "{}"}
        | {"mesh.stage": "4", "mesh.data": "4", "mesh.data_y": "4", "mesh.data_z": "1"}
        | {"layout.pipeline_groups": "4", "layout.pipeline_microbatches": "16"},
        Peer(18.50, 2.567, 40.7, 26.7, counted=23.52, kernels=0.181),
        arguments="compile_topology=v5p-128 compile_topology_num_slices=1 model_name=llama3-8b "
        "override_model_config=true max_target_length=4096 per_device_batch_size=4 remat_policy=full "
        "ici_fsdp_parallelism=16 ici_pipeline_parallelism=4 num_layers_per_pipeline_stage=2 "
        f"num_pipeline_microbatches=16 pipeline_fsdp_ag_once=true attention=flash packing=false {BLOCKS} {BESIDE}",
    ),
    Row(
        "8b-ring", "8B at 131,072, v5p 4x4x4, FSDP 16 x ring 4", "v5p:4x4x4", "llama_8b_128k_v5p_64",
        {"mesh.data": "16", "mesh.context": "4", "remat.names": "[query, key, value, attention]"},
        Peer(51.51, 9.377, 125.6, 35.0, counted=71.04, kernels=8.585),
        arguments="compile_topology=v5p-128 compile_topology_num_slices=1 model_name=llama3-8b "
        "override_model_config=true max_target_length=131072 per_device_batch_size=0.25 remat_policy=custom "
        "query_proj=device key_proj=device value_proj=device context=device ici_fsdp_parallelism=16 "
        "ici_context_parallelism=4 context_parallel_strategy=ring use_tokamax_splash=true attention=flash "
        f"packing=false {BLOCKS.replace('sa_use_fused_bwd_kernel=true', 'sa_block_q_dq=1024 sa_block_kv_dq=1024')} "
        f"{BESIDE}",
    ),
    Row(
        "mixtral", "Mixtral 8x7B, v5p 4x4x4, 8,192 tokens a chip", "v5p:4x4x4", "mixtral_8x7b_v5p_64", {},
        MIXTRAL,
        arguments="compile_topology=v5p-128 compile_topology_num_slices=1 model_name=mixtral-8x7b "
        "override_model_config=true max_target_length=8192 per_device_batch_size=1 remat_policy=custom "
        "query_proj=device key_proj=device value_proj=device context=device moe_mlpwi_0=device moe_mlpwi_1=device "
        "ici_fsdp_parallelism=64 attention=flash packing=false sparse_matmul=true megablox=true "
        f"load_balance_loss_weight=0.02 {BLOCKS} {BESIDE}",
    ),
    Row(
        "mixtral-less", "the same, less kept", "v5p:4x4x4", "mixtral_8x7b_v5p_64",
        {"remat.names": "[query, key, value, attention, mlp_up]"},
        MIXTRAL,
    ),
)  # fmt: skip


def measure(row: Row) -> list[str]:
    """Trellis's line of a row."""
    run, on = load_run(row.recipe, row.options), target(row.on)
    prog, compiled = compile_run(run, on, progress=True)
    plan = plan_of(prog, on)
    verdict = judge(plan, prog, compiled)
    if verdict.ledger is None or verdict.scheduled is None:
        return ["Trellis", "", f"does not fit, by {compiled.excess / 2**30:.2f} GiB", "", "", "", "", ""]
    kernels = sum(line.flops for line in plan.times.lines if line.kind in KERNELS) / on.chip.bf16_flops
    wire = sum(r.total for r in verdict.ledger.rows) / 1e9
    sync = sum(r.total for r in verdict.ledger.rows if "asynchronous" not in r.note) / 1e9
    closed = sum(r.total for r in plan.ledger.rows) / 1e9
    bound = plan.model_flops / on.num_devices / ((verdict.scheduled + kernels) * on.chip.bf16_flops)
    return [
        "Trellis", f"{(compiled.memory['arguments'] + compiled.memory['temporaries']) / 2**30:.2f}",
        f"{compiled.peak / 2**30:.2f}", f"{verdict.scheduled:.3f}", f"{kernels:.3f}", f"{bound:.0%}",
        f"{wire:.1f} ({sync:.1f})", f"{closed:.1f}",
    ]  # fmt: skip


def of_peer(who: str, peer: Peer) -> tuple[str, ...]:
    """The same of another."""
    counted, kernels = ("" if x is None else f"{x:.{digits}f}" for x, digits in ((peer.counted, 2), (peer.kernels, 3)))
    wire = f"{peer.wire:.1f} ({peer.sync:.1f})"
    return who, counted, f"{peer.laid_out:.2f}", f"{peer.compute:.3f}", kernels, "", wire, ""


def main(names: list[str]) -> None:
    """Compiles the named rows and writes the table; rows that are not named keep their lines."""
    kept: dict[str, list[str]] = {}
    if RESULTS.exists():
        for line in RESULTS.read_text().splitlines():
            if line.startswith("# row "):
                name, _, cells = line.removeprefix("# row ").partition(": ")
                kept[name] = cells.split(" | ")
    for row in ROWS:
        if not names or row.name in names:
            kept[row.name] = measure(row)
            _write(kept)
    print(RESULTS.read_text())


def _write(kept: dict[str, list[str]]) -> None:
    from importlib.metadata import version

    lines = []
    for row in ROWS:
        for who, peer in (("MaxText", row.maxtext), ("plain JAX", row.plain)):
            if peer:
                lines.append((row.title, *of_peer(who, peer)))
        if row.name in kept:
            lines.append((row.title, *kept[row.name]))
    header = (
        "model, slice, layout",
        "who",
        "counted GiB",
        "laid out GiB",
        "compute s",
        "kernels s",
        "bound on MFU",
        "wire GB (sync)",
        "closed form GB",
    )
    text = [
        f"jax {version('jax')}, libtpu {version('libtpu')}; compiler's figures, nothing ran",
        "",
        aligned(header, lines, right=range(2, 9)),
        "",
        *(
            f"{row.name}: {shlex.join([row.recipe, *(w for k, v in row.options.items() for w in (f'--{k}', v))])}"
            for row in ROWS
        ),
        "",
        *(f"MaxText, {row.name}: {row.arguments}" for row in ROWS if row.arguments),
        "",
        *(f"# row {name}: {' | '.join(cells)}" for name, cells in kept.items()),
    ]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=(every := ", ".join(row.name for row in ROWS)))
    args = parser.parse_args()
    if absent := set(args.rows) - {row.name for row in ROWS}:
        parser.error(f"no row {' '.join(sorted(absent))}; there are {every}")
    main(args.rows)
