"""How XLA compiles for tests; read before JAX is imported."""

import importlib.metadata
import platform
from pathlib import Path


def reads_behind_arrays() -> bool:
    """Whether XLA's programs without optimization read up to 12 bytes behind an array, and die of signal 11 where that
    is no more the process's memory.

    LLVM's quick choice of instructions lets a select (`vblendvps`) load the one float that it takes together with the
    three after it. With AVX-512 it takes another instruction. `train/test_compilation.py` shows it.
    """
    information = Path("/proc/cpuinfo")
    flags = information.read_text() if information.exists() else ""
    return platform.machine() in ("x86_64", "AMD64") and "avx512f" not in flags


def quick_flags() -> str:
    """What `XLA_FLAGS` are for programs that are made quickly."""
    flags = []
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        # Loops are written the older way, and products are Eigen's: of the newer library's, each program makes what is
        # to be computed anew, which takes longer than products of tests do. Later versions have neither choice.
        flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
        flags += ["--xla_cpu_experimental_ynn_fusion_type="]
    if reads_behind_arrays():
        # LLVM chooses instructions with some more care, which takes a seventh more time.
        flags += ["--xla_backend_extra_options=-fast-isel=0"]
    return " ".join(flags)
