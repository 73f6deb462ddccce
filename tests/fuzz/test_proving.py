"""Random programs as a TPU's compiler makes them, executed."""

import pytest

from tests.fuzz import kinds, proving, worker
from trellis.hardware.chips import chips

# What they have that the compiler or the proof once had wrong.
FOUND = {
    1030: "a device's place in a region within a region",
    1033: "a result that is a pending sum, and one that is copies",
    2147: "a difference of which nearly nothing is left",
    2194: "a value that a function returns whole, and again as a partial sum",
    2236: "floats of eight bits that are gathered as words of four",
    2369: "one number looked up by one number",
    3544: "whole numbers of eight bits, as words and back",
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", FOUND, ids=FOUND.values())
def test_what_was_found_is_proven(seed):
    case = kinds.draw(seed)
    outcome, _ = worker.of(case, ledger_share=0.0, chip="v5e")
    assert outcome.what == "right", case.text(outcome.detail)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_programs_are_proven(chip):
    seeds, held = iter(range(5000, 5200)), 0
    while held < 8:
        case = kinds.draw(next(seeds))
        if proving.target_of(case, chip) is None:
            continue
        outcome, _ = worker.of(case, ledger_share=0.0, chip=chip)
        assert not outcome.failed, f"{outcome.what} {outcome.rule}\n{case.text(outcome.detail)}"
        held += outcome.what == "right"


def test_cases_go_to_hardware_of_their_size():
    assert [proving.hardware("v5e", n) for n in (1, 2, 4, 6, 8, 16)] == [
        "v5e:1x1", None, "v5e:2x2", None, "v5e:2x4", "v5e:4x4",
    ]  # fmt: skip
    assert proving.hardware("v5p", 8) == "v5p:2x2x2" and proving.hardware("H100", 6) == "6xH100"
    assert {chips()[chip].torus for chip in ("v5e", "v6e", "v5p")} == {*proving.SLICES}
    cases = [kinds.draw(seed) for seed in range(60)]
    assert all(proving.target_of(case, "H100") is None for case in cases if case.broken)
    assert any(proving.target_of(case, "H100") for case in cases)
