"""What `accelerator.py` checks and measures, in the order of worth. Nothing here needs JAX."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that is checked or measured, in a process of its own.

    Attributes:
        name: unique; results are kept under it.
        work: the function of `work.py` that does it.
        given: its arguments.
        limit: seconds after which it is ended.
        on_cpu: needs no accelerator: JAX is told to leave it alone.
    """

    name: str
    work: str
    given: Mapping[str, object] = dataclasses.field(default_factory=dict)
    limit: float = 150.0
    on_cpu: bool = False


# The shapes that seqax publishes utilisations for, largest last.
SIZES = ("84m", "270m", "540m", "1b", "2b")
# The recipes with their own data's documents unmasked, as the published runs have it.
PLAIN = {"data.mask_documents": "false"}
# What recipes of eight devices need on one of 80 GB.
ALONE = {
    "270m": {"microbatches": "2"},
    "540m": {"microbatches": "2"},
    "1b": {"microbatches": "4"},
    "2b": {"remat.policy": "saved", "microbatches": "2"},
}
# Sequences of a step of the explicit trainer, which has no microbatches, where a preset's 64 need more than 80 GB.
FEWER = {"1b": 32, "2b": 32}
SMALL_LLAMA = {
    "model.vocab": "256", "model.embed": "64", "model.layers": "1", "model.heads": "4", "model.kv_heads": "2",
    "model.head_dim": "16", "model.mlp": "128", "data.sequence_length": "64", "batch_size": "4",
    "layout.preset": "auto",
}  # fmt: skip
# A mixture of the recipes' families in each of their shapes, cut down until a CPU checks it in seconds.
SMALL_MIXTURE = {
    "model.vocab": "256", "model.embed": "64", "model.layers": "2", "model.heads": "4", "model.kv_heads": "2",
    "model.head_dim": "16", "model.mlp": "48", "model.experts": "8", "model.experts_per_token": "2",
    "data.sequence_length": "64", "batch_size": "4", "layout.preset": "auto", "mesh.data": "1",
}  # fmt: skip
LARGER = {"model.embed": "256", "model.mlp": "384", "model.head_dim": "64", "data.sequence_length": "512"}
# Families whose attention has kernels of its own widths and windows, or norms and biases, where Llama's has none.
SMALL_DENSE = {"model.embed": "256", "model.heads": "4", "model.kv_heads": "2", "model.mlp": "512"}
FAMILIES = {
    "gemma3": {
        "model.layers": "5", "model.head_dim": "256", "model.window": "128", "model.global_every": "2",
        "model.query_scale": "192",
    },
    "olmo2": {},
    "qwen2": {},
}  # fmt: skip
# Google's own sizes.
GEMMA3_1B = PLAIN | {
    "model.family": "gemma3", "model.vocab": "262144", "model.embed": "1152", "model.layers": "26", "model.heads": "4",
    "model.kv_heads": "1", "model.head_dim": "256", "model.mlp": "6912", "model.window": "512",
    "model.query_scale": "256", "model.rope_theta": "1e6", "data.sequence_length": "2048", "batch_size": "16",
    "mesh.data": "1", "layout.preset": "fsdp",
}  # fmt: skip
GPT2 = PLAIN | {"batch_size": "64", "mesh.data": "1", "remat.policy": "none"}
# As many layers of the recipes of mixtures as one device holds.
MIXTURES = {
    "gpt-oss, 2 layers": ("gpt_oss_20b", {"model.layers": "2", "model.vocab": "32768"}),
    "qwen3, 3 layers": ("qwen3_30b_a3b", {"model.layers": "3", "model.vocab": "32768"}),
    "mixtral, 1 layer": ("mixtral_8x7b", {"model.layers": "1"}),
}
ONE_DEVICE = {"mesh.data": "1", "batch_size": "8", "microbatches": "2", "remat.policy": "saved"}
# Rows, inner, columns and groups of experts' products: Mixtral's, Qwen3's and GPT-OSS's.
GROUPED = [(16_384, 4096, 14_336, 8), (131_072, 2048, 768, 128), (65_536, 2880, 2880, 32)]

