import dataclasses
import math
import re
import typing
from collections.abc import Mapping

import numpy as np
import pytest

from trellis.choices import check_choices
from trellis.errors import UserError
from trellis.nn import Precision
from trellis.nn.moe import Routing
from trellis.optim import AdamW, Constant, decayed, make_optimizer
from trellis.recipes import load_run, tiny
from trellis.run.config import BatchSize, Evaluation, SequenceLength
from trellis.run.data import MixturePart
from trellis.run.run_file import read_run, write_run
from trellis.run.schema import fields_of, tag_of

# One with experts, whose configuration has the routing.
RUN = load_run("mixtral_8x7b")


def parts(value, name: str = "run"):
    """A configuration and those in it, by their names."""
    yield name, value
    for field in fields_of(type(value)):
        if dataclasses.is_dataclass(inner := getattr(value, field)):
            yield from parts(inner, field)


def words_in():
    for part, value in parts(RUN):
        for name, field in fields_of(type(value)).items():
            if "Literal" in str(field.type) and (tag_of(type(value)) or ("",))[0] != name:
                yield pytest.param(value, name, id=f"{part}-{name}")


@pytest.mark.parametrize(("config", "name"), [*words_in()])
def test_a_program_that_misspells_a_word_is_told(config, name):
    """Every field that holds a word, of whatever configuration a run is made of."""
    kind = typing.get_type_hints(type(config))[name]
    origin = typing.get_origin(kind)
    wrong = ("no such word",) if origin is tuple else {"mlp": "no such word"} if origin is Mapping else "no such word"
    with pytest.raises(UserError, match=rf"`{name}` must be one of [\s\S]*seen:  {name}=no such word") as refused:
        dataclasses.replace(config, **{name: wrong})
    assert refused.value.where == name and refused.value.fix


@pytest.mark.parametrize(
    ("config", "name"),
    [(RUN, "weight_decay_exclude"), (RUN.layout, "overlap"), (RUN.logging, "trackers"), (RUN.remat, "names")],
)
def test_a_program_that_gives_a_text_where_a_field_holds_words_is_told(config, name):
    """`weight_decay_exclude="norm"` left out of the decay all that has an n, o, r or m in its name."""
    with pytest.raises(UserError, match=f"`{name}` must be a tuple of words(.|\n)*seen:  {name}='norm'") as refused:
        dataclasses.replace(config, **{name: "norm"})
    assert refused.value.where == name and refused.value.fix == "write ('norm',)"


@pytest.mark.parametrize(
    ("config", "name"),
    [(RUN, "scan_layers"), (RUN.data, "mask_documents"), (RUN.evaluation, "sample"), (RUN.guard, "replay")],
)
def test_a_program_that_gives_a_text_where_a_field_is_true_or_false_is_told(config, name):
    with pytest.raises(UserError, match=f"`{name}` must be True or False(.|\n)*seen:  {name}='false'") as refused:
        dataclasses.replace(config, **{name: "false"})
    assert refused.value.where == name


@pytest.mark.parametrize(
    ("config", "name", "wrong", "wanted"),
    [
        (RUN, "steps", 20.5, "a whole number"),
        (RUN, "steps", "20", "a whole number"),
        (RUN, "seed", True, "a whole number"),
        (RUN, "z_loss", "0", "a number"),
        (RUN.evaluation, "every", 2.0, "a whole number or None"),
    ],
)
def test_a_program_that_gives_no_number_where_one_is_wanted_is_told(config, name, wrong, wanted):
    with pytest.raises(UserError, match=f"`{name}` must be {wanted}.\n *seen:  {name}={wrong!r}"):
        dataclasses.replace(config, **{name: wrong})
    dataclasses.replace(config, **{name: np.int64(getattr(config, name) or 1)})


WEB = MixturePart(name="web", path="stores/web", weight=1.0)


