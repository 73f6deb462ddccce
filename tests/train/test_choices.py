"""What a CPU's processor decides: measured once, kept, written into the run, and the same when it goes on."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.models.small import CONFIGS
from tests.train.small import make_run, trellis
from trellis.commands.train import _changed
from trellis.errors import UserError
from trellis.hardware.remembered import recall
from trellis.named.tuned import Tuned, tuned_for
from trellis.nn.attention.chunked import chunk_size, chunked_attention
from trellis.nn.attention.pattern import Pattern
from trellis.nn.loss import linear_cross_entropy
from trellis.recipes import tiny
from trellis.run.config import Cpu
from trellis.run.folder import claim, open_run
from trellis.train import choices
from trellis.train.assemble import assemble
from trellis.train.choices import as_it_began, choose
from trellis.train.metrics import Work
from trellis.train.pace import Pace
from trellis.train.probes import fastest, probes


class Clock:
    """Seconds that pass only where a call says so."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self) -> float:
        return self.now

    def takes(self, name, *seconds: float):
        """A call that takes so long, the next time the next of them."""
        left = list(seconds)

        def call():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


@pytest.mark.parametrize(
    ("seconds", "found"),
    [((1.0, 0.9), "other"), ((1.0, 0.96), "usual"), ((1.0, 1.0), "usual"), ((0.5, 1.0), "usual")],
)
def test_the_usual_stays_unless_another_is_faster_by_a_twentieth(seconds, found):
    clock = Clock()
    calls = {name: clock.takes(name, *[taken] * 2) for name, taken in zip(("usual", "other"), seconds)}
    assert fastest(calls, "usual", clock) == found
    assert clock.calls[:4] == ["usual", "other"] * 2, "in turn"


def test_a_call_that_was_held_up_counts_by_its_fastest_time():
    clock = Clock()
    calls = {"usual": clock.takes("usual", 1.0), "other": clock.takes("other", 50.0, 30.0, 0.5, 30.0)}
    assert fastest(calls, "usual", clock) == "other"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of two devices on which a step takes as long as `steps` says, by devices and microbatches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    clock, tried = Clock(), []
    kernels = {"attention_chunk": {128: 1.0, 64: 0.5}, "loss_chunk": {512: 1.0, 256: 2.0}}
    as_calls = lambda times: {value: clock.takes(value, seconds) for value, seconds in times.items()}
    monkeypatch.setattr(choices, "probes", lambda run, rows: {name: as_calls(t) for name, t in kernels.items()})
    monkeypatch.setattr(choices, "work_of", lambda assembled: Work(flops_per_token=1e6, peak_flops=1e9))
    monkeypatch.setattr(choices, "is_crowded", lambda: False)

    def measured(run, steps, cost=1.0, devices=2):
        def trial(assembled):
            tried.append((assembled.layout.mesh.size, assembled.options.microbatches))
            clock.now += cost
            return Pace(token_seconds=1e-3 * steps.get(tried[-1], 1.0), basis="", measured=True)

        said = []
        found = choose(run, jax.devices()[:devices], tell=said.append, clock=clock, trial=trial)
        return found, said

    measured.tried, measured.clock = tried, clock
    return measured


LONG = dataclasses.replace(tiny(), steps=20_000)


@pytest.mark.slow
def test_what_a_run_leaves_open_is_measured_once_and_kept(machine):
    steps = {(2, 1): 1.0, (2, 2): 0.8, (1, 1): 0.9}
    found, said = machine(LONG, steps)
    assert found.cpu == Cpu(attention_chunk=64, loss_chunk=512) and (found.devices, found.microbatches) == (2, 2)
    assert machine.tried == [(2, 1), (2, 2), (1, 1)]
    assert "2 devices, 2 microbatches, attention in chunks of 64, loss in chunks of 512" in said[-1]
    again, said = machine(LONG, {})
    assert again == found and len(machine.tried) == 3 and "as measured on" in said[0]
    other, _ = machine(dataclasses.replace(LONG, batch_size=16), {})
    assert other.devices == 2 and len(machine.tried) > 3, "another step is measured by itself"


