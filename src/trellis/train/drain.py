"""Moves metrics off the device without stopping it."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np


@dataclass(slots=True, kw_only=True)
class Record:
    """One step's metrics on the host, and when things happened (seconds of `time.perf_counter`).

    Attributes:
        step: how many steps had been made after this one.
        values: the metrics, including those that were added for the same step (an evaluation).
        arrays: what was added and is not a scalar.
        counts: whether any token of its batch counted: without one a step has no loss and no gradient.
        first: words for the step's first weight or gradient that was not finite; empty if none is known.
        dispatched: when the loop began to hand the step to the device.
        done: when the device had finished it.
        began: when the loop had finished what is not part of a step; 0 if there was nothing of the kind.
        idle_from: when the device had finished its earlier work, but not before `began`; None for the first.
        waited: when the loop began and ended its wait for the step's batch.
        released: when the device had finished what was added for the step, such as an evaluation.
    """

    step: int
    values: dict[str, float]
    dispatched: float
    waited: tuple[float, float] | None = None
    done: float = 0.0
    began: float = 0.0
    idle_from: float | None = None
    released: float = 0.0
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    counts: bool = True
    first: str = ""

    @property
    def seconds(self) -> float:
        """Seconds from the end of the device's earlier work to the end of this step: waiting for data counts."""
        return self.done - (self.dispatched if self.idle_from is None else self.idle_from)

    @property
    def data_wait(self) -> float:
        """Seconds for which the device had nothing to do while the loop waited for the step's batch."""
        if self.waited is None or self.idle_from is None:
            return 0.0
        return max(0.0, self.waited[1] - max(self.waited[0], self.idle_from))


@dataclass(slots=True)
class _Pending:
    record: Record
    first: dict[str, jax.Array]
    later: dict[str, jax.Array] = field(default_factory=dict)
    sealed: bool = False


_LAST_WAIT = 10.0  # seconds


class Drain:
    """A thread that waits for each step's metrics, so that the training loop does not.

    The loop pushes device scalars and continues; it blocks only when it is `max_ahead` steps ahead of the device, which
    bounds the batches in flight and never lets the device run out of work.

    Args:
        max_ahead: how many steps may be dispatched but unfinished.
        finished: called by the thread with a step's record when the device has finished it, and again when it has
            finished what was added for it.

    A failure on the device is raised by the next call of any method.
    """

    def __init__(self, max_ahead: int = 4, finished: Callable[[Record], None] = lambda record: None):
        self._max_ahead, self._finished = max_ahead, finished
        self._pending: deque[_Pending] = deque()
        self._unfinished, self._began = 0, 0.0
        self._records: deque[Record] = deque()
        self._failure: BaseException | None = None
        self._closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def push(
        self,
        step: int,
        metrics: Mapping[str, jax.Array],
        waited: tuple[float, float] | None = None,
        handed: float | None = None,
    ) -> None:
        """Hands over a step's metrics, scalars on the device.

        Args:
            step: how many steps have been made with this one.
            metrics: scalar arrays, each on all devices or on one.
            waited: when the loop began and ended its wait for the step's batch, in `time.perf_counter` seconds.
            handed: when it began to hand the step to the device, which a CPU may compute meanwhile; now if not given.
        """
        now = time.perf_counter()
        with self._change:
            self._seal()
            handed = now if handed is None else handed
            record = Record(step=step, values={}, dispatched=handed, waited=waited, began=self._began)
            if _ready(metrics):  # a CPU may compute while it dispatches, and the thread would notice later
                record.done = now
                for before in self._pending:  # is finished, too
                    before.record.done = before.record.done or now
                    before.record.released = before.record.released or now
            self._pending.append(_Pending(record, dict(metrics)))
            self._unfinished += 1
            self._change.notify_all()
            self._change.wait_for(lambda: self._failure or self._unfinished <= self._max_ahead)
            self._raise()

    def add(self, metrics: Mapping[str, jax.Array]) -> None:
        """Adds to the last pushed step what was dispatched after it: an evaluation's scalars, small arrays."""
        with self._change:
            self._raise()
            self._pending[-1].later.update(metrics)
            if _ready(metrics):
                self._pending[-1].record.released = time.perf_counter()

    def excuse(self) -> None:
        """Starts the next step's time no earlier than now: what the loop did so far, say compiling, is not counted."""
        self._began = time.perf_counter()

    def poll(self) -> list[Record]:
        """The finished records since the last call, in order. Never waits.

        A step's record comes after the next step was pushed: until then something may be added to it.
        """
        with self._change:
            self._raise()
            found = list(self._records)
            self._records.clear()
            return found

    def flush(self) -> list[Record]:
        """Waits for everything that was pushed, and returns what `poll` has not returned."""
        with self._change:
            self._seal()
            self._change.notify_all()
            self._change.wait_for(lambda: self._failure or not self._pending)
        return self.poll()

    def close(self) -> None:
        """Ends the thread; waits no longer than some seconds for a device that hangs.

        A thread that is inside JAX when the interpreter ends would abort the process (Python before 3.14).
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_LAST_WAIT)

    def _seal(self) -> None:
        if self._pending:
            self._pending[-1].sealed = True

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        idle_from = None
        try:
            while True:
                with self._change:
                    self._change.wait_for(lambda: self._closed or self._pending)
                    if self._closed:
                        return
                    item = self._pending[0]
                _fetch(item.record, item.first)
                item.record.done = item.record.done or time.perf_counter()
                item.record.idle_from = None if idle_from is None else max(idle_from, item.record.began)
                self._finished(item.record)
                with self._change:
                    self._unfinished -= 1
                    self._change.notify_all()
                    self._change.wait_for(lambda item=item: self._closed or item.sealed)
                    if not item.sealed:
                        return
                if item.later:
                    _fetch(item.record, item.later)
                    self._finished(item.record)
                else:
                    item.record.released = item.record.done
                idle_from = item.record.released = item.record.released or time.perf_counter()
                with self._change:
                    self._records.append(item.record)
                    self._pending.popleft()
                    self._change.notify_all()
        except BaseException as error:  # the loop's thread raises it again
            with self._change:
                self._failure = error
                self._change.notify_all()


def _ready(arrays: Mapping[str, Any]) -> bool:
    return all(array.is_ready() for array in arrays.values() if hasattr(array, "is_ready"))


def _fetch(record: Record, arrays: dict[str, jax.Array]) -> None:
    for array in arrays.values():
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    for name, array in arrays.items():
        found = np.asarray(array)
        if found.ndim:
            record.arrays[name] = found
        else:
            record.values[name] = float(found)
