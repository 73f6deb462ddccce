"""Tokenizing on a Ray cluster: one worker for each core, on every machine of the cluster."""

import importlib.util
import itertools
import pickle
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from trellis.data.blocks import Block, Encoded, Job
from trellis.data.tokenizing.pool import ALONE, IN_FLIGHT, in_order
from trellis.errors import UserError


class RayPool:
    """Workers on the Ray cluster that this process is connected to, else on the one that RAY_ADDRESS names, else on a
    local one.

    Args:
        job: what to do.
        workers: how many; by default one for each CPU of the cluster.
    """

    def __init__(self, job: Job, workers: int | None = None):
        try:
            import ray
            import ray.cloudpickle
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
        told = ray.put(pickle.dumps(job))
        remote = ray.remote(num_cpus=1)(_RayEncoder)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        try:
            self._actors: list[Any] = [remote.remote(ALONE, told) for _ in range(self.workers)]
        finally:
            ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
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
                "A tokenizing worker must not die.",
                seen=str(error).splitlines()[0],
                where="--workers ray",
                fix="check the cluster, then run the same command again; it continues where it left off",
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
    """A worker. Ray sends its code as it is here, so that a machine need not import the rest of Trellis and JAX with
    it: only what `Encoder` needs is imported there."""

    def __init__(self, alone: str, job: bytes):
        found = importlib.util.find_spec("trellis")
        if found is None or not found.submodule_search_locations:
            raise ModuleNotFoundError(
                "Trellis must be installed on every machine of the cluster, and is not on this one."
            )
        exec(alone, {"package": found.submodule_search_locations[0]})
        from trellis.data.tokenizing.worker import Encoder

        self._encoder = Encoder(pickle.loads(job))

    def encode(self, block):
        return self._encoder(block)
