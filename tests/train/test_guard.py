"""A bit that changes in one device's copy is found at the next comparison and named; nothing else is."""

import dataclasses
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.flips import change, flip_each, flipped
from tests.train.small import curve, trellis
from tests.train.toy import mesh_of, run_of, toy
from trellis import _compat
from trellis.checkpoints.entries import entries
from trellis.errors import UserError
from trellis.inspect import Ledger
from trellis.nn import Precision
from trellis.recipes import tiny
from trellis.run.config import GuardRule
from trellis.run.layouts import LayoutChoice, MeshSizes
from trellis.train import checks, loop
from trellis.train.assemble import assemble
from trellis.train.compilation import CompiledStep
from trellis.train.digests import digest
from trellis.train.guard import Guard, replays
from trellis.train.progress import Progress
from trellis.train.stopping import CopiesDiffer, ProgramDiffers
from trellis.train.structure import StructureCheck

LAYOUTS = {
    "data": (LayoutChoice(preset="data"), MeshSizes()),
    "fsdp": (LayoutChoice(preset="fsdp"), MeshSizes()),
    "tensor": (LayoutChoice(preset="tensor"), MeshSizes(data=4, model=2)),
    "hybrid": (LayoutChoice(), MeshSizes(replica=2, data=2, model=2)),
    "auto": (LayoutChoice(preset="tensor", mode="auto"), MeshSizes(data=2, model=4)),
}
GROUPS = "replica_groups={{0,3},{1,2}}"  # the devices along no axis of a mesh of two by two
# Held once: all of the large parameters and their moments, and no part of the state, respectively.
REPLAYED = {"data": False, "fsdp": True, "tensor": False, "hybrid": False, "auto": False}


