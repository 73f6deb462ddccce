"""Compiling a step once, and keeping what was compiled for the next run."""

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax

from trellis._compat import sums_in_one_order
from trellis.errors import UserError
from trellis.files import cache_folder
from trellis.inspect.meeting import in_order, keep_what_loads_right

# The options of a platform's compiler that hold unless a run sets them. By itself XLA orders a CPU's operations so that
# many could run at once, which starts the backward pass's copies and exponentials in the forward pass: on two cores a
# step has a fifth more in memory and is up to a sixth slower (docs/cpu-speed.md). On a GPU, XLA recomputes what does
# not fit into three quarters of the memory, by its own choice and after minutes of trying; a run has 95 % of it
# (hardware/platform.py), and this percentage says so. XLA's default scheduler is not the one that puts collectives
# beside computation. By default it also sums all gradients of a layer as one, after the last is there and nothing is
# left to do beside the sum: here up to a mebibyte is one sum (docs/plan.md).
DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
    "gpu": {
        "xla_gpu_memory_limit_slop_factor": "118",
        "xla_gpu_enable_latency_hiding_scheduler": "True",
        "xla_gpu_reduce_scatter_combine_threshold_bytes": "1048576",
    },
}
# The CPU's order holds for up to this many devices. It leaves some collectives behind a loop with collectives. In the
# other order they begin before the loop; in this one they may run beside it (`trellis.inspect.meeting`). The steps of
# recipes have no such pair on two devices, and do on eight; a step on two that has one is compiled in the other order.
MOST_DEVICES = 2
_ORDER = "xla_cpu_scheduler_type"

# The option that tells XLA for GPUs how long instructions take (`trellis plan --costs`). If the file is not there, XLA
# continues without it, and says so only in a log.
COSTS = "xla_gpu_pgle_profile_file_or_directory_path"

# The options of XLA for GPUs with which it takes sums in one order.
ONE_ORDER = ("xla_gpu_exclude_nondeterministic_ops", "xla_gpu_deterministic_ops")

# XLA's programs for CPUs without optimization read up to 12 bytes behind an array, and die of signal 11 where that is
# no more the process's memory (docs/published-bugs.md, 43).
_LEVEL = "xla_backend_optimization_level"

# Prefixes of the options that only one platform's compiler knows; jf is an old name of TPUs.
_PREFIXES = {"cpu": ("xla_cpu_",), "gpu": ("xla_gpu_",), "tpu": ("xla_tpu_", "xla_jf_", "xla_enable_async_")}


def use_persistent_cache(folder: str | Path | None = None) -> None:
    """Keeps compiled programs between runs. The environment variables of JAX's compilation cache take precedence.

    Programs for CPUs that would compute something else once loaded are compiled anew each time; if this JAX cannot be
    told to do that, nothing is kept. What cannot be written or read, as on a full disk, is told in one line.

    Args:
        folder: where they are kept; None takes the user's cache folder.
    """
    from jax.experimental.compilation_cache import compilation_cache

    if not keep_what_loads_right():
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") is None:
        path = Path(folder) if folder is not None else cache_folder("compiled")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"compiled programs are not kept: {error}", file=sys.stderr)
            jax.config.update("jax_enable_compilation_cache", False)
            return
        jax.config.update("jax_compilation_cache_dir", str(path))
    if os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS") is None:
        # The small programs around a step take tenths of a second each to compile: keep them too.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    compilation_cache.reset_cache()  # JAX decides at its first compilation whether it has a cache
    if warnings.showwarning not in _telling:
        warnings.showwarning = _told_once(warnings.showwarning)  # ty: ignore[invalid-assignment]
        _telling.append(warnings.showwarning)


_WORDS: Mapping[str, str] = {"writing": "compiled programs are not kept", "reading": "kept programs are not read"}
# What `use_persistent_cache` has put in the place of `warnings.showwarning`.
_telling: list[Callable] = []


def _told_once(show: Callable) -> Callable:
    """Shows warnings as `show` does, but JAX's about its cache, one for each program, as one line."""
    told: set[str] = set()

    def tell(message: Warning | str, *where: Any, **more: Any) -> None:
        found = re.match(r"Error (reading|writing) persistent compilation cache entry for '.*?': (.*)", str(message))
        if found is None:
            show(message, *where, **more)
        elif found[1] not in told:
            told.add(found[1])
            print(f"{_WORDS[found[1]]}: {found[2]}", file=sys.stderr)

    return tell


