"""Eight CPU devices, strict promotion: set before JAX looks at its devices."""

import ctypes
import functools
import gc
import importlib.metadata
import os
import pathlib
import sys
import threading

from tests.compiler import quick_flags

# Before JAX reads it, and for the processes that tests start: tests hold what a program computes and moves, not what
# LLVM makes of its loops. Compiled with the least effort they take half of the time.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("XLA_FLAGS", quick_flags())
# A program is compiled once for all tests, all their processes, and the next run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parent / ".cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir

os.environ.setdefault("TRELLIS_CHECK", "1")  # annotations hold in every test
# Python keeps what it makes of a module, also where the environment says that it shall not: every process would make it
# of all of Trellis again, in 0.8 s of processor, and every process of the tests of all tests, in 6 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
gc.disable()  # until tests are collected: what is imported stays, and looking through it for garbage takes seconds
jax.config.update("jax_platforms", "cpu")  # also where a GPU, or libtpu for compiling ahead of time, is installed
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@functools.wraps(jax.stages.Lowered.compile)
def _compile(self, *arguments, _compile=jax.stages.Lowered.compile, **options):
    """What is compiled ahead of its call is compiled to be read: its names and source lines must be its own."""
    before = jax.config.jax_compilation_cache_include_metadata_in_key
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        return _compile(self, *arguments, **options)
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", before)


jax.stages.Lowered.compile = _compile


class _Context(threading.local):
    """What this thread's programs are written in: one MLIR context for a hundred of them, where JAX 0.12 has one for
    ten. To make one and let it go takes 5 ms of processor, a quarter of what a small program takes to compile."""

    context, programs = None, 0

    def __call__(self, *, _make=mlir.make_ir_context):
        if self.programs % 100 == 0:
            self.context = _make()
        self.programs += 1
        return self.context


if importlib.metadata.version("jaxlib").startswith("0.10."):
    mlir.make_ir_context = _Context()


def pytest_addoption(parser):
    parser.addoption("--regenerate", action="store_true", help="write golden files anew instead of comparing with them")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One process more than this one may use cores: some tests wait for other processes, or for time to pass."""
    from trellis.cores import usable_cores

    return usable_cores() + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """`pytest.mark.slow(but=3)` marks all of a test's cases but three, spread evenly over them. What is marked
    `slow(first=True)` runs before all others: begun last, it would keep one process busy while the others are done."""
    items.sort(key=lambda item: not any("first" in mark.kwargs for mark in item.iter_markers("slow")))
    cases = {}
    for item in items:
        if any(mark.name == "slow" and "but" in mark.kwargs for mark in item.own_markers):
            cases.setdefault((item.path, item.originalname), []).append(item)
    for each in cases.values():
        but = next(mark.kwargs["but"] for mark in each[0].own_markers if "but" in mark.kwargs)
        for item in each[:: -(-len(each) // but)]:
            item.own_markers = [mark for mark in item.own_markers if "but" not in mark.kwargs]


# Bytes that a process of the tests has before it lets go of compiled programs, and by which it grows before it does so
# again.
ROOM, GROWTH = 1.5e9, 0.3e9

# Seconds of processor from which on a test that is not marked `slow` is named at the end.
QUICK = 0.7


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    item.begun = _processor()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test's report says how much processor it took, its fixtures and processes with it."""
    try:
        return (yield)
    finally:
        if item.get_closest_marker("slow") is None:
            item.user_properties.append(("processor", _processor() - item.begun))


def pytest_terminal_summary(terminalreporter):
    """Tells what the tests that are not marked slow took of the processor, and names those that do not belong there."""
    took = {
        report.nodeid: seconds
        for reports in terminalreporter.stats.values()
        for report in reports
        for what, seconds in getattr(report, "user_properties", ())
        if what == "processor"
    }
    terminalreporter.section("not marked slow")
    terminalreporter.line(f"{sum(took.values()):.0f} s of processor in {len(took)} tests")
    for name, seconds in sorted(took.items(), key=lambda each: -each[1]):
        if seconds > QUICK:
            terminalreporter.line(f"{seconds:.1f} s of it in {name}")


def _processor() -> float:
    """Seconds that this process and its children have worked."""
    return sum(os.times()[:4])


def pytest_configure(config):
    from trellis.mesh.platform import leave_threads

    config.room = ROOM
    leave_threads(jax.config.jax_num_cpu_devices)  # whichever test is the first to look at the devices


def pytest_collection_finish(session):
    """What was imported and collected stays. A trace makes objects by the million, which live as long as it does: to
    look through them for garbage took a tenth of all time, and is left to where a process has grown."""
    jax.devices()  # eight for all tests: a command that is run first would ask for another number
    gc.freeze()
    gc.enable()
    gc.set_threshold(5_000_000, 20, 20)


def pytest_runtest_teardown(item, nextitem):
    """Lets go of compiled programs where a process has grown: eight of them are to fit a laptop. Where little is let go
    of, it waits until the process has grown again: half a second after each test is more than most tests take."""
    if nextitem is not None and _resident() > item.config.room:
        jax.clear_caches()
        gc.collect()
        _give_back()
        item.config.room = max(ROOM, _resident() + GROWTH)


def _give_back() -> None:
    """Gives memory that is free back to the system, where the allocator keeps it: jemalloc, or glibc's."""
    allocator = ctypes.CDLL(None)
    if hasattr(allocator, "mallctl"):
        allocator.mallctl(b"arena.4096.purge", None, None, None, ctypes.c_size_t(0))  # 4096 stands for all arenas
    elif hasattr(allocator, "malloc_trim"):
        allocator.malloc_trim(0)


def _resident() -> int:
    """Bytes of memory that this process has, where the system tells."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture(autouse=True)
def names_in_docstrings(doctest_namespace):
    """Examples in docstrings have the names that everybody imports."""
    import trellis as tr
    from trellis import nn

    doctest_namespace |= {"jax": jax, "jnp": jnp, "np": np, "tr": tr, "nn": nn}
