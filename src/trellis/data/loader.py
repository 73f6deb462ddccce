"""Batches on the devices, each read ahead while the devices work on the one before."""

import dataclasses
import queue
import threading
import time
from collections.abc import Iterator

from trellis.data.arguments import whole
from trellis.data.batch import Batch
from trellis.data.batch_sequence import Batches
from trellis.errors import UserError, shortened


class Loader:
    """An iterator of (step, batch) whose arrays are spread over the devices of `sharding`.

    Only the rows of this host's devices are read. A background thread reads one batch after the other and keeps up to
    `prefetch` of them ready; memory holds that many batches, one being made and one in use.

    Args:
        batches: what to load.
        sharding: a `jax.sharding.Sharding` of `[batch pos]` arrays.
        start_step: the first step.
        prefetch: batches kept ready.

    Attributes:
        wait_seconds: how long the last `next` waited for data.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, batches: Batches, sharding, start_step: int = 0, prefetch: int = 2):
        _check(batches, sharding)
        start_step, prefetch = whole(start_step, "start_step", "Loader"), whole(prefetch, "prefetch", "Loader")
        self._batches, self._sharding = batches, sharding
        self.wait_seconds = 0.0
        self._ready: queue.Queue = queue.Queue()
        self._room = threading.Semaphore(max(1, prefetch))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(start_step,), name="trellis-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        return self

    def __next__(self) -> tuple[int, Batch]:
        if self._stop.is_set():
            raise StopIteration
        began = time.perf_counter()
        step, batch, error = self._ready.get()
        self.wait_seconds = time.perf_counter() - began
        if error is not None:
            self.close()
            raise error
        if batch is None:
            self.close()
            raise StopIteration
        self._room.release()
        return step, batch

    def close(self) -> None:
        """Stops reading ahead. Safe to call twice."""
        self._stop.set()
        self._room.release()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _run(self, step):
        try:
            last = self._batches.num_steps
            while self._has_room():
                batch = None if last is not None and step >= last else sharded(self._batches, step, self._sharding)
                self._ready.put((step, batch, None))
                if batch is None:
                    return
                step += 1
        except BaseException as error:
            self._ready.put((step, None, error))

    def _has_room(self):
        """Waits for room for a batch; false if none is wanted any more."""
        self._room.acquire()
        return not self._stop.is_set()


def _check(batches, sharding) -> None:
    """Refuses what is loaded, or where to, if it is of another type."""
    from jax.sharding import Sharding

    wrong = "batches" if not hasattr(batches, "num_steps") else "sharding" if not isinstance(sharding, Sharding) else ""
    if wrong:
        raise UserError(
            "A loader needs batches, and a sharding of them over devices.",
            seen=f"{wrong}={shortened(repr(batches if wrong == 'batches' else sharding), 80)}",
            where="Loader",
            fix="write Loader(Batches(store, ...), NamedSharding(mesh, PartitionSpec('data')))",
        )


def rows_here(batches: Batches, step: int, sharding, shape: tuple[int, int]) -> dict[tuple[int, int], Batch]:
    """The slices of a batch that this host's devices hold, by their first row and the row after their last."""
    here = sharding.addressable_devices_indices_map(shape).values()
    rows = sorted({index[0].indices(shape[0])[:2] for index in here})
    return {(start, stop): batches.batch(step, rows=slice(start, stop)) for start, stop in rows}


def sharded(batches: Batches, step: int, sharding) -> Batch:
    """The batch of `step` as `jax.Array`s over the devices of `sharding`, reading only this host's rows."""
    import jax

    shape = batches.sizes.shape(step)
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        raise UserError(
            "A batch must split evenly over the devices.",
            seen=f"{shape[0]} rows of {shape[1]} tokens, sharded {tuple(sharding.spec)} over {axes}",
            where=f"the batch of step {step}",
            fix="choose a batch_size and a sequence_length that the mesh axes divide",
        ) from error
    read = rows_here(batches, step, sharding, shape)

    def field(name):
        def part(index):
            return getattr(read[index[0].indices(shape[0])[:2]], name)[:, index[1]]

        here = next(iter(read.values()))
        return None if getattr(here, name) is None else jax.make_array_from_callback(shape, sharding, part)

    return Batch(**{f.name: field(f.name) for f in dataclasses.fields(Batch)})