def options_for(platform: str, options: Mapping[str, str], devices: int = 1) -> dict[str, str]:
    """The compiler options that concern a platform: those of a run, and `DEFAULTS` for what it does not set.

    >>> options_for("tpu", {"xla_jf_crs_combiner_threshold_in_bytes": "1", "xla_gpu_autotune_level": "4"})
    {'xla_jf_crs_combiner_threshold_in_bytes': '1'}
    >>> options_for("cpu", {}, devices=2), options_for("cpu", {}, devices=8)
    ({'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'}, {})

    Args:
        platform: "cpu", "gpu" or "tpu".
        options: options of any platform; names that belong to no single platform concern all.
        devices: how many the program runs on; more than `MOST_DEVICES` CPU devices have no defaults.

    Raises:
        UserError: the options name a file of costs that is not there, or ask for a CPU's program without optimization.
    """
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    others = tuple(prefix for name, prefixes in _PREFIXES.items() if name != platform for prefix in prefixes)
    mine = {name: str(value) for name, value in options.items() if not name.startswith(others)}
    if platform == "cpu" and mine.get(_LEVEL) == "0":
        raise UserError(
            "Programs for CPUs must be optimized a little: without, XLA's read behind their arrays and may end a run.",
            seen=f"{_LEVEL} 0",
            where=f"compiler_options.{_LEVEL}",
            fix="write 1, or leave it out",
        )
    if COSTS in mine and not Path(mine[COSTS]).exists():
        raise UserError(
            "The file of costs to schedule a step by must exist on every machine of the run.",
            seen=f"no {mine[COSTS]}",
            where=f"compiler_options.{COSTS}",
            fix="write it with `trellis plan --compile --costs FOLDER`, copy it here, or leave the option out",
        )
    defaults = {} if platform == "cpu" and devices > MOST_DEVICES else DEFAULTS.get(platform, {})
    return {**defaults, **mine}


def asks_for_one_order(options: Mapping[str, str]) -> bool:
    """Whether options of XLA for GPUs make a program's sums repeat to the bit.

    >>> asks_for_one_order({"xla_gpu_exclude_nondeterministic_ops": "True"}), asks_for_one_order({})
    (True, False)
    """
    return any(options.get(name, "").lower() == "true" for name in ONE_ORDER)


@contextlib.contextmanager
def _explained(options: Mapping[str, str] | None) -> Generator[None]:
    """Within it, a compiler's complaint about an unknown option, or a value that it does not take, is explained."""
    try:
        yield
    except Exception as error:
        seen = " ".join(str(error).split())
        if not options or "option" not in seen.lower() or not any(name in seen for name in options):
            raise
        raise UserError(
            "Compiler options must be known to the compiler and have valid values.",
            seen=f"{seen:.300}",
            where="compiler_options",
            fix="leave it out, or write it as this platform's XLA does",
        ) from None


class CompiledStep:
    """A step compiled ahead of its first call: once for each shape of a batch, so once for a run of one batch size.

    A call never compiles anew for any other reason: a state or batch with another sharding or dtype is an error.

    Args:
        step: a function under `jax.jit`, `step(state, batch) -> (state, metrics)`.
        options: the compiler's options.
    """

    def __init__(self, step: Any, options: Mapping[str, str] | None = None):
        self._step = step
        self._options = dict(options or {}) or None
        self._programs: dict[tuple, Any] = {}

    def __call__(self, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        self.compile(state, batch)
        return self._programs[_shapes(batch)](state, batch)

    def compile(self, state: Any, batch: Any) -> None:
        """Compiles for batches of this shape, if that was not done yet."""
        if not self.is_compiled(batch):
            with _explained(self._options):
                self._programs[_shapes(batch)] = self._compiled(state, batch)

    def _compiled(self, state: Any, batch: Any) -> Any:
        with sums_in_one_order(asks_for_one_order(self._options or {})):
            lowered = self._step.lower(state, batch)
        program = lowered.compile(self._options)
        if self._options and _ORDER in self._options and not in_order(program.as_text(), loaded=False):
            options = {name: value for name, value in self._options.items() if name != _ORDER}
            program = lowered.compile(options or None)
        return program

    def is_compiled(self, batch: Any) -> bool:
        """Whether there is a program for batches of this shape."""
        return _shapes(batch) in self._programs

    @property
    def programs(self) -> list[Any]:
        """The compiled programs (`jax.stages.Compiled`), in order of their first use."""
        return list(self._programs.values())


def _shapes(batch: Any) -> tuple:
    return tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(batch))
