"""Starts commands in processes that have imported everything: `python -m tests.chaos.server`, a line of JSON each.

A process is forked before JAX looks at its devices, and ends as the command's own would. Into the new process go the
words of the command, the files of its output, and what is to be wrong with its world: `file_bytes`, the most that a
file may have; `jump`, after how many seconds the clock jumps and how far; `slow`, what the disk takes for each file.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from typing import Any


def serve() -> dict[str, Any] | None:
    """Answers requests until there are no more; in a new process, returns what that is to do."""
    for text in sys.stdin:
        request = json.loads(text)
        if "words" in request:
            pid = os.fork()
            if pid == 0:
                return request
            answer = pid
        else:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), flush=True)
    return None


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
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    import orbax.checkpoint  # noqa: F401

    import trellis.models.generate
    import trellis.pages.run
    import trellis.plan
    import trellis.recipes.load
    import trellis.train.loop  # noqa: F401
    from trellis.commands import line

    line.commands()
    request = serve()
    if request is None:
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)  # asked for where a command hangs: what its threads are at
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    spoil(**request["world"])
    sys.argv[1:] = request["words"]
    return line.main()


if __name__ == "__main__":
    sys.exit(main())
