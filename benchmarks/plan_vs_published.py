"""Predicted against published training speed, row by row, with the error.

    python benchmarks/plan_vs_published.py

Nothing runs and nothing is compiled: the quick plan of the same model on the same hardware, with the batch, sequence
length and checkpointing that the source says (or, where it does not say, the lightest that fits). Published figures
are other systems' own: a prediction below them says that the model of the hardware is pessimistic, one above them
that a system leaves something on the table, or that the model is optimistic. Utilisations count attention's causal
half; sources that count all of it are compared by tokens a second.

Trellis's step has a fused attention kernel and a loss in chunks. seqax has neither: its scores and logits go through
memory in float32 and are made again in the backward pass. That is counted for its rows, see `plain_seconds`.
"""

import argparse
import dataclasses
import statistics
from pathlib import Path

from tables import aligned

from trellis.plan import quick_plan, target
from trellis.recipes import load_run

RESULTS = Path(__file__).parent / "results" / "plan_vs_published.txt"

# Options that the published TPU runs of v6e and v5p carry: collectives move beside computation.
HIDING = (
    "xla_tpu_enable_sparse_core_collective_offload_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One published figure: tokens a second and device, or a utilisation.

    Attributes:
        system: who published it, and the model.
        recipe, on, options: what is planned.
        tokens, mfu: the figure, one of them.
        hides: compiler options that move collectives beside computation.
        plain: attention without a kernel, a loss without chunks, a loop over layers.
        own: the layout is Trellis's for the same work, not the one published: the figure is to be exceeded, and says
            nothing of the prediction.
    """

    system: str
    recipe: str
    on: str
    options: dict
    tokens: float | None = None
    mfu: float | None = None
    hides: tuple[str, ...] = ()
    plain: bool = False
    own: bool = False


# Bytes that go through memory for each score of plain attention: forward, a product writes them (4), the largest is
# found (4), exponentials are summed (4) and divided (4 + 4), cast (4 + 2) and read by a product (2); all of it again in
# the backward pass, whose own gradients are written (4), meet the probabilities (4 + 4, twice) and are read twice (8).
SCORE_BYTES = 2 * 28 + 28
# The same for each logit of a loss that is not in chunks, made once.
LOGIT_BYTES = 36
# What a loop over layers keeps is copied to a stack and back: read and written twice, which took 1.6 times as long as
# streamed bytes on an H200 (benchmarks/results/accelerator_h200.txt).
COPIES = 4 * 1.6


def plain_seconds(plan, run) -> float:
    """What attention without a kernel, a loss without chunks and a loop over layers take longer than Trellis's, on one
    device, where layers are written out.

    Scores are the whole square, masked and not skipped: two products forward, two again, and four backward.
    """
    chip, model = plan.target.chip, run.model
    rows = plan.tokens / run.data.sequence_length / plan.target.num_devices
    scores = rows * model.heads * run.data.sequence_length**2 * model.layers
    memory = scores * SCORE_BYTES / chip.streaming_bandwidth
    filled = model.head_dim / (model.head_dim + chip.fill)  # of the rate, with so few terms of a sum
    products = 8 * 2 * scores * model.head_dim / (chip.bf16_flops * chip.matmul_efficiency * filled)
    kernels = sum(line.seconds for line in plan.times.lines if line.kind == "attention")
    logits = plan.tokens / plan.target.num_devices * model.vocab * LOGIT_BYTES
    kept = sum(buffer.num_bytes for buffer in plan.memory.kept if buffer.kind == "activations")
    return memory + products - kernels + (logits + COPIES * kept) / chip.streaming_bandwidth


LLAMA2_7B = {
    "model.vocab": "32000", "model.embed": "4096", "model.layers": "32", "model.heads": "32", "model.kv_heads": "32",
    "model.head_dim": "128", "model.mlp": "11008", "data.sequence_length": "4096", "microbatches": "1",
}  # fmt: skip


def _llama2_7b(**more) -> dict:
    return LLAMA2_7B | {name.replace("__", "."): value for name, value in more.items()}


def _llama2_70b(**more) -> dict:
    return {
        "model.vocab": "32000", "data.sequence_length": "4096", "microbatches": "1",
    } | {name.replace("__", "."): value for name, value in more.items()}  # fmt: skip


ONE = {"microbatches": "1"}
SAVED = ONE | {"remat.policy": "saved", "remat.names": ""}


def _in_a_ring(length: int) -> dict:
    """One sequence in slices on eight devices, keys and values in a ring."""
    ring = {"layout.preset": "auto", "mesh.data": "1", "mesh.context": "8"}
    return SAVED | ring | {"batch_size": "1", "data.sequence_length": str(length)}


ROWS = (
    Row("seqax, 84M", "llama_84m", "8xA100", SAVED, mfu=0.14, plain=True),
    Row("seqax, 270M", "llama_270m", "8xA100", SAVED, mfu=0.24, plain=True),
    Row("seqax, 540M", "llama_540m", "8xA100", SAVED, mfu=0.35, plain=True),
    Row("seqax, 1B", "llama_1b", "8xA100", SAVED, mfu=0.416, plain=True),
    Row("seqax, 2B", "llama_2b", "8xA100", SAVED, mfu=0.507, plain=True),
    Row("seqax, 1B", "llama_1b", "4x8xA100", SAVED, mfu=0.324, plain=True),
    Row("KempnerForge, 7B", "llama_8b", "1xH200", _llama2_7b(batch_size="4", remat__policy="full"), tokens=10_471),
    Row("MaxText, Llama 2 7B", "llama_8b", "8xH100", _llama2_7b(batch_size="16", remat__policy="saved"), tokens=11_361),
    Row(
        "torchtitan, Llama 3 8B", "llama_8b", "8xH100",
        ONE | {"batch_size": "8", "data.sequence_length": "8192", "remat.policy": "saved"}, tokens=6_667,
    ),
    Row("torchtitan, 8B at 32,768", "llama_8b", "8xH100", _in_a_ring(32_768), tokens=3_890, own=True),
    Row(
        "torchtitan, 8B at 262,144", "llama_8b", "8xH100",
        _in_a_ring(262_144) | {"remat.names": "[query, key, value, attention]"}, tokens=548, own=True,
    ),
    Row(
        "torchtitan, Llama 3 8B", "llama_8b", "8x8xA100",
        ONE | {"batch_size": "64", "data.sequence_length": "8192", "remat.policy": "saved"}, tokens=2_973,
    ),
    Row(
        "fms-fsdp, Llama 2 7B", "llama_8b", "16x8xA100", _llama2_7b(batch_size="256", remat__policy="none"),
        tokens=3_760,
    ),
    Row(
        "MaxText, Llama 3 8B", "llama_8b", "v6e:2x4",
        ONE | {"batch_size": "24", "data.sequence_length": "8192", "remat.policy": "full"}, tokens=7_139, hides=HIDING,
    ),
    Row(
        "MaxText, Llama 3 8B", "llama_8b", "v6e:16x16",
        ONE | {"batch_size": "768", "data.sequence_length": "8192", "remat.policy": "full",
               "mesh.data": "16", "mesh.data_y": "16"}, tokens=7_207, hides=HIDING,
    ),
    Row(
        "MaxText, Llama 3 70B", "llama_70b", "v6e:16x16",
        ONE | {"batch_size": "512", "data.sequence_length": "8192", "remat.policy": "full", "remat.names": "",
               "mesh.data": "16", "mesh.data_y": "16"}, tokens=960, hides=HIDING,
    ),
    Row(
        "MaxText, Llama 2 70B", "llama_70b", "v5p:8x8x8",
        _llama2_70b(batch_size="2048", remat__policy="full", remat__names="", mesh__data="8", mesh__data_y="8",
                    mesh__data_z="8"), tokens=692, hides=HIDING,
    ),
    Row(
        "AXLearn, Llama 2 7B", "llama_8b", "v5p:4x8x8",
        _llama2_7b(batch_size="1024", remat__policy="saved", mesh__data="4", mesh__data_y="8", mesh__data_z="8"),
        mfu=0.645, hides=HIDING,
    ),
)  # fmt: skip


def main() -> None:
    """Prints the table and writes it beside the other results."""
    lines, errors = [], []
    for row in ROWS:
        run = load_run(row.recipe, row.options)
        plan = quick_plan(run, target(row.on), options=row.hides)
        slower = 1 + (plain_seconds(plan, run) / plan.seconds if row.plain else 0.0)
        tokens, mfu = plan.tokens_per_second / plan.target.num_devices / slower, plan.mfu / slower
        said, found = (row.tokens, tokens) if row.tokens else (row.mfu, mfu)
        error = found / said - 1
        if not row.own:
            errors.append(error)
        lines.append(
            (
                row.system, row.on, f"{row.tokens:,.0f}" if row.tokens else "", f"{tokens:,.0f}",
                f"{row.mfu:.1%}" if row.mfu else "", f"{mfu:.1%}", f"{error:+.0%}",
                f"{plan.memory.peak / 2**30:.0f} GiB" + ("" if plan.fits else ", over"), plan.times.binding,
            )
        )  # fmt: skip
    header = ("who, model", "on", "tokens/s/device", "predicted", "MFU", "predicted", "error", "memory", "waits for")
    table = aligned(header, lines, right=(2, 3, 4, 5, 6, 7))
    middle = statistics.median(abs(error) for error in errors)
    mean = statistics.mean(errors)
    foot = f"median error {middle:.0%}, mean {mean:+.0%}, worst {max(errors, key=abs):+.0%}; positive is optimistic"
    foot += "\nin none of these: the two rows of longer sequences, in Trellis's own layout, a ring of eight"
    text = f"{table}\n\n{foot}\n"
    print(text)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
