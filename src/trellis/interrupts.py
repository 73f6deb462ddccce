"""Makes Ctrl-C reach a program even where Python would drop it, and an abort say what happened."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import NoReturn, Protocol

_AGAIN_AFTER = 0.05  # seconds: until whatever dropped it has returned


class Unraisable(Protocol):
    """What Python hands to `sys.unraisablehook`."""

    exc_type: type[BaseException]
    exc_value: BaseException | None
    exc_traceback: TracebackType | None
    err_msg: str | None
    object: object


def keep_interrupts(quiet: bool = False) -> None:
    """Delivers a Ctrl-C once more if it came during a finalizer or a callback of the garbage collector.

    Python cannot raise it there: it prints that the exception was ignored and goes on. JAX has such a callback, and a
    large program spends a few per cent of its time in collections.

    Args:
        quiet: whether everything else that is dropped there goes unsaid, as befits a program that ends at once.
    """

    main_thread = threading.main_thread().ident or 0

    def again(dropped: Unraisable) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Timer(_AGAIN_AFTER, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
        elif not quiet:
            sys.__unraisablehook__(dropped)

    sys.unraisablehook = again


def end_now(code: int) -> NoReturn:
    """Ends this process with an exit code, without what Python does at its exit.

    That takes down XLA's client. If its threads are still computing, as where Ctrl-C came in between, they find it gone
    and abort the process.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or it is closed
            stream.flush()
    os._exit(code)


def end_within(seconds: float, code: int) -> None:
    """Ends this process with an exit code after so many seconds, if it has not ended by itself.

    At its exit Python waits for the threads of libraries. If a checkpoint could not be written, some of Orbax's wait
    ten minutes for a directory that nobody makes.
    """
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def end_at_once_on_interrupt(code: int) -> None:
    """Makes Ctrl-C end this process at once and silently from now on: it is ending anyway, with this exit code.

    An interrupt in a function that Python calls at its exit would print that function's traceback.
    """
    if threading.current_thread() is threading.main_thread():  # only that one may set handlers
        signal.signal(signal.SIGINT, lambda *_: os._exit(code))


@contextlib.contextmanager
def instead_of_abort(leave: Callable[[], NoReturn]) -> Generator[None]:
    """Within it, C's `abort` calls a function that ends this process.

    A process that waits in a collective learns of a lost one from the heartbeat of JAX's multi-process runtime, and the
    runtime then calls `abort`: there is no Python exception, and Python's own signal handlers do not get to run. The
    runtime's callback for this cannot be used (`missed_heartbeat_callback` ends in a `std::bad_cast`, JAX 0.10.2 to
    0.12), so the handler is C's.
    """
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = handler_type(lambda number: leave())
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, handler_type], ctypes.c_void_p
    before = set_handler(signal.SIGABRT, handler)
    try:
        yield
    finally:
        set_handler(signal.SIGABRT, ctypes.cast(before, handler_type))


@contextlib.contextmanager
def ended_by_interrupts() -> Generator[None]:
    """Within it, Ctrl-C ends this process even while a library's function waits, where Python would not raise it."""
    own = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT)
    if own is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
