"""What a run cannot be on its mesh is said before anything is traced, by the command, with the field to change."""

import dataclasses
import json
import math

import pytest

from tests.models.small import CONFIGS
from tests.train.small import trellis
from trellis.nn.moe import Routing
from trellis.run.schema import plain

pytestmark = pytest.mark.usefixtures("own_cache")


def _mixture(way: str):
    mixtral = CONFIGS["mixtral"]
    return dataclasses.replace(mixtral, routing=dataclasses.replace(mixtral.routing, way=way))


def _windows():
    """Three pairs of layers, of which one sees a window."""
    return dataclasses.replace(CONFIGS["gpt_oss"], layers=6, vocab=260, routing=Routing(balance_over="sequence"))


REFUSED = {
    "parts of a batch": (
        {"batch_size": 12, "mesh.stage": 2, "mesh.data": 2, "layout.pipeline_microbatches": 4},
        "The number of pipeline microbatches must divide each device's share of the batch.",
        "pipeline_microbatches=4 of batch_size=12, over data=2",
        "layout.pipeline_microbatches",
        "use 1, 2, 3 or 6, or leave it out",
    ),
    "parts of a microbatch": (
        {"batch_size": 12, "microbatches": 3, "mesh.stage": 2, "mesh.data": 2, "layout.pipeline_microbatches": 4},
        "The number of pipeline microbatches must divide each device's share of the batch.",
        "pipeline_microbatches=4 of batch_size=4 in each of 3 microbatches, over data=2",
        "layout.pipeline_microbatches",
        "use 1 or 2, or leave it out",
    ),
    "groups of layers": (
        {"model.layers": 4, "batch_size": 12, "mesh.stage": 2, "mesh.data": 2, "layout.pipeline_microbatches": 3,
         "layout.pipeline_groups": 2},
        "With several groups of layers on a stage, the stages must divide the pipeline's microbatches.",
        "3 parts of a batch through stage=2, pipeline_groups=2",
        "layout.pipeline_microbatches",
        "use a multiple of 2, or --layout.pipeline_groups 1",
    ),
    "layers over two axes": (
        {"model.layers": 4, "mesh.stage": 2, "mesh.data": 2, "layout.compute.layers": "stage/data"},
        "A pipeline can use only one mesh axis.",
        "layers over stage/data",
        "layout.compute.layers",
        "use --layout.compute.layers stage",
    ),
    "a width of other fields": (
        {"model": dataclasses.replace(CONFIGS["gpt2"], vocab=260), "mesh.data": 3, "batch_size": 12,
         "layout.params.embed": "", "layout.params.head_dim": "data"},
        "Mesh axes must divide the axis that they slice.",
        "head_dim=8 over data=3",
        "`layers.block.attention.qkv`",
        "use --mesh sizes or a number of devices that divide it",
    ),
    "layers that no stages have": (
        {"model.layers": 4, "mesh.data": 3, "batch_size": 12, "layout.params.embed": "",
         "layout.compute.layers": "data"},
        "Mesh axes must divide the axis that they slice.",
        "model.layers=4 over data=3",
        "model.layers",
        "use --model.layers 3 or 6, or --mesh sizes or a number of devices that divide it",
    ),
    "slices of heads": (
        {"mesh.data": 2, "mesh.model": 2, "layout.compute.heads": "", "layout.compute.kv_heads": "",
         "layout.compute.head_dim": "model"},
        "Attention needs each head whole: head_dim cannot be sliced in use.",
        "head_dim over model",
        "layout.compute.head_dim",
        "use --layout.compute.head_dim '', and slice heads instead",
    ),
    "key heads": (
        {"mesh.data": 2, "mesh.model": 2, "layout.preset": "fsdp_tensor", "layout.compute.heads": ""},
        "Key heads must be sliced like query heads, or less if each device's query heads read whole key heads.",
        "heads=4 over nothing, kv_heads=2 over model=2",
        "layout.compute.kv_heads",
        "use --layout.compute.kv_heads ''",
    ),
    "pieces of a sequence": (
        {"data.sequence_length": 24, "mesh.data": 1, "mesh.context": 8},
        "A sequence must split into two equal pieces for each device along the mesh axes of positions.",
        "data.sequence_length=24 over context=8, 16 pieces",
        "data.sequence_length",
        "use --data.sequence_length 16 or 32",
    ),
    "an exchange": (
        {"mesh.data": 1, "mesh.context": 8, "layout.context": "exchange"},
        "The mesh axes of heads and of exchanged positions must together divide the heads.",
        "model.heads=4 over context=8",
        "layout.context",
        "use --layout.context ring or gather, or sizes of these mesh axes that divide the heads",
    ),
    "the order of positions": (
        {"mesh.data": 2, "mesh.context": 2, "mesh.context_y": 2, "layout.context_y": "exchange",
         "layout.compute.pos": "context_y/context"},
        "Positions must be sliced over ring axes first, then over gather axes, then over exchange axes.",
        "pos over context_y (exchange)/context (ring)",
        "layout.compute.pos",
        "use --layout.compute.pos context/context_y",
    ),
    "a ragged exchange": (
        {"model": _mixture("ragged"), "mesh.data": 2, "mesh.expert": 2},
        "A ragged exchange needs a backend that supports it.",
        "way='ragged' on cpu",
        "model.routing.way",
        "use slots or auto here; tpu and cuda support it",
    ),
    "an exchange of whole tokens": (
        {"model": _mixture("slots"), "mesh.data": 2, "mesh.expert": 2, "layout.compute.batch": "data"},
        "Tokens can be exchanged only along mesh axes that slice both experts and tokens.",
        "slots: experts/expert, tokens/data",
        "model.routing.way",
        "use gather or auto, or slice the batch over these axes too",
    ),
    "uneven layers in a ring": (
        {"model.layers": 3, "mesh.stage": 2, "mesh.data": 2, "mesh.context": 2},
        "Rings in a pipeline need the same number of layers on every stage and in every group.",
        "stages and groups that do not divide the layers, with layout.context",
        "layout.context",
        "use --layout.context exchange or gather, or stages that divide the layers",
    ),
    "uneven layers in overlapped products": (
        {"model.layers": 3, "mesh.stage": 2, "mesh.model": 2, "layout.overlap": "mlp"},
        "Rings in a pipeline need the same number of layers on every stage and in every group.",
        "stages and groups that do not divide the layers, with layout.overlap",
        "layout.overlap",
        "use --layout.overlap '', or stages that divide the layers",
    ),
    "uneven layers that gather under a window": (
        {"model": _windows(), "mesh.stage": 2, "mesh.context": 2, "layout.context": "gather"},
        "Rings in a pipeline need the same number of layers on every stage and in every group.",
        "stages and groups that do not divide the layers, with layout.context under a window of 6",
        "layout.context",
        "use --layout.context exchange, or stages that divide the layers",
    ),
    "layers before the stages in a ring": (
        {"model": CONFIGS["deepseek_v3"], "mesh.stage": 2, "mesh.data": 2, "mesh.context": 2},
        "Layers before the pipeline run on its first stage only, and cannot use a ring.",
        "`first_layers.block.attention.q_up`, with layout.context a ring",
        "layout.context",
        "use --layout.context exchange or gather, or --mesh.stage 1",
    ),
}  # fmt: skip


# Attention and experts go as the layout says where a compiler places the rest, too.
IN_BOTH = "key heads", "pieces of a sequence", "an exchange", "the order of positions", "an exchange of whole tokens"


@pytest.mark.parametrize(
    ("case", "mode"), [(case, "explicit") for case in REFUSED] + [(case, "auto") for case in IN_BOTH]
)
def test_what_a_run_cannot_be_on_its_mesh(case, mode, run_file, tmp_path, capsys):
    options, rule, seen, where, fix = REFUSED[case]
    options = options if mode == "explicit" else options | {"layout.mode": mode}
    devices = math.prod(size for name, size in options.items() if name.startswith("mesh."))
    words = [w for name, value in options.items() for w in (f"--{name}", json.dumps(plain(value)).strip('"'))]
    code, _, err = trellis(capsys, "train", run_file, "--run-dir", tmp_path / "run", "--devices", devices, *words)
    assert (code, err) == (2, f"trellis: {rule}\n  seen:  {seen}\n  where: {where}\n  fix:   {fix}\n")
