"""Runs cases one after the other in a process of its own, and writes a line of JSON before and after each."""

import json
import sys
import time

import numpy as np

from . import kinds, ledgers, running, shrinking
from .case import Case
from .running import Outcome


def work(seeds: list[int], *, only: str, shrink: float, ledger_share: float, many: bool = False) -> None:
    """Runs the cases of some seeds; of the first failure of each kind it looks for a smaller one.

    Args:
        only: how the kinds that are run begin, empty for all.
        shrink: seconds to look for a smaller one.
        ledger_share: of programs whose ledger is held against the compiled program.
        many: whether they are for 9 to 24 devices, and not for up to 8.
    """
    known: set[tuple[str, str]] = set()
    for seed in seeds:
        _say(seed=seed)
        begin = time.monotonic()
        case = kinds.draw(seed, many)
        if not kinds.kind(case).startswith(only):
            _say(seed=seed, skipped=True)
            continue
        outcome, ledger = of(case, ledger_share)
        told = {
            "seed": seed, "what": outcome.what, "rule": outcome.rule, "kind": kinds.kind(case), "ledger": ledger,
            "steps": sorted(case.kinds()), "derivative": case.derivative, "run": case.run,
        }  # fmt: skip
        if outcome.failed:
            told["text"] = case.text(outcome.detail)
            if shrink and (outcome.what, outcome.rule) not in known:
                known.add((outcome.what, outcome.rule))
                _say(seed=seed)
                again = lambda c, ledger=ledger: of(c, float(ledger))[0]
                smaller = shrinking.shrink(case, outcome, again, seconds=shrink)
                told["text"] = smaller.text(again(smaller).detail)
        _say(**told, seconds=time.monotonic() - begin)


def of(case: Case, ledger_share: float) -> tuple[Outcome, bool]:
    """What comes of a case, and whether its ledger was held against the compiled program."""
    outcome = running.run(case)
    fit = outcome.what == "right" and not case.broken and case.setting.mode not in ("auto", "alone")
    if fit and case.run != "eager" and np.random.default_rng([case.seed, 3]).random() < ledger_share:
        return ledgers.check(case), True
    return outcome, False


def _say(**fields) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
