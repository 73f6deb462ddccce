"""Cycles of the processor that this process spends: what does not hang on its clock, nor on who else has it."""

import ctypes
import os
import struct
from collections.abc import Callable
from typing import Any

import jax

# Of Linux's `perf_event_open`: the number of the call on x86-64, and what it is asked to count.
_CALL, _SIZE, _INHERIT, _EXCLUDE_HYPERVISOR = 298, 128, 1 << 1, 1 << 6


class Cycles:
    """A count of the cycles of all threads that are started after it, in the program and in the kernel.

    Raises:
        OSError: the kernel does not count here, or does not tell (`/proc/sys/kernel/perf_event_paranoid`).
    """

    def __init__(self):
        attributes = bytearray(_SIZE)
        struct.pack_into("IIQQQQQ", attributes, 0, 0, _SIZE, 0, 0, 0, 0, _INHERIT | _EXCLUDE_HYPERVISOR)
        library = ctypes.CDLL(None, use_errno=True)
        self._file = library.syscall(_CALL, (ctypes.c_char * _SIZE).from_buffer(attributes), 0, -1, -1, 0)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def read(self) -> int:
        """Cycles until now."""
        return struct.unpack("Q", os.read(self._file, 8))[0]

    def least(self, call: Callable[[], Any], times: int) -> int:
        """Cycles of the cheapest of several calls, each of which returns arrays that are waited for."""
        found = []
        for _ in range(times):
            before = self.read()
            jax.block_until_ready(call())
            found.append(self.read() - before)
        return min(found)
