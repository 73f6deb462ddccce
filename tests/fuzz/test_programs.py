"""Random programs, each against its plain twin: right, or refused where a rule or a layout says so."""

import pytest

from tests.fuzz import kinds, worker
from tests.fuzz.tally import Tally

BLOCKS = 15
EACH = 12


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_programs_are_right_or_refused(block):
    failed = []
    for seed in range(block * EACH, (block + 1) * EACH):
        case = kinds.draw(seed)
        outcome, _ = worker.of(case, ledger_share=0.1)
        if outcome.failed:
            failed.append(f"{outcome.what} {outcome.rule}\n{case.text(outcome.detail)}")
    assert not failed, "\n\n".join(failed)


@pytest.mark.slow
def test_the_ledger_of_a_sample_agrees_with_the_compiled_programs():
    """Made under `jit`: bytes by kind and mesh axis. XLA goes another way for a few, and never moves anything where the
    ledger says that nothing moves."""
    held = []
    for seed in range(1000, 1100):
        case = kinds.draw(seed)
        if case.broken or case.late or case.earlier or case.setting.mode not in ("explicit", "types", "manual"):
            continue
        outcome, ledger = worker.of(case, ledger_share=1.0)
        if ledger:
            assert outcome.what in ("right", "other moves"), case.text(outcome.detail)
            held.append(outcome.what)
    assert len(held) > 40
    assert held.count("right") >= 0.95 * len(held), f"{held.count('right')} of {len(held)} agree"


def test_every_kind_of_program_and_step_is_among_them():
    cases = [kinds.draw(seed) for seed in range(BLOCKS * EACH)]
    assert {kinds.kind(case) for case in cases} == {
        "alone", "auto", "broken", "explicit", "manual, named", "manual, plain", "types",
    }  # fmt: skip
    steps = set().union(*(case.kinds() for case in cases))
    assert steps >= {
        "elementwise", "bfloat16", "reduction", "along a name", "product", "pending sum", "indexing", "lookup",
        "update", "reshaping", "joining", "creation", "placing", "random", "vmap", "loop", "layers", "checkpoint",
        "inner jit", "cond", "inner gradient", "inner second derivative", "inner jvp", "reshard", "shift", "layer",
        "own gradient", "shard_map inside", "off the mesh", "mask of values", "mask of values in jit",
    }  # fmt: skip
    assert {case.derivative for case in cases} == {"none", "reverse", "forward"}
    assert len({case.setting.mesh for case in cases}) > 15


def test_a_seed_is_one_program():
    assert [kinds.draw(seed).text() for seed in range(40)] == [kinds.draw(seed).text() for seed in range(40)]


def test_programs_are_drawn_for_many_devices():
    cases = [kinds.draw(seed, many=True) for seed in range(80)]
    assert all(8 < case.setting.devices <= 24 for case in cases)
    assert {len(case.setting.mesh) for case in cases} == {1, 2, 3, 4}
    assert any(len(axes) > 1 for case in cases for _, axes in case.setting.compute)
    assert '"jax_num_cpu_devices", 24' in cases[0].text() and '"jax_num_cpu_devices", 8' in kinds.draw(0).text()


def test_a_table_of_what_ran():
    tally = Tally()
    assert not tally.add(
        {"seed": 1, "what": "right", "kind": "auto", "steps": ["vmap"], "derivative": "none", "run": "eager"}
    )
    assert tally.add({"seed": 2, "what": "wrong", "rule": "value", "kind": "auto"})
    assert not tally.add({"seed": 3, "what": "wrong", "rule": "value", "kind": "auto"})
    assert "FAILED 2 times: wrong value (seeds 2 3)" in str(tally)
