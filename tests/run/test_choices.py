import dataclasses
import typing
from collections.abc import Mapping

import numpy as np
import pytest

from trellis.choices import check_choices
from trellis.errors import UserError
from trellis.nn import Precision
from trellis.nn.moe import Routing
from trellis.recipes import load_run
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
