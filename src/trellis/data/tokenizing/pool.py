"""Pools that tokenize blocks: this process, worker processes, or a Ray cluster. The result is the same."""

import collections
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

from trellis.data.blocks import Block, Encoded, Job
from trellis.data.tokenizing.worker import Encoder, receive, send
from trellis.errors import UserError

IN_FLIGHT = 3  # blocks under way for each worker: one being encoded, two waiting

# Workers import this folder without the rest of the package, which is at `package`, so they start in a fraction of a
# second.
ALONE = """
import os, sys, types
for name, path in (("trellis", package), ("trellis.data", os.path.join(package, "data"))):
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module
"""
_BOOTSTRAP = (
    "package = {package!r}"
    + ALONE
    + """
sys.path[:] = {path!r}
from trellis.data.tokenizing.worker import main
main()
"""
)


class LocalPool:
    """`workers` processes; with 0 this process encodes, on all cores of the `tokenizers` library's own threads."""

    def __init__(self, job: Job, workers: int):
        self._job, self.workers = job, workers
        self._encoder = Encoder(job) if workers == 0 else None
        self._idle: list[_Process] = []
        self._threads = concurrent.futures.ThreadPoolExecutor(workers) if workers else None
        self._processes = [_Process(job) for _ in range(workers)]
        self._idle = list(self._processes)

    def encode(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, Encoded]]:
        """Each block with its tokens, in order. At most `IN_FLIGHT` blocks a worker are held at a time."""
        if self._encoder is not None:
            for block in blocks:
                yield block, self._encoder(block)
            return
        yield from in_order(
            blocks, lambda block: self._threads.submit(self._on_worker, block).result, IN_FLIGHT * self.workers
        )

    def _on_worker(self, block):
        process = self._idle.pop()
        try:
            return process.encode(block)
        finally:
            self._idle.append(process)

    def close(self) -> None:
        """Stops the workers."""
        for process in self._processes:
            process.kill()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def in_order(blocks, submit, limit: int) -> Iterator[tuple[Block, Encoded]]:
    """Runs `submit(block)` (which returns a function that waits for the result) on up to `limit` blocks ahead."""
    waiting: collections.deque = collections.deque()
    for block in blocks:
        waiting.append((block, submit(block)))
        if len(waiting) >= limit:
            done, result = waiting.popleft()
            yield done, result()
    while waiting:
        done, result = waiting.popleft()
        yield done, result()


class _Process:
    """One worker process and the pipe to it."""

    def __init__(self, job: Job):
        package = pathlib.Path(__file__).resolve().parents[2]
        code = _BOOTSTRAP.format(package=str(package), path=sys.path)
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
        )
        self._job, self._ready = job, False

    def encode(self, block: Block) -> Encoded:
        if not self._ready:
            self._ask(self._job)
            self._ready = True
        return self._ask(block)

    def _ask(self, message):
        try:
            send(self._process.stdin, message)
            answer = receive(self._process.stdout)
        except (EOFError, BrokenPipeError, ValueError) as error:
            code = self._process.wait()
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
            raise UserError(
                "A tokenizing worker must not die.",
                seen=f"a worker ended with code {code}" + (f": {tail[0]}" if tail else ""),
                where="trellis tokenize",
                fix="if memory ran out, use fewer --workers, then run the same command; it continues where it left off",
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self):
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            try:
                stream.close()
            except OSError:
                pass