@pytest.mark.parametrize(
    ("config", "name", "wrong", "rule", "fix"),
    [
        (RUN, "seed", 2**40, "A whole number must fit in 31 bits", "use a smaller number"),
        (RUN, "clip_norm", math.inf, "A number must fit in float32", "use a number in that range"),
        (RUN, "checkpoints", None, "`checkpoints` must be a CheckpointRule.", "make one, as in CheckpointRule("),
        (RUN, "optimizer", "lion", "`optimizer` must be an AdamW, a Lion, a Muon or an Adafactor.", "as in Lion("),
        (RUN, "mesh", {"data": 2}, "`mesh` must be a MeshSizes.", "make one, as in MeshSizes("),
        (RUN, "profile", 3, "`profile` must be a Profile or None.", "make one, as in Profile("),
        (RUN, "name", None, "`name` must be a text.", "write one"),
        (RUN, "batch_size", 8.0, "`batch_size` must be a whole number or a tuple, each of it a BatchSize.", "make one"),
        (RUN, "batch_size", (8, 16), "`batch_size` must be a whole number or a tuple", "make one, as in BatchSize("),
        (RUN, "compiler_options", {"xla_cpu_x": 3}, "must be a map from texts, each to a text.", "write one"),
        (RUN.checkpoints, "keep_latest", 2.5, "`keep_latest` must be a whole number.", "write one"),
        (RUN.deadline, "seconds", None, "`seconds` must be a number.", "write one"),
        (RUN.mesh, "data", "2", "`data` must be a whole number.", "write one"),
        (RUN.layout, "params", {"embed": 3}, "`params` must be a map from texts, each to a text.", "write one"),
        (RUN.optimizer, "learning_rate", "3e-3", "`learning_rate` must be a number.", "write one"),
        (RUN.schedule, "warmup_steps", 2.5, "`warmup_steps` must be a whole number.", "write one"),
        (RUN.model, "layers", 2.0, "`layers` must be a whole number.", "write one"),
        (RUN.model, "rope_scaling", "linear", "`rope_scaling` must be a LinearScaling, ", "as in LinearScaling("),
        (RUN.data, "source", "stores/a", "`source` must be an EmbeddedSource, ", "make one, as in EmbeddedSource("),
        (WEB, "weight", "0.5", "`weight` must be a number or a tuple, each of it a PartWeight.", "make one"),
        (SequenceLength(step=1, length=64), "length", 64.0, "`length` must be a whole number.", "write one"),
    ],
)
def test_a_program_that_gives_a_value_of_another_type_is_told(config, name, wrong, rule, fix):
    with pytest.raises(
        UserError, match=rf"{re.escape(rule)}[\s\S]*\n *seen:  {name}={re.escape(repr(wrong))}"
    ) as refused:
        dataclasses.replace(config, **{name: wrong})
    assert refused.value.where == name and fix in refused.value.fix


def test_a_program_may_give_lists_dictionaries_and_numbers_of_numpy(tmp_path):
    """They become what a file gives: values that have a hash and are written to `run.yaml`."""
    sizes, lengths = [BatchSize(step=0, size=8)], [SequenceLength(step=3, length=128)]
    layout = dataclasses.replace(tiny().layout, params={"embed": "data"})
    changes = {"steps": np.int64(9), "clip_norm": np.float32(0.5), "layout": layout}
    assert dataclasses.replace(tiny(), batch_size=np.int64(8)).batch_sizes()[0].size == 8
    assert MixturePart(name="a", path="stores/a", weight=np.float32(0.5)).weight == 0.5
    changes |= {"scan_layers": np.float32(1), "evaluation": Evaluation(every=2, sample=1)}  # true, as `==` has it
    run = dataclasses.replace(tiny(), batch_size=sizes, lengths=lengths, **changes)
    assert run.batch_size == tuple(sizes) and run.lengths == tuple(lengths) and hash(run)
    write_run(run, tmp_path / "run.yaml")
    assert read_run(tmp_path / "run.yaml") == run


def test_a_decay_is_excluded_by_words():
    for words in ("norm", ("norm", "")):
        rule = "Words that leave parameters out of weight decay must be a tuple of them, none empty"
        with pytest.raises(UserError, match=rule):
            make_optimizer(AdamW(learning_rate=1.0), Constant(warmup_steps=0), steps=1, exclude=words)
        with pytest.raises(UserError, match=rule):
            decayed({"w": np.ones((2, 3))}, words)
    with pytest.raises(UserError, match=rule):
        dataclasses.replace(tiny(), weight_decay_exclude=("norm", ""))


def test_there_are_such_fields():
    found = {parameter.id for parameter in words_in()}
    assert {"layout-mode", "precision-updates", "precision-products", "remat-policy", "routing-way"} <= found
    assert {"run-accumulation", "data-packing", "logging-trackers", "cpu-turned"} <= found


def test_words_that_are_known_are_taken():
    assert Precision(params="bfloat16", updates="random").updates == "random"
    assert Routing(dispatch=None).dispatch is None
    with pytest.raises(UserError, match="must be one of mxfp8, bits or None"):
        Routing(dispatch="fp8")


def test_a_field_without_words_is_left_alone():
    @dataclasses.dataclass
    class Plain:
        size: int | str = "any"

    check_choices(Plain())
