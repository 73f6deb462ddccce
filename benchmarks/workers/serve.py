"""What all contestants of `train_speed.py` do: report the first step, then train some for each line read."""

import json
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

STEPS = 3  # timed in one turn, after one that is not

# Whatever a contestant prints goes beside the answers.
_ANSWERS, sys.stdout = sys.stdout, sys.stderr


def arguments() -> tuple[str, str]:
    """The shape and the dtype on the command line."""
    return sys.argv[1], sys.argv[2]


def serve(step: Callable[[], float], *, tokens: int, import_seconds: float, packages: tuple[str, ...]) -> None:
    """Trains on demand.

    Args:
        step: trains one step and returns its loss once the parameters are ready.
        tokens: in a batch.
        import_seconds: how long the imports took.
        packages: whose versions are reported.
    """

    def say(**values) -> None:
        print(json.dumps(values), file=_ANSWERS, flush=True)

    step()
    say(tokens=tokens, import_seconds=import_seconds, versions={name: version(name) for name in packages})
    for _ in sys.stdin:
        step()  # what slept wakes up
        start = time.perf_counter()
        losses = [step() for _ in range(STEPS)]
        say(seconds=(time.perf_counter() - start) / STEPS, loss=losses[-1])
    say(peak_megabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
