"""Processes that have imported everything: the second and more that it takes to start one is spent once.

A server imports, and forks a process for each request before JAX looks at its devices; that runs the `main` of a module
with words of its own, as a command of its own would, and ends as that would. `start` has the face of
`subprocess.Popen`. What is to be seen of the start of a process itself takes that instead.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Server:
    """The process that starts others."""

    def __init__(self, environment: Mapping[str, str] | None = None):
        # No threads where it forks; and what crashes says where it was.
        own = {"OPENBLAS_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        environment = {**os.environ, **own, **(environment or {})}
        command = [sys.executable, "-m", "tests.train.forks"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Forked:
    """A process that runs, with the methods of `subprocess.Popen`.

    Args:
        server: which starts it.
        module: whose `main` it runs.
        words: of its command line.
        folder: gets the files of what it prints.
        environment: its variables; None for the server's.
    """

    def __init__(
        self,
        server: Server,
        module: str,
        words: list[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ):
        self._server, self.returncode = server, None
        self._files = {name: str(folder / f"{time.monotonic_ns()}.{name}") for name in ("out", "err")}
        asked = {"module": module, "words": words, "environment": environment and dict(environment)}
        self.pid = server.ask({**asked, **self._files})

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"pid": self.pid})
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Waits for its end: what it printed."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}: {self.said('err')}", timeout)
            time.sleep(0.01)
        return self.said("out"), self.said("err")

    def said(self, name: str) -> str:
        """What it printed so far to "out" or "err"."""
        path = Path(self._files[name])
        return path.read_text(errors="replace") if path.exists() else ""

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> tuple[Server, Path]:
    """This process's own, until it ends."""
    server, folder = Server(), tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    atexit.register(server.close)
    return server, Path(folder.name)


def start(module: str, *words: Any) -> Forked:
    """Runs the `main` of a module in a process of its own, with words of its command line."""
    server, folder = _server()
    return Forked(server, module, [str(word) for word in words], folder, os.environ)


def _serve() -> dict[str, Any] | None:
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


def _main() -> int:
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    gc.disable()  # what is imported stays
    import orbax.checkpoint  # noqa: F401

    import trellis.models.generate
    import trellis.pages.run
    import trellis.plan
    import trellis.recipes.load
    import trellis.train.loop  # noqa: F401
    from trellis.commands import line

    line.commands()
    gc.freeze()
    gc.enable()
    request = _serve()
    if request is None:
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request["environment"] is not None:
        os.environ.clear()
        os.environ.update(request["environment"])
    sys.argv[1:] = request["words"]
    return importlib.import_module(request["module"]).main()


if __name__ == "__main__":
    sys.exit(_main())
