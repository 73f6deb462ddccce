import dataclasses
import functools
import math
import re
import typing
from pathlib import Path

import pytest

import trellis
from trellis.errors import UserError
from trellis.models import LinearScaling, Llama3Scaling, Routing, YarnScaling
from trellis.optim import WSD, Adafactor, AdamW, Constant, InverseSqrt, Linear, Lion, Muon
from trellis.recipes import gpt2_small, tiny
from trellis.run.config import (
    AXES,
    BatchSize,
    CheckpointRule,
    Data,
    DeadlineRule,
    Distributed,
    Evaluation,
    LayoutChoice,
    Logging,
    MeshSizes,
    Profile,
    Remat,
    Run,
)
from trellis.run.data import EmbeddedSource, MixturePart, MixtureSource, PartWeight
from trellis.run.lengths import SequenceLength
from trellis.run.overrides import every_field
from trellis.run.schema import fields_of, members, tag_of

LATE = (PartWeight(step=0, weight=1.0), PartWeight(step=20, weight=0.0))


def change(**fields):
    return dataclasses.replace(tiny(), **fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: change(steps=0), ["`steps` must be 1 or more.", "steps=0", "steps", "use 1 or more"]),
        (lambda: change(devices=0), ["`devices` must be 1 or more.", "devices=0", "devices", "use 1 or more"]),
        (
            lambda: change(clip_norm=0.0),
            ["`clip_norm` must be positive.", "0.0", "clip_norm", "use 1.0, or null for no clipping"],
        ),
        *(
            (
                lambda decay=decay: change(ema=decay),
                ["`ema` must be between 0 and 1, in float32 too.", str(decay), "ema", "use a decay such as 0.999"],
            )
            for decay in (1.0, 0.99999999)  # the latter is 1 in float32: the average would stop
        ),
        (
            lambda: change(batch_size=(BatchSize(step=1, size=8),)),
            [
                "Batch sizes must be listed in order of their steps, starting at step 0.",
                "steps 1",
                "batch_size",
                "write [{step: 0, size: 64}, {step: 1000, size: 128}]",
            ],
        ),
        (
            lambda: change(batch_size=(BatchSize(step=0, size=8), BatchSize(step=9, size=6)), microbatches=4),
            [
                "The number of microbatches must divide the batch size.",
                "batch_size=6, microbatches=4",
                "batch_size",
                "use a multiple of 4, as in 8, or --microbatches that divide the batch",
            ],
        ),
        (
            lambda: change(schedule=WSD(warmup_steps=12, decay_steps=10)),
            [
                "The schedule's warmup and decay must fit into the run.",
                "schedule.warmup_steps=12, schedule.decay_steps=10, steps=20",
                "schedule",
                "use --steps 22 or more, or shorten schedule.warmup_steps",
            ],
        ),
        (
            lambda: dataclasses.replace(
                gpt2_small(), data=dataclasses.replace(gpt2_small().data, sequence_length=2048)
            ),
            [
                "A sequence cannot be longer than the model's learned positions.",
                "sequence_length=2048, positions=1024",
                "data.sequence_length",
                "use --data.sequence_length 1024, or a model with more positions",
            ],
        ),
        (
            lambda: Remat(policy="full", names=("attn_out",)),
            [
                "Names of values to keep can be given only with the policies saved and offload.",
                "policy=full, names=attn_out",
                "names",
                "use --remat.policy saved, or --remat.names '' to keep what the policy says",
            ],
        ),
        (
            lambda: CheckpointRule(keep_latest=0),
            ["`keep_latest` must be 1 or more.", "keep_latest=0", "keep_latest", "use 1 or more"],
        ),
        (lambda: Evaluation(batches=0), ["`batches` must be 1 or more.", "batches=0", "batches", "use 1 or more"]),
        (lambda: Logging(every=0), ["`every` must be 1 or more.", "every=0", "every", "use 1 or more"]),
        (lambda: Profile(start=-1), ["`start` must be 0 or more.", "start=-1", "start", "use 0 or more"]),
        (
            lambda: EmbeddedSource(vocab=256),
            [
                "A byte-level vocabulary must have 257 (256 bytes and the end of a document) to 1,000,000 tokens.",
                "256",
                "vocab",
                "use a size in that range, as in 32768",
            ],
        ),
        (
            lambda: change(name="a\n"),
            [
                "A run's name must have 1 to 60 printable characters and no slash: it names the folder.",
                "'a\\n', 2 characters",
                "name",
                "use a word, as in starter; --run-dir sets where the folder is",
            ],
        ),
        (
            lambda: change(name="a/b"),
            [
                "A run's name must have 1 to 60 printable characters and no slash: it names the folder.",
                "'a/b', 3 characters",
                "name",
                "use a word, as in starter; --run-dir sets where the folder is",
            ],
        ),
        (
            lambda: change(devices=5000),
            [
                "A process can drive at most 4,096 devices.",
                "5000",
                "devices",
                "use fewer, or `trellis plan`, which needs none",
            ],
        ),
        (
            lambda: change(profile=Profile(start=20)),
            [
                "Profiling must start at a step of the run.",
                "start=20, steps=20",
                "profile.start",
                "use --profile.start 19 or less",
            ],
        ),
        (
            lambda: change(
                data=Data(
                    source=MixtureSource(parts=(MixturePart(name="a", path="x", weight=LATE),)), sequence_length=8
                )
            ),
            [
                "Every mixture weight must start before the run ends.",
                "a weight of a from step 20 on, steps=20",
                "data.source.parts",
                "use --steps 21 or more, with --until 20 to pause there, or leave that weight out of a new run",
            ],
        ),
        (
            lambda: change(batch_size=(BatchSize(step=0, size=8), BatchSize(step=20, size=16))),
            [
                "Every batch size must start before the run ends.",
                "a size from step 20 on, steps=20",
                "batch_size",
                "use --steps 21 or more, with --until 20 to pause there, or leave that size out of a new run",
            ],
        ),
        (
            lambda: change(layout=LayoutChoice(pipeline_microbatches=2)),
            [
                "`layout.pipeline_microbatches` needs a pipeline of several stages.",
                "pipeline_microbatches=2, mesh.stage=1",
                "layout.pipeline_microbatches",
                "use --mesh.stage 2 or more, or --microbatches to split the batch without a pipeline",
            ],
        ),
        (
            lambda: change(accumulation="sharded"),
            [
                "Sharded accumulation needs a step with several microbatches or pipeline stages.",
                "accumulation=sharded, microbatches=1, mesh.stage=1",
                "accumulation",
                "use --accumulation pending, or --microbatches 2 or more",
            ],
        ),
        (
            lambda: change(mesh=MeshSizes(stage=2), layout=LayoutChoice(mode="auto")),
            [
                "A pipeline needs layout mode explicit: the compiler cannot place its communication.",
                "layout.mode=auto, mesh.stage=2",
                "layout.mode",
                "use --layout.mode explicit, or --mesh.stage 1",
            ],
        ),
        (
            lambda: change(mesh=MeshSizes(stage=2), remat=Remat(policy="offload")),
            [
                "Pipeline stages cannot offload activations to the host.",
                "remat.policy=offload, mesh.stage=2",
                "remat.policy",
                "use --remat.policy saved, or full",
            ],
        ),
        (
            lambda: change(layout=LayoutChoice(pipeline_groups=2)),
            [
                "`layout.pipeline_groups` above 1 needs a pipeline of several stages.",
                "pipeline_groups=2, mesh.stage=1",
                "layout.pipeline_groups",
                "use --mesh.stage 2 or more",
            ],
        ),
        (
            lambda: change(mesh=MeshSizes(stage=2), layout=LayoutChoice(pipeline_groups=2)),
            [
                "Every group of layers on every pipeline stage needs at least one layer.",
                "mesh.stage=2, pipeline_groups=2, model.layers=2",
                "mesh.stage",
                "use numbers of stages and groups whose product is 2 or less",
            ],
        ),
        (
            lambda: LayoutChoice(pipeline_groups=0),
            [
                "`pipeline_groups` must be 1 or more.",
                "pipeline_groups=0",
                "pipeline_groups",
                "use 1 or more",
            ],
        ),
        (
            lambda: LayoutChoice(pipeline_microbatches=0),
            [
                "`pipeline_microbatches` must be 1 or more.",
                "pipeline_microbatches=0",
                "pipeline_microbatches",
                "use 1 or more, or null to have it chosen",
            ],
        ),
        (
            lambda: MixturePart(name="a", path="x", weight=(PartWeight(step=3, weight=1.0),)),
            [
                "Weights must be listed in order of their steps, starting at step 0.",
                "steps 3",
                "weight",
                "write [{step: 0, weight: 0.7}, {step: 1000, weight: 0.3}]",
            ],
        ),
        (
            lambda: MixturePart(name="a", path="x", weight=1.0, epochs=0.0),
            [
                "`epochs` must be positive.",
                "epochs=0.0",
                "epochs",
                "use 1 for one pass, or null to repeat it as long as the run lasts",
            ],
        ),
        (
            lambda: Adafactor(learning_rate=1e-3, decay_exponent=0.0),
            [
                "The exponent of the decay must be above 0 and at most 1.",
                "decay_exponent=0.0",
                "decay_exponent",
                "use 0.8",
            ],
        ),
        (
            lambda: MixtureSource(parts=tuple(MixturePart(name=n, path="x", weight=1.0) for n in ("a/b", "a"))),
            [
                "A part of a mixture cannot be named like a group of other parts, nor have an empty name.",
                "`a/b`, `a`",
                "parts",
                "write web/c4 and web/news, and call no part web",
            ],
        ),
        (
            lambda: MixtureSource(
                parts=(MixturePart(name="a", path="x", weight=1.0), MixturePart(name="a", path="y", weight=1.0))
            ),
            [
                "A mixture needs parts, each with its own name.",
                "a, a",
                "parts",
                "write [{name: web, path: ..., weight: 0.7}, {name: code, path: ..., weight: 0.3}]",
            ],
        ),
        (
            lambda: Data(source=EmbeddedSource(vocab=512), sequence_length=0),
            ["`sequence_length` must be 1 or more.", "sequence_length=0", "sequence_length", "use 1 or more"],
        ),
        (
            lambda: AdamW(learning_rate=0.0),
            ["A learning rate must be positive.", "learning_rate=0.0", "learning_rate", "try 0.0003"],
        ),
        (
            lambda: Lion(learning_rate=1e-4, beta2=1.0),
            [
                "The decay of a moving average must be at least 0 and below 1, in float32 too.",
                "beta2=1.0",
                "beta2",
                "try 0.95",
            ],
        ),
        (
            lambda: AdamW(learning_rate=1e-4, beta2=0.99999999),  # 1 in float32: nothing would be updated
            [
                "The decay of a moving average must be at least 0 and below 1, in float32 too.",
                "beta2=0.99999999",
                "beta2",
                "try 0.95",
            ],
        ),
        (
            lambda: Muon(learning_rate=1e-4, weight_decay=-1.0),
            ["Weight decay cannot be negative.", "weight_decay=-1.0", "weight_decay", "use 0.1, or 0 for none"],
        ),
        (
            lambda: Muon(learning_rate=1e-4, iterations=0),
            ["Newton-Schulz must iterate at least once, and at most 100 times.", "iterations=0", "iterations", "use 5"],
        ),
        (
            lambda: Constant(warmup_steps=-1),
            ["A number of steps cannot be negative.", "warmup_steps=-1", "warmup_steps", "use 0 for no warmup"],
        ),
        (
            lambda: Linear(warmup_steps=0, final_fraction=2.0),
            [
                "The final learning rate must be a fraction of the peak, from 0 to 1.",
                "final_fraction=2.0",
                "final_fraction",
                "use 0.1",
            ],
        ),
        (
            lambda: WSD(warmup_steps=0, decay_steps=0),
            [
                "The decay must take at least one step.",
                "decay_steps=0",
                "decay_steps",
                "use a tenth of the run's steps",
            ],
        ),
        (
            lambda: InverseSqrt(warmup_steps=0),
            [
                "An inverse square root needs a warmup of at least one step.",
                "warmup_steps=0",
                "warmup_steps",
                "use 1 or more",
            ],
        ),
    ],
)
def test_constraints_are_checked_where_they_are_declared(make, message):
    with pytest.raises(UserError) as error:
        make()
    rule, seen, where, fix = message
    assert str(error.value) == f"{rule}\n  seen:  {seen}\n  where: {where}\n  fix:   {fix}"