def small(layout: str, **changes):
    choice, mesh = LAYOUTS[layout]
    model = dataclasses.replace(tiny().model, vocab=64, embed=16, mlp=32, layers=1, heads=4, kv_heads=4, head_dim=4)
    precision = Precision(compute="float32")
    data = dataclasses.replace(tiny().data, sequence_length=16)
    about = dict(model=model, precision=precision, data=data, batch_size=8, layout=choice, mesh=mesh, ema=0.9)
    return dataclasses.replace(tiny(), guard=GuardRule(every=2), **about, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_is_found_and_named_for_every_array_of_a_layout(layout):
    assembled = assemble(small(layout), jax.devices())
    found, alone = flip_each(assembled)
    assert found >= {"fsdp": 2}.get(layout, (found + alone) // 2)
    assert replays(assembled.run.guard, assembled.abstract, assembled.layout.mesh) is REPLAYED[layout]


def test_a_comparison_moves_four_bytes_an_array_and_device():
    assembled = assemble(small("hybrid"), jax.devices())
    batch = assembled.abstract_batch()
    arrays = len(entries({"state": assembled.abstract, "batch": batch, "read again": batch}))
    moved = Guard(assembled).ledger()
    assert {row.kind for row in moved} == {"all-gather"}
    assert moved.total() == 7 * 4 * arrays


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float8_e4m3fn", "uint32"])
def test_every_bit_changes_a_digest_and_so_does_the_order(dtype):
    x = jnp.asarray(np.arange(24).reshape(2, 3, 4) % 2 if dtype == "bool" else np.arange(24).reshape(2, 3, 4), dtype)
    compiled = jax.jit(digest)
    raw = np.asarray(x)
    for bit in range(1 if dtype == "bool" else 8 * raw.dtype.itemsize):
        other = raw.copy()
        other.reshape(-1)[7:8].view(np.uint8)[bit // 8] ^= 1 << bit % 8
        assert compiled(jnp.asarray(other)) != compiled(x)
    for axis in range(3):
        assert compiled(jnp.flip(x, axis)) != compiled(x) or dtype == "bool"
    assert compiled(x) == compiled(x + jnp.zeros_like(x)) == digest(x)


class Faulty(CompiledStep):
    """A step after which one device holds another bit, at its call of number `at`."""

    at, name, calls = 0, "", 0

    def __call__(self, state, batch):
        state, metrics = super().__call__(state, batch)
        type(self).calls += 1
        if self.calls == self.at:
            state = change(state, self.name, jax.devices()[2])
        return state, metrics


@pytest.fixture
def faulty(monkeypatch):
    def at(call: int, name: str):
        kind = type("Broken", (Faulty,), {"at": call, "name": name})
        monkeypatch.setattr(loop, "CompiledStep", kind)

    return at


def go(folder, *, whole: bool, compiled=None, said=None, **changes):
    """The toy in a folder, guarded: its outcome. `compiled` makes of the run what looks at its compiled step."""
    mesh = mesh_of(2, 2)
    run = run_of(8, every=3, **changes)
    with jax.set_mesh(mesh):
        assembled, feed = toy(mesh, run, whole=whole)
        look = compiled and compiled(assembled)
        return loop.train(assembled, feed, folder, progress=Progress(8, stream=said or io.StringIO()), compiled=look)


@pytest.mark.slow
def test_a_run_stops_at_the_next_comparison_and_goes_on_after_the_last_good_checkpoint(tmp_path, faulty):
    guard = GuardRule(every=4)
    faulty(0, "")
    go(tmp_path / "whole", whole=True)
    assert loop.CompiledStep.calls == 8
    faulty(4, "params/w1")
    with pytest.raises(CopiesDiffer) as error:
        go(tmp_path / "run", whole=True, guard=guard)
    assert error.value.exit_code == 3
    assert error.value.rule == "The copies of a value on several devices must be the same, to the bit."
    seen = "after step 4: `params.w1` on device 2 differs from the other 3 along `data` and `model`"
    assert error.value.seen == seen
    assert error.value.where == f"last good checkpoint: {tmp_path / 'run' / 'checkpoints' / 'step-00000003'}"
    assert error.value.fix.startswith("run the same command again, which continues after that checkpoint")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    faulty(0, "")
    go(tmp_path / "run", whole=True, guard=guard)
    assert loop.CompiledStep.calls == 5, "nothing is made twice where all has copies"
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_no_state_whose_copies_differ_is_saved(tmp_path, faulty):
    faulty(5, "velocity/w2")
    with pytest.raises(CopiesDiffer, match="after step 6: `velocity.w2` on device 2 differs from the other 3 "):
        go(tmp_path, whole=True, guard=GuardRule(every=100))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.slow
def test_where_nothing_is_copied_a_step_is_made_twice(tmp_path, faulty):
    guard = GuardRule(every=2)
    faulty(0, "")
    go(tmp_path / "plain", whole=False)
    assert loop.CompiledStep.calls == 8
    faulty(0, "")
    go(tmp_path / "guarded", whole=False, guard=guard)
    assert loop.CompiledStep.calls == 10, "of eight steps the fourth and the eighth are made twice"
    assert curve(tmp_path / "plain") == curve(tmp_path / "guarded")
    faulty(5, "params/w1")  # steps 1, 2, 3, 4, 4
    with pytest.raises(CopiesDiffer) as error:
        go(tmp_path / "run", whole=False, guard=guard)
    assert (
        error.value.rule
        == "A step that is replayed from the same state and batch must give the same result, to the bit."
    )
    assert error.value.seen == "step 4 gave two: `params.w1` on device 2"
    assert error.value.where.endswith("step-00000003")
    assert error.value.fix.endswith("or use --guard.replay false if steps are random")


@pytest.mark.slow
def test_a_batch_that_changed_on_its_way_is_found(tmp_path):
    """Each row is on one device, so that there is nothing but the data to hold it against."""
    mesh, run = mesh_of(4, 1), run_of(8, guard=GuardRule(every=2, replay=False))
    with jax.set_mesh(mesh):
        assembled, feed = toy(mesh, run)
        again = lambda index: next(feed.batches(index))[1]

        def batches(start):
            for index, rows in feed.batches(start):
                yield index, flipped(rows, jax.devices()[2], 3) if index in (2, 3) else rows

        with pytest.raises(CopiesDiffer) as error:
            changed = dataclasses.replace(feed, batches=batches, again=again)
            loop.train(assembled, changed, tmp_path, progress=Progress(8, stream=io.StringIO()))
    assert error.value.rule == "The batch on the devices must be the same when its data are read again, to the bit."
    assert error.value.seen == "the batch of step 4: `batch.value` on device 2"


@pytest.mark.slow
def test_a_run_ends_at_its_first_step_where_the_program_sums_over_wrong_devices(tmp_path):
    def wrong(program):
        text, count = re.subn(r"replica_groups=(\{\{0,1\}|\[2,2\]<=\[4\]).*?(?=, [a-z])", GROUPS, program.as_text())
        assert count
        return text

    def look(assembled):
        check = StructureCheck(assembled, Ledger((), {"data": 2, "model": 2}), tmp_path)
        return lambda program, *where: check(wrong(program), *where)

    with pytest.raises(ProgramDiffers) as error:
        go(tmp_path, whole=False, compiled=look)
    assert error.value.exit_code == 3 and "not along mesh axes: " in error.value.seen
    assert error.value.where == f"{tmp_path / 'compiled.hlo'}; no checkpoint was written yet"
    assert "continue with --guard.structure false" in error.value.fix
    assert not list((tmp_path / "checkpoints").iterdir()) and not curve(tmp_path)
    said = io.StringIO()
    assert go(tmp_path, whole=False, compiled=look, said=said, guard=GuardRule(structure=False)).step == 8
    assert "WARNING: A compiled step must move what its types say" in said.getvalue() and len(curve(tmp_path)) == 8


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_what_a_comparison_moves_is_in_the_ledger(run_file, tmp_path, capsys):
    words = ("train", run_file, "--run-dir", tmp_path, "--devices", 8, "--layout.preset", "data", "--until", 0)
    assert trellis(capsys, *words, "--guard.every", 4)[0] == 0
    text = (tmp_path / "ledger.txt").read_text()
    assert "\n\nguard: after every 4 steps and before each checkpoint\ncollective" in text
    assert text.rstrip().splitlines()[-1].startswith("each device sends ")


def test_a_step_is_not_made_twice_where_there_is_no_room(monkeypatch):
    assembled = assemble(small("fsdp"), jax.devices())
    monkeypatch.setattr(checks, "free_memory", lambda: 10_000)
    memory = {"all": 100}
    with pytest.raises(UserError, match="Replaying a step needs memory for another state") as error:
        checks.check_guard(memory, assembled)
    assert error.value.fix.startswith("use --guard.replay false")
    for other in (GuardRule(every=2, replay=False), GuardRule()):
        checks.check_guard(memory, dataclasses.replace(assembled, run=dataclasses.replace(assembled.run, guard=other)))


def test_on_a_gpu_a_step_is_made_twice_only_if_its_sums_have_an_order(monkeypatch):
    assembled = assemble(small("fsdp"), jax.devices())
    monkeypatch.setattr(checks, "platform_of_devices", lambda mesh: "cuda")
    option = "xla_gpu_exclude_nondeterministic_ops"
    with pytest.raises(UserError, match="deterministic operations on a GPU") as error:
        checks.check_guard({}, assembled)
    assert error.value.fix == f"add --compiler_options.{option} True, or use --guard.replay false"
    monkeypatch.setattr(type(assembled), "compiler_options", options := {})
    for ordered in (option, "xla_gpu_deterministic_ops"):
        options[ordered] = "True"
        checks.check_guard({}, assembled)
        options[ordered] = "False"
    with pytest.raises(UserError, match="deterministic operations"):
        checks.check_guard({}, assembled)


@pytest.mark.parametrize("option", ["xla_gpu_exclude_nondeterministic_ops", "xla_gpu_deterministic_ops"])
def test_a_step_is_lowered_for_the_order_that_its_options_ask_for(option):
    class Step:
        def lower(self, *_):
            orders.append(asks_now())
            return self

        def compile(self, options):
            return self

    orders, asks_now = [], _compat._IN_ONE_ORDER.get
    for options in (None, {option: "False"}, {option: "True"}, {}):
        CompiledStep(Step(), options).compile({}, {})
    assert orders == [False, False, True, False] and not asks_now()
