"""A command in a world in which something is wrong: `main` is given JSON of what, and the command's words.

`file_bytes` is the most that a file may have; `jump` after how many seconds the clock jumps, and how far; `slow` what
the disk takes for each file.
"""

import faulthandler
import json
import os
import signal
import sys
import time

from trellis.commands import line


def spoil(file_bytes: int | None = None, jump: tuple[float, float] | None = None, slow: float | None = None) -> None:
    """Makes the world of this process another one."""
    if file_bytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    if jump is not None:
        clock, begun = time.time, time.monotonic()
        time.time = lambda: clock() + (jump[1] if time.monotonic() - begun > jump[0] else 0.0)
    if slow is not None:
        sync = os.fsync
        os.fsync = lambda file: (time.sleep(slow), sync(file))[1]


def main() -> int:
    faulthandler.register(signal.SIGUSR1)  # asked for where a command hangs: what its threads are at
    spoil(**json.loads(sys.argv.pop(1)))
    return line.main()
