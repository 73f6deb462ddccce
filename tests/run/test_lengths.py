"""A run whose sequences become longer is a run of one length after the other, or is refused in four parts."""

import dataclasses

import pytest

from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.nn import LinearScaling
from trellis.plan.adapt import adapt
from trellis.plan.phases import fullest, phases_json, phases_text, plan_phases
from trellis.plan.quick import quick_plan
from trellis.recipes import gpt2_small, load_run, tiny
from trellis.run.config import BatchSize
from trellis.run.folder import claim
from trellis.run.lengths import SequenceLength
from trellis.train.devices import default_count
from trellis.train.pace import tokens_of


def at(step: int, length: int, **more) -> SequenceLength:
    return SequenceLength(step=step, length=length, **more)


def change(**fields):
    return dataclasses.replace(tiny(), **fields)


def test_each_phase_keeps_the_tokens_of_a_step_and_what_is_not_said_anew():
    sizes = (BatchSize(step=0, size=8), BatchSize(step=10, size=16))
    twice = LinearScaling(factor=2.0)
    lengths = at(8, 128, rope_scaling=twice), at(14, 256, rope_theta=5e5, microbatches=2)
    run = change(batch_size=sizes, lengths=lengths)
    first, second, third = run.phases()
    assert [(p.start, p.stop) for p in (first, second, third)] == [(0, 8), (8, 14), (14, 20)]
    assert first.run == change(batch_size=8)
    assert second.run.batch_size == (BatchSize(step=0, size=4), BatchSize(step=10, size=8))
    assert third.run.batch_size == 4 and third.run.microbatches == 2
    assert (second.run.model.rope_scaling, second.run.model.rope_theta) == (twice, tiny().model.rope_theta)
    assert (third.run.model.rope_scaling, third.run.model.rope_theta) == (twice, 5e5)
    for step, phase in {0: first, 7: first, 8: second, 13: second, 14: third, 99: third}.items():
        assert run.at(step) == phase.run
    assert tokens_of(run, 0, run.steps) == 64 * 8 * 10 + 64 * 16 * 10


def test_a_length_with_a_batch_of_its_own():
    run = change(lengths=(at(8, 128, batch_size=6),))
    assert [p.run.batch_size for p in run.phases()] == [8, 6]
    assert tokens_of(run, 0, run.steps) == 8 * 8 * 64 + 12 * 6 * 128
    assert default_count(run, cores=4) == 2, "four devices do not divide 6 sequences"


@pytest.mark.parametrize(
    ("lengths", "rule", "seen", "fix"),
    [
        ((at(20, 128),), "which must be before the run ends", "steps 20 of 20", "--steps past the last"),
        ((at(8, 128), at(8, 256)), "in order of their first steps", "steps 8, 8 of 20", "write [{step: 1000"),
        ((at(8, 96),), "Every length must divide the longest", "64 and 96", "use 64 or 128 instead of 96"),
        ((at(8, 1024),), "keep the number of tokens", "8 sequences of 64 tokens, and a length of 1024", "multiples"),
        ((at(8, 128, microbatches=3),), "divide the batch", "batch_size=4, microbatches=3, from step 8 on", "of 3"),
    ],
)  # fmt: skip
def test_what_is_refused(lengths, rule, seen, fix):
    with pytest.raises(UserError) as error:
        change(lengths=lengths)
    assert error.value.where == "lengths"
    assert rule in error.value.rule and seen in error.value.seen and fix in error.value.fix


def test_what_a_model_or_its_data_do_not_have_is_refused():
    with pytest.raises(UserError, match="cannot be longer than the model's learned positions") as error:
        dataclasses.replace(gpt2_small(), lengths=(at(8, 2048),))
    assert error.value.seen == "sequence_length=2048, positions=1024, from step 8 on"
    assert error.value.fix == "use a length of 1024, or a model with more positions"
    with pytest.raises(UserError, match="Rotary frequencies can be changed only in a model that has them"):
        dataclasses.replace(gpt2_small(), lengths=(at(8, 512, rope_theta=1e6),))
    with pytest.raises(UserError, match="need concatenated documents"):
        change(data=dataclasses.replace(tiny().data, packing="pack"), lengths=(at(8, 128),))
    with pytest.raises(UserError, match="`rope_theta` must be positive"):
        at(8, 128, rope_theta=0.0)


def test_a_run_that_has_begun_keeps_its_lengths(tmp_path):
    run = change(lengths=(at(8, 128),))
    claim(tmp_path, run)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    claim(tmp_path, change(lengths=(at(8, 128, microbatches=2),)))
    with pytest.raises(UserError, match="A run folder holds one run") as error:
        claim(tmp_path, change(lengths=(at(8, 256),)))
    assert error.value.seen == "lengths.0.length: 128 in the folder, 256 asked for"


@pytest.mark.slow
def test_each_length_is_planned_and_the_fullest_decides():
    where = target("8xH100")
    options = {"lengths": "[{step: 8, length: 128}, {step: 12, length: 1024, batch_size: 64}]"}
    run, notes = adapt(load_run("tiny", options), where, ())
    assert notes == ["batch_size 8 -> 16 so that every device has a row; --batch_size N sets it"]
    plans = plan_phases(run, lambda r: quick_plan(r, where))
    assert [p.plan.tokens for p in plans] == [1024, 1024, 65536]
    assert [p.plan.memory.peak for p in plans].index(fullest(plans).plan.memory.peak) == 2
    assert [entry["length"] for entry in phases_json(plans)] == [64, 128, 1024]
    words = phases_text(plans)
    assert "all lengths fit" in words and "what follows is for steps 13 to 20" in words
    assert quick_plan(run, where).tokens == 65536, "of several lengths the longest"
    with pytest.raises(UserError, match="batch must split evenly") as error:
        plan_phases(load_run("tiny", {"lengths": "[{step: 8, length: 128, batch_size: 9}]", "batch_size": "16"}),
                    lambda r: quick_plan(r, where))  # fmt: skip
    assert error.value.where == "lengths" and error.value.fix.startswith("give this length a batch_size of 8 or 16, or")


@pytest.mark.slow
def test_steps_of_a_batch_that_grows_within_a_length_take_their_own_time():
    options = {"lengths": "[{step: 8, length: 128}]", "batch_size": "[{step: 0, size: 16}, {step: 12, size: 64}]"}
    planned = lambda run: quick_plan(run, target("8xH100"))
    first, later = plan_phases(load_run("tiny", options | {"steps": "20"}), planned, every_size=True)
    small = planned(dataclasses.replace(later.phase.run, batch_size=8)).seconds
    assert later.plan.tokens == 32 * 128 and small < later.plan.seconds
    assert later.seconds == pytest.approx(4 * small + 8 * later.plan.seconds)
    assert first.seconds == pytest.approx(8 * first.plan.seconds)


@pytest.mark.slow
def test_a_length_that_slices_do_not_divide_is_refused():
    where = target("8xH100")
    options = {"data.sequence_length": "48", "lengths": "[{step: 8, length: 144, batch_size: 8}]"}
    run = load_run("tiny", options | {"mesh.data": "1", "mesh.context": "8", "layout.preset": "auto"})
    run = dataclasses.replace(run, lengths=(at(8, 12, batch_size=8),))
    with pytest.raises(UserError, match="A sequence must split evenly") as error:
        plan_phases(run, lambda r: quick_plan(r, where))
    assert error.value.where == "lengths" and "from step 8 on" in error.value.seen
    assert error.value.fix.startswith("use a length of 8 or 16, or --mesh sizes")