def test_a_run_is_frozen_and_hashable():
    run = tiny()
    assert hash(run) == hash(tiny()) and run == tiny()
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.steps = 3
    with pytest.raises(AttributeError):
        object.__setattr__(run, "no_such_field", 3)


def configurations(kind=Run) -> set[type]:
    """Every dataclass that a run is made of."""
    found = {kind}
    for field in fields_of(kind).values():
        parts = [part for member in members(field.type) for part in (member, *typing.get_args(member))]
        nested = {cls for part in parts for cls in members(part) if dataclasses.is_dataclass(cls)}
        found |= set().union(*(configurations(cls) for cls in nested))
    return found


@functools.cache
def names_that_are_read() -> set[str]:
    """What the source asks of anything (`run.steps`), and what it gives by name in a call (`f(steps=steps)`)."""
    source = Path(trellis.__file__).parent
    text = "".join(p.read_text() for p in source.rglob("*.py") if "recipes" not in p.relative_to(source).parts)
    asked = re.findall(r"(?<=[\w)\]])\.(\w+)", text)
    given = [name for call in re.findall(r"\b\w+\((.*)", text) for name in re.findall(r"\b(\w+)=\w", call)]
    return {*asked, *given}


@pytest.mark.parametrize("cls", sorted(configurations(), key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_no_field_is_ignored(cls):
    """Some line of the source reads every field (those of a mesh are read all at once)."""
    tag = tag_of(cls)
    names = set(fields_of(cls)) - ({tag[0]} if tag else set()) - (set(AXES) if cls is MeshSizes else set())
    unread = names - names_that_are_read()
    assert not unread


def test_batch_sizes_in_both_forms():
    sizes = (BatchSize(step=0, size=4), BatchSize(step=10, size=8))
    assert change(batch_size=sizes).batch_sizes() == sizes
    assert change(batch_size=4).batch_sizes() == sizes[:1]


def test_processes_may_be_partly_detected():
    assert Distributed(coordinator="host:1").processes is None


ADVICE = re.compile(r"(?:^|[.;:] )(?:Add|Change|Choose|Give|Leave|Lower|Name|Raise|Set) ")


def test_every_field_says_when_one_would_change_it():
    """Its doc has a sentence that says what to do with it, and when; parts with fields of their own say it there."""
    silent = {
        name
        for name, field in every_field(Run)
        if not ADVICE.search(field.doc)
        and not any(dataclasses.is_dataclass(member) for member in members(field.type) if tag_of(member) is None)
        and not (typing.get_origin(field.type) is typing.Literal and len(typing.get_args(field.type)) == 1)
    }
    assert silent == {"model", "optimizer", "schedule"}


def test_no_field_is_advised_to_take_the_value_that_it_has():
    """ "Lower it, say to 0.95" is no advice where 0.95 is the default."""
    idle = {
        name
        for name, field in every_field(Run)
        if isinstance(field.default, int | float) and not isinstance(field.default, bool)
        for number in re.findall(r"\bto (\d[\d.e-]*\d|\d)\b", field.doc)
        if float(number) == field.default
    }
    assert not idle


@pytest.mark.parametrize(
    "make",
    [
        lambda nan: change(z_loss=nan),
        lambda nan: change(clip_norm=nan),
        lambda nan: DeadlineRule(factor=nan),
        lambda nan: DeadlineRule(seconds=nan),
        lambda nan: SequenceLength(step=1, length=8, rope_theta=nan),
        lambda nan: MixturePart(name="a", path="stores/a", weight=nan),
        lambda nan: MixturePart(name="a", path="stores/a", weight=1.0, epochs=nan),
        lambda nan: Routing(scale=nan),
        lambda nan: LinearScaling(factor=nan),
        lambda nan: YarnScaling(factor=4.0, original_context=16, beta_fast=nan),
        lambda nan: Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=nan, original_context=16),
    ],
)
def test_what_is_no_number_is_refused(make):
    """It is neither above a bound nor below it."""
    with pytest.raises(UserError) as error:
        make(math.nan)
    assert "nan" in str(error.value.seen)


@pytest.mark.parametrize(
    ("wrong", "rule", "where"),
    [
        ({"process": -1}, "from 0 to the number of processes minus 1", "process"),
        ({"coordinator": "h:1", "processes": 2, "process": 2}, "from 0 to the number of processes minus 1", "process"),
        ({"processes": 0}, "must be 2 or more", "processes"),
        ({"coordinator": "h:1", "processes": 1}, "must be 2 or more", "processes"),
        ({"coordinator": "h"}, "must be an address and a port", "coordinator"),
    ],
)
def test_processes_that_no_run_has_are_refused_where_they_are_written(wrong, rule, where):
    with pytest.raises(UserError, match=rule) as error:
        Distributed(**wrong)
    assert error.value.where == where and f"{where}=" in error.value.seen
    assert Distributed(processes=1, process=0).process == 0
