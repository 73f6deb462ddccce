"""Runs cases one after the other in a process of its own, and writes a line of JSON before and after each."""

import json
import sys
import time

import numpy as np

from . import kinds, ledgers, proving, running, shrinking
from .case import Case
from .running import Outcome


def work(
    seeds: list[int], *, only: str, shrink: float, ledger_share: float, many: bool = False, chip: str = ""
) -> None:
    """Runs the cases of some seeds; of the first failure of each kind it looks for a smaller one.

    Args:
        only: how the kinds that are run begin, empty for all.
        shrink: seconds to look for a smaller one.
        ledger_share: of programs whose ledger is held against the compiled program.
        many: whether they are for 9 to 24 devices, and not for up to 8.
        chip: what those that are right are also compiled for; empty for this machine only.
    """
    known: set[tuple[str, str]] = set()
    for seed in seeds:
        _say(seed=seed)
        begin = time.monotonic()
        case = kinds.draw(seed, many)
        if not kinds.kind(case).startswith(only) or (chip and proving.target_of(case, chip) is None):
            _say(seed=seed, skipped=True)
            continue
        outcome, ledger = of(case, ledger_share, chip)
        told = {
            "seed": seed, "what": outcome.what, "rule": outcome.rule, "kind": kinds.kind(case), "ledger": ledger,
            "steps": sorted(case.kinds()), "derivative": case.derivative, "run": case.run,
        }  # fmt: skip
        if outcome.failed:
            told["text"] = case.text(outcome.detail)
            if shrink and (outcome.what, outcome.rule) not in known:
                known.add((outcome.what, outcome.rule))
                _say(seed=seed)
                again = lambda c, ledger=ledger: of(c, float(ledger), chip)[0]
                smaller = shrinking.shrink(case, outcome, again, seconds=shrink)
                told["text"] = smaller.text(again(smaller).detail)
        _say(**told, seconds=time.monotonic() - begin)


def of(case: Case, ledger_share: float, chip: str = "") -> tuple[Outcome, bool]:
    """What comes of a case, and whether its ledger was held against the compiled program."""
    outcome = running.run(case)
    if outcome.what == "right" and chip and (on := proving.target_of(case, chip)):
        outcome = proving.check(case, on)
    fit = outcome.what == "right" and not case.broken and case.setting.mode not in ("auto", "alone")
    if fit and case.run != "eager" and np.random.default_rng([case.seed, 3]).random() < ledger_share:
        return ledgers.check(case), True
    return outcome, False


def _say(**fields) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