# Without what a CPU's compiler changes: types that it has no products in, gathers that it makes once for both passes.
ONCE = {"precision.compute": "float32", "remat.policy": "none"}

# What a search may choose besides checkpointing and microbatches: sequences in a batch, and the type at rest. 8B may
# keep parameters and optimizer, 90 GiB in float32, in bfloat16.
BATCHES = {"1b": (32, 64, 128), "8b": (1, 2, 4, 8, 16)}
TYPES = {"1b": ("float32",), "8b": ("bfloat16", "float32")}
# With which XLA for GPUs takes all sums in one order.
IN_ORDER = {"xla_gpu_exclude_nondeterministic_ops": "True"}
# Compiler options tried on the best 1B, where time is left.
FLAGS = {
    "in one order": IN_ORDER,
    "without Triton products": {"xla_gpu_enable_triton_gemm": "False"},
    "without command buffers": {"xla_gpu_enable_command_buffer": ""},
    "all tilings of products": {"xla_gpu_exhaustive_tiling_search": "True"},
}
RANKS = (1, 2, 3)
# Seconds that a program alone is measured for, and at toy sizes, where nobody reads the figure.
MEASURED, MEASURED_TOY = 1.0, 0.01


def checks(toy: bool) -> list[Row]:
    """What must hold before a figure means anything."""
    small = {"data.sequence_length": "64", "batch_size": "4"} if toy else {"batch_size": "2"}
    sizes = SMALL_LLAMA if toy else {"model.layers": "2", "model.kv_heads": "4", "layout.preset": "auto"}
    step = {"recipe": "llama_84m", "options": sizes | small, "types": ("bfloat16",) if toy else ("bfloat16", "float32")}
    repeated = {"recipe": "llama_84m", "options": step["options"] | ({} if toy else {"batch_size": "8"})}
    ordered = repeated | {"options": repeated["options"] | {f"compiler_options.{k}": v for k, v in IN_ORDER.items()}}
    machine = {"size": 256 if toy else 8192, "megabytes": 8 if toy else 1024, "cpu_too": toy}
    machine |= {"at_least": MEASURED_TOY if toy else MEASURED}
    kernels = {"batch": 2, "pos": 64 if toy else 1024, "head_dims": (16,) if toy else (64, 128, 256)}
    loss = {"tokens": 64, "embed": 32, "vocab": 96} if toy else {"tokens": 2048, "embed": 1024, "vocab": 32_768}
    experts = SMALL_MIXTURE | ({"data.sequence_length": "32"} if toy else LARGER)
    grouped = [(64, 32, 48, 4)] if toy else [(2000, 512, 384, 8), (4096, 256, 320, 64)]
    return [
        Row(name="machine", work="machine", given=machine),
        Row(name="check attention", work="check_attention", given=kernels),
        Row(name="check loss", work="check_loss", given=loss),
        Row(name="check step", work="check_step", given=step),
        Row(name="check repeat", work="check_repeat", given=repeated),
        *([] if toy else [Row(name="check repeat in one order", work="check_repeat", given=ordered)]),
        Row(name="check grouped", work="check_grouped", given={"shapes": grouped}),
        *(
            Row(
                name=f"check {recipe}",
                work="check_step",
                given={"recipe": recipe, "options": experts, "types": step["types"]},
            )
            for recipe in ("gpt_oss_20b", "qwen3_30b_a3b")[: 1 if toy else 2]
        ),
        *(
            Row(
                name=f"check {family}",
                work="check_step",
                given=step | {"options": step["options"] | SMALL_DENSE | options | {"model.family": family}},
            )
            for family, options in ({} if toy else FAMILIES).items()
        ),
        Row(name="check fp8", work="check_step", given=step | {"types": ("fp8",)}),
        Row(name="check ledger", work="check_ledger", given={"recipe": "llama_84m", "options": sizes | small | ONCE}),
    ]