@pytest.mark.slow
def test_what_was_measured_beside_other_programs_is_for_that_run_alone(machine, monkeypatch):
    monkeypatch.setattr(choices, "is_crowded", lambda: True)
    found, said = machine(LONG, {(2, 1): 2.0, (2, 2): 2.0, (1, 1): 1.0})
    assert found.devices == 1 and "1 device, 1 microbatch," in said[-1] and "not kept" in said[-1]
    assert not recall("choices")


@pytest.mark.slow
def test_with_dropout_which_is_drawn_for_each_part_a_batch_is_cut_where_the_user_says(machine, tmp_path):
    """Else a run that continues on another mesh, with other parts, would drop other numbers, without a word."""
    model = dataclasses.replace(CONFIGS["gpt2_mistral"], dropout=0.1, positions=LONG.data.sequence_length)
    drops = dataclasses.replace(LONG, batch_size=256, model=model)
    assert assemble(drops, jax.devices()[:2]).options.microbatches == 1
    assert assemble(dataclasses.replace(drops, model=LONG.model), jax.devices()[:2]).options.microbatches > 1
    found, _ = machine(dataclasses.replace(drops, batch_size=8), {(2, 2): 0.1})
    assert found.microbatches == 1 and machine.tried == [(2, 1), (1, 1)]
    claim(tmp_path, drops)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert _changed(tmp_path, dataclasses.replace(drops, devices=1), 3) == []
    cut = dataclasses.replace(drops, microbatches=2)
    (line,) = _changed(tmp_path, cut, 3)
    assert "drawn for each part" in line and not _changed(tmp_path, cut, 0)


@pytest.mark.slow
def test_what_the_user_set_stays(machine):
    mine = Cpu(attention_chunk=256, loss_chunk=64, turned="none")
    found, _ = machine(dataclasses.replace(LONG, microbatches=4, devices=2, cpu=mine), {(2, 4): 1.0})
    assert found == dataclasses.replace(LONG, microbatches=4, devices=2, cpu=mine) and not machine.tried
    found, _ = machine(dataclasses.replace(LONG, microbatches=4, devices=2), {})
    assert (found.microbatches, found.devices, machine.tried) == (4, 2, [(2, 4)])


@pytest.mark.parametrize(
    "run",
    [
        dataclasses.replace(LONG, cpu=Cpu(measure=False)),
        tiny(),
        dataclasses.replace(LONG, steps=200),  # 100 thousand tokens, which take less than a minute
    ],
    ids=["switched off", "short", "a minute"],
)
def test_short_runs_are_not_measured(machine, monkeypatch, run):
    monkeypatch.setattr(choices, "_LONG", 1e3)
    assert machine(run, {}) == (run, []) and not machine.tried and recall("choices") == {}


def test_steps_that_take_long_are_not_tried(machine):
    """By the guess of 2 ms a token one of 4,096 tokens takes 8 s: measuring would take longer than a user waits."""
    run = dataclasses.replace(LONG, batch_size=64)
    assert machine(run, {}) == (run, []) and not machine.tried


@pytest.mark.slow
def test_what_does_not_fit_the_memory_is_refused_before_it_is_tried(machine, monkeypatch):
    monkeypatch.setattr("trellis.train.checks.free_memory", lambda: 1000)
    with pytest.raises(UserError, match="must fit in memory"):
        machine(LONG, {})
    assert not machine.tried


@pytest.mark.slow
def test_steps_are_tried_for_a_twentieth_of_the_run(machine):
    """20,480 s by the guess, so 1,024 for trials: each takes 400."""
    found, _ = machine(LONG, {(2, 2): 1.2, (1, 1): 0.1}, cost=400.0)
    assert machine.tried == [(2, 1), (2, 2)] and (found.devices, found.microbatches) == (2, 1)


