"""Words of other trainers lead to fields and options that there are, and stand in nobody's way."""

import argparse

import pytest

from trellis.commands import train
from trellis.errors import UserError
from trellis.recipes import tiny
from trellis.run.config import Run
from trellis.run.other_names import OTHER_NAMES
from trellis.run.overrides import every_field, resolve

FIELDS = {name for name, _ in every_field(Run)}


def test_each_leads_to_a_field_or_an_option_of_train():
    parser = argparse.ArgumentParser()
    train.arguments(parser)
    options = {word.removeprefix("--") for action in parser._actions for word in action.option_strings}
    assert set(OTHER_NAMES.values()) <= FIELDS | options
    assert not set(OTHER_NAMES) & {name for name in FIELDS | options if "." not in name}


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("lr", "optimizer.learning_rate"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("bs", "batch_size"),
        ("seq_len", "data.sequence_length"),
        ("max_iters", "steps"),
        ("warmup_iters", "schedule.warmup_steps"),
        ("model.n_layer", "model.layers"),
        ("tp", "mesh.model"),
        ("grad_clip", "clip_norm"),
        ("save_steps", "checkpoints.every"),
    ],
)
def test_the_message_says_what_it_is_called_here(option, field):
    with pytest.raises(UserError) as error:
        resolve(Run, tiny(), options={option: "1"})
    assert error.value.fix == f"here it is called --{field}"


def test_a_word_under_another_field_is_none_of_them():
    with pytest.raises(UserError) as error:
        resolve(Run, tiny(), options={"data.lr": "1"})
    assert "learning_rate" not in error.value.fix