def planned(size: str, toy: bool, on: str | None) -> Row:
    """The planner's search for one device, over batches and types at rest; on the host's CPU."""
    recipe, options = ("llama_1b", PLAIN) if size == "1b" else ("llama_8b", PLAIN | {"data.sequence_length": "4096"})
    given = {"recipe": recipe, "options": options | (SMALL_LLAMA if toy else {}), "on": on}
    given |= {"batches": (4,) if toy else BATCHES[size], "types": ("float32",) if toy else TYPES[size]}
    return Row(
        name=f"plan {size}", work="search_settings", given=given | {"most": 2 if toy else 6}, limit=400, on_cpu=True
    )


def found(size: str, rank: int, **more: object) -> Row:
    """A step with settings that the search found: 1 is the fastest, 2 and 3 the fastest with room to spare."""
    given = {"settings": f"plan {size}", "rank": rank, **more}
    return Row(name=f"{size}, search {rank}", work="train_found", given=given, limit=240)


def recipe(size: str) -> Row:
    """A step of a recipe as it is, or as far as one device has room for what eight hold together."""
    return Row(
        name=f"llama_{size}",
        work="train_recipe",
        given={"recipe": f"llama_{size}", "options": ALONE.get(size, {})},
    )


def explicit(size: str, toy: bool) -> Row:
    """A step of `examples/explicit_train.py`, of as many sequences as one device has room for."""
    given = {"preset": "tiny" if toy else size, "rows": None if toy else FEWER.get(size)}
    return Row(name=f"explicit {size}", work="train_explicit", given=given)


def mixture(name: str) -> Row:
    """A step of some layers of a mixture, with a profile."""
    recipe, options = MIXTURES[name]
    given = {"recipe": recipe, "options": PLAIN | ONE_DEVICE | {"layout.preset": "fsdp"} | options, "profile": True}
    return Row(name=name, work="train_recipe", given=given)


def all_rows(toy: bool, on: str | None) -> list[Row]:
    """Every row, in the order of worth.

    Args:
        toy: at sizes that a CPU does in seconds, one of each kind.
        on: the hardware that is planned for, as in "1xH200"; None is the device that the row `machine` found.
    """
    attention = [(2, 64, 4, 2, 16)] if toy else [(64, 1024, 16, 16, 128), (8, 4096, 32, 8, 128), (4, 8192, 32, 8, 128)]
    loss = [(128, 32, 96)] if toy else [(65_536, 2048, 32_768), (16_384, 4096, 128_256)]
    grouped = [(64, 32, 48, 4)] if toy else GROUPED
    torch = SMALL_LLAMA if toy else {"batch_size": "16"}  # it keeps every activation, and has no microbatches
    measured = {"at_least": MEASURED_TOY if toy else MEASURED}
    alone = [
        Row(name="attention alone", work="attention_alone", given={"shapes": attention, **measured}),
        Row(name="loss alone", work="loss_alone", given={"shapes": loss, **measured}),
        Row(name="grouped alone", work="grouped_alone", given={"shapes": grouped, **measured}),
    ]
    peer = Row(name="torch 1b", work="train_torch", given={"recipe": "llama_1b", "options": torch}, limit=240)
    first = [*checks(toy), planned("1b", toy, on), found("1b", 1, profile=True)]
    if toy:
        return [*first, explicit("84m", toy), *alone, peer]
    return [
        *first,
        recipe("1b"),
        planned("8b", toy, on),
        found("8b", 1, profile=True),
        explicit("1b", toy),
        peer,
        *alone,
        *(mixture(name) for name in MIXTURES),
        Row(name="gemma3 1b", work="train_recipe", given={"recipe": "llama_1b", "options": GEMMA3_1B, "profile": True}),
        Row(name="gpt2 124m", work="train_recipe", given={"recipe": "gpt2_small", "options": GPT2, "profile": True}),
        *(found(size, rank) for rank in RANKS[1:] for size in ("1b", "8b")),
        *(row for size in ("2b", "540m", "270m", "84m") for row in (recipe(size), explicit(size, toy))),
        *(
            dataclasses.replace(
                found("1b", 1, options={f"compiler_options.{k}": v for k, v in flags.items()}), name=f"1b {name}"
            )
            for name, flags in FLAGS.items()
        ),
    ]