def test_more_devices_than_cores_are_a_rehearsal(machine, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(2)), raising=False)
    assert machine(LONG, {}, devices=4) == (LONG, []) and not machine.tried


def test_a_run_goes_on_as_it_began(tmp_path):
    began = dataclasses.replace(LONG, devices=2, microbatches=2, cpu=Cpu(attention_chunk=64, loss_chunk=256))
    assert as_it_began(LONG, tmp_path) == LONG
    claim(tmp_path, began)
    assert as_it_began(LONG, tmp_path) == LONG, "no step was made"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert as_it_began(LONG, tmp_path) == began
    asked = dataclasses.replace(LONG, microbatches=4, cpu=Cpu(loss_chunk=128))
    cpu = Cpu(attention_chunk=64, loss_chunk=128)
    assert as_it_began(asked, tmp_path) == dataclasses.replace(began, microbatches=4, cpu=cpu)
    elsewhere = dataclasses.replace(LONG, devices=4)
    assert as_it_began(elsewhere, tmp_path) == dataclasses.replace(elsewhere, cpu=began.cpu)
    wider = dataclasses.replace(LONG, mesh=dataclasses.replace(LONG.mesh, model=2))
    assert as_it_began(wider, tmp_path) == dataclasses.replace(wider, cpu=began.cpu)


@pytest.mark.slow
def test_kernels_are_cut_as_a_program_was_told():
    q = jax.random.normal(jax.random.key(0), (1, 64, 2, 8))

    def attention(q):
        return chunked_attention(
            q, q, q, None, pattern=Pattern(causal=True), scale=1.0, logit_softcap=None, upcast=True
        )

    with tuned_for(Tuned(attention_chunk=16)):
        assert (chunk_size(64), chunk_size(1024)) == (16, 64)
        cut = str(jax.make_jaxpr(attention)(q))
    assert "f32[1,2,16,8]" in cut and "f32[1,2,16,8]" not in str(jax.make_jaxpr(attention)(q))
    table, targets = jnp.ones((32, 16)), jnp.zeros((1, 64), jnp.int32)
    loss = lambda x: linear_cross_entropy(x, table, targets, vocab_first=True).total
    with tuned_for(Tuned(loss_chunk=8)):
        cut = str(jax.make_jaxpr(loss)(jnp.ones((1, 64, 16))))
    assert "f32[8,32]" in cut and "f32[8,32]" not in str(jax.make_jaxpr(loss)(jnp.ones((1, 64, 16))))


@pytest.mark.slow
def test_what_is_timed_is_what_the_fields_say():
    """Each of the first calls runs; together they are for every field that is null by itself."""
    small = dataclasses.replace(LONG.model, layers=1)
    run = dataclasses.replace(LONG, model=small, data=dataclasses.replace(LONG.data, sequence_length=256))
    found = probes(run, rows=4)
    assert {name: list(calls) for name, calls in found.items()} == {
        "attention_chunk": [128, 64, 256],
        "loss_chunk": [512, 256, 1024],
        "turned": ["narrower", "none"],
    }
    fields = [field.name for field in dataclasses.fields(Cpu) if getattr(Cpu(), field.name) is None]
    assert list(found) == fields
    assert all(jnp.isfinite(x).all() for calls in found.values() for x in next(iter(calls.values()))())


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_choice_is_recorded_and_goes_on_with_the_run(tmp_path, capsys):
    path, folder = make_run(tmp_path), tmp_path / "run"
    command = ("train", path, "--run-dir", folder, "--devices", 1)
    code, _, err = trellis(capsys, *command, "--until", 3, "--cpu.attention_chunk", 16, "--microbatches", 2)
    assert code == 0, err
    began = open_run(folder)
    assert (began.cpu.attention_chunk, began.microbatches) == (16, 2)
    code, _, err = trellis(capsys, *command)
    assert code == 0, err
    assert open_run(folder) == began
