"""How a run ends before its last step: a signal from outside, or its own decision."""

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from types import FrameType
from typing import NoReturn

import jax

from trellis.checkpoints.checkpoints import LastGood
from trellis.checkpoints.room import NoRoom
from trellis.errors import UserError
from trellis.files import no_room, refused
from trellis.interrupts import instead_of_abort, keep_interrupts

# What the runtimes report when another process of the run is gone.
_PEER = re.compile(
    r"gloo|nccl|connection (reset|refused|closed)|coordination service|heartbeat|peer|barrier|"
    r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED",
    re.IGNORECASE,
)


class RunStopped(UserError):
    """The run stopped itself; the message names the last good checkpoint. Exit code 3."""

    exit_code = 3


class StoppedTogether(RunStopped):
    """A reason to stop that every process of a run finds at the same step, so that none waits for another."""


class LossNotFinite(StoppedTogether):
    """The loss was not finite too often."""


class CopiesDiffer(StoppedTogether):
    """Devices that should hold the same value do not, or a step that was made twice gave two results."""


class ProgramDiffers(StoppedTogether):
    """A compiled step does not do what its types say."""


def explain(error: BaseException, last_good: LastGood) -> BaseException:
    """The error to show the user for one that ended a loop: the error itself, or a `RunStopped` in its place.

    Args:
        error: what was raised.
        last_good: words about the last good checkpoint.
    """
    if isinstance(error, NoRoom) or no_room(error):
        return RunStopped(
            "The disk must have room for what the run writes.",
            seen=error.seen if isinstance(error, NoRoom) else no_room(error),
            where=last_good.where,
            fix=f"free some space, then {last_good.again}",
        )
    if not isinstance(error, UserError) and (reason := refused(error)):
        return RunStopped(
            "The files of a run must be readable and writable while it trains.",
            seen=reason,
            where=last_good.where,
            fix=f"check that its file system is mounted and writable, then {last_good.again}",
        )
    if isinstance(error, jax.errors.JaxRuntimeError):
        first = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
            return RunStopped(
                "A step must fit in the memory of its devices.",
                seen=f"{first:.300}",
                where=last_good.where,
                fix="use smaller microbatches, more checkpointing of activations, or more devices; "
                "`trellis memory` shows what each device holds",
            )
    if jax.process_count() > 1 and (reason := _peer_lost(error)):
        return _lost(f"lost another process: {reason:.200}", last_good)
    return error


def _peer_lost(error: BaseException | None) -> str:
    """What a runtime reports about a process that is gone, if that is why something failed; else "".

    The caller that waited may have wrapped it in an error of its own: Orbax calls a barrier that failed a timeout.
    """
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and _PEER.search(str(error)):
            return str(error).splitlines()[0]
        error = error.__cause__ or error.__context__
    return ""


def _lost(how: str, last_good: LastGood) -> RunStopped:
    return RunStopped(
        "All processes of a run must keep running.",
        seen=f"process {jax.process_index()} of {jax.process_count()} {how}",
        where=last_good.where,
        fix="check the other processes' output, then start them all again",
    )


@contextlib.contextmanager
def explained_abort(last_good: Callable[[], LastGood]) -> Generator[None]:
    """Within it, an abort by JAX's multi-process runtime ends this process as `RunStopped` does.

    Args:
        last_good: gives words about the last good checkpoint.
    """
    if jax.process_count() == 1:
        yield
        return
    with instead_of_abort(
        lambda: leave_at_once(_lost("was ended by JAX's runtime, for the reason above", last_good()))
    ):
        yield


@contextlib.contextmanager
def left_alone(last_good: Callable[[], LastGood]) -> Generator[None]:
    """Within it, a process of several that waits for one that is gone ends and says so, even before the loop has begun.

    Args:
        last_good: gives words about the last good checkpoint.
    """
    with explained_abort(last_good):
        try:
            yield
        except Exception as error:
            if jax.process_count() > 1 and isinstance(told := explain(error, last_good()), RunStopped):
                leave_at_once(told)
            raise


def leave_at_once(error: BaseException) -> NoReturn:
    """Says what happened and ends this process, one of several, without the runtime's shutdown.

    The interpreter's ordinary exit would wait for the other processes, which wait for this one.
    """
    if isinstance(error, UserError):
        print(f"trellis: {error}", file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1))


class Signals:
    """Notes SIGTERM, SIGINT and SIGHUP while a run trains, so that it saves a checkpoint before it ends.

    With several processes, JAX's preemption service takes the SIGTERM of any of them and lets all stop at the same
    step; a process that gets another signal therefore sends itself SIGTERM. A second SIGINT ends the run at once. A
    SIGHUP that is ignored from the start, as under nohup, stays so.
    """

    def __init__(self) -> None:
        self._noted: int | None = None  # the signal that this process got
        self._received: int | None = None  # that at which the run ends
        self._asked = 0  # steps of this start
        self._before: dict[int, object] = {}
        self._together = jax.process_count() > 1

    def __enter__(self) -> "Signals":
        # Python lets only the main thread set handlers.
        if threading.current_thread() is threading.main_thread():
            hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
            for number in (signal.SIGINT, *hangup, *(() if self._together else (signal.SIGTERM,))):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def exit_code(self) -> int | None:
        """128 and the signal's number once the run is to stop, 143 if another process got it; else None.

        Every process asks once a step. JAX's service stops all at the number after the last that any has asked with.
        It has to start at 1 in each start of a run: a signal before the first step makes all stop at number 1.
        """
        self._asked += 1
        if self._together and self._received is None:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(self._asked):
                self._received = self._noted or signal.SIGTERM
        return None if self._received is None else 128 + self._received

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None and number == signal.SIGINT:
            keep_interrupts(quiet=True)  # libraries that it interrupts print tracebacks
            raise KeyboardInterrupt
        self._noted = number
        if self._together:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._received = number
