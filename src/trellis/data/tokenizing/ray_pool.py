"""Tokenizing on a Ray cluster: one worker a core, on every machine of it."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from trellis.data.blocks import Block, Encoded, Job
from trellis.data.tokenizing.pool import IN_FLIGHT, in_order
from trellis.data.tokenizing.worker import Encoder
from trellis.errors import UserError


class RayPool:
    """Workers on the Ray cluster this process is connected to; if to none, on the one that RAY_ADDRESS names, else on
    a local one.

    Args:
        job: what to do.
        workers: how many; by default one for each CPU of the cluster.
    """

    def __init__(self, job: Job, workers: int | None = None):
        try:
            import ray
            import ray.exceptions
        except ImportError as error:
            raise UserError(
                "Tokenizing across machines needs Ray.",
                seen=error,
                where="--workers ray",
                fix="pip install 'trellis[ray]'",
            ) from error
        self._ray = ray
        self._started = not ray.is_initialized()
        if self._started:
            ray.init(log_to_driver=False, include_dashboard=False)
        self.workers = workers or int(ray.cluster_resources().get("CPU", 1))
        job_reference = ray.put(job)
        remote = ray.remote(num_cpus=1)(_RayEncoder)
        self._actors: list[Any] = [remote.remote(job_reference) for _ in range(self.workers)]
        self._turns = itertools.cycle(self._actors)

    def encode(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, Encoded]]:
        """Each block with its tokens, in order. At most `IN_FLIGHT` blocks a worker are held at a time."""

        def submit(block):
            reference = next(self._turns).encode.remote(block)
            return lambda: self._result(reference)

        yield from in_order(blocks, submit, IN_FLIGHT * self.workers)

    def _result(self, reference):
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayActorError as error:
            raise UserError(
                "Every tokenizing worker stays alive.",
                seen=str(error).splitlines()[0],
                where="--workers ray",
                fix="look at the cluster, then run the same command again; it continues where it was",
            ) from error

    def close(self) -> None:
        """Stops the workers, and the cluster if this pool started it."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._started:
            self._ray.shutdown()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _RayEncoder:
    def __init__(self, job):
        self._encoder = Encoder(job)

    def encode(self, block):
        return self._encoder(block)
