"""Asks the real compiler: compiles the run's own train step for hardware that is not here.

libtpu compiles for TPU slices and XLA's CUDA plugin for GPU nodes, both without the hardware. The compiled program
says how much memory it needs, which collectives it runs and how often, which of them run beside other work, and (TPU)
how many cycles each piece was scheduled for. What does not fit is a finding, not an error. Compiled programs are kept
in the user's cache folder, so that asking again takes a second.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from trellis._compat import full_text, kept_arguments
from trellis.errors import UserError
from trellis.files import cache_folder
from trellis.hardware.chips import Target, chips
from trellis.inspect.compiled import compiled_memory
from trellis.mesh.topology import TopologyError, target_devices
from trellis.plan.libtpu_layout import Allocation, MemoryLayout, dump_options, read_layout
from trellis.plan.prepared import Prepared, prepare
from trellis.run.config import Run
from trellis.train.compilation import options_for


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a step.

    Attributes:
        text: the compiled program, including large constants; empty if it did not fit.
        memory: bytes by kind as `compiled_memory` counts them, and if the compiler reports its layout, `laid_out`, the
            total; only `needed` if it did not fit.
        seconds: how long compiling took, when it was done.
        cached: whether it was compiled before.
        excess: bytes by which it does not fit, or 0.
        largest: the largest buffers at the highest point, if the compiler reports its layout.
        versions: the versions of JAX and of the compiler.
        options: compiler options.
        kept: the flat arguments of the function that the program still has.
        results: for each of its results, "sliced", the mesh axes that slice each dimension, and "pending", those along
            which it is a sum that devices hold parts of; None if they are not known.
    """

    text: str
    memory: Mapping[str, int]
    seconds: float
    cached: bool
    excess: float
    largest: tuple[Allocation, ...]
    versions: Mapping[str, str]
    options: Mapping[str, str]
    kept: tuple[int, ...] = ()
    results: tuple[Any, ...] = ()

    @property
    def peak(self) -> int:
        """The bytes that a device needs: arguments, results that are not donated, temporaries and code."""
        m = self.memory
        if "needed" in m:
            return m["needed"]
        if "laid_out" in m:
            return m["laid_out"] + m["code"]
        return m["arguments"] + m["outputs"] - m["aliased"] + m["temporaries"] + m["code"]

    @property
    def fits(self) -> bool:
        """Whether the compiler found room."""
        return self.excess <= 0


def compiler_devices(target: Target) -> list[Any]:
    """The devices of a target for its compiler.

    Raises:
        UserError: the compiler is not installed, or does not know the target.
    """
    try:
        return target_devices(target.compiler_name)
    except TopologyError as error:
        rule = "Compiling a step needs an installed compiler that knows the target."
        if "not installed" in str(error):
            fix = str(error).rpartition(": ")[2] + "; `trellis plan` without --compile needs no compiler"
            raise UserError(rule, seen=f"no compiler for {target.name}", where="--on", fix=fix) from None
        own = target.chip.name not in chips()
        seen = f"{target.chip.name}, a chip of a table of your own" if own else str(error)
        raise UserError(rule, seen=seen, where="--on", fix="use a target of the built-in table") from None


def compile_run(
    run: Run, target: Target, *, options: Mapping[str, str] | None = None, progress: bool = False
) -> tuple[Prepared, Compiled]:
    """Compiles a run's train step for a target.

    Args:
        run: the run.
        target: the hardware.
        options: compiler options, as in `{"xla_tpu_scoped_vmem_limit_kib": "98304"}`; the run's own if None.
        progress: whether to show on stderr how long it has been compiling.

    Raises:
        UserError: the compiler is not installed or refuses an option, or a size does not divide.
    """
    prepared = prepare(run, target, compiler_devices(target))
    if options is None:
        options = options_for(target.chip.kind, run.compiler_options, target.num_devices)
    return prepared, compile_program(prepared, target, options=options, progress=progress)


def compile_program(
    prepared: Prepared, target: Target, *, options: Mapping[str, str] | None = None, progress: bool = False
) -> Compiled:
    """The same as `compile_run`, for a step that was prepared on its compiler's devices."""
    lowered = prepared.lowered(platform_of_target(target))
    return compile_lowered(lowered, target, name=prepared.run.name, options=options, progress=progress)


def platform_of_target(target: Target) -> str:
    """The platform that programs are lowered for, as JAX calls it."""
    return {"tpu": "tpu", "gpu": "cuda"}[target.chip.kind]


def compile_lowered(
    lowered: Any,
    target: Target,
    *,
    name: str,
    options: Mapping[str, str] | None = None,
    progress: bool = False,
) -> Compiled:
    """The same for what `jax.jit(f).trace(...).lower(...)` returns; `name` is shown while it compiles."""
    platform = platform_of_target(target)
    options = {option: str(value) for option, value in (options or {}).items()}
    versions = compiler_versions(target)
    key = _key(lowered.as_text(), target, options, versions)
    kept = _read(key)
    if kept is not None:
        return kept
    started = time.monotonic()
    telling = _telling(f"compiling {name} for {target.name}") if progress else contextlib.nullcontext()
    with telling, tempfile.TemporaryDirectory() as folder:
        more = dump_options(folder) if platform == "tpu" else {}
        try:
            done = lowered.compile(compiler_options={**options, **more} or None)
        except jax.errors.JaxRuntimeError as error:
            seconds = time.monotonic() - started
            result = _refused(str(error), target, seconds, versions, options, read_layout(folder))
        else:
            memory = dataclasses.asdict(compiled_memory(done))
            layout = read_layout(folder) if more else None
            if layout is not None:
                memory["laid_out"] = layout.num_bytes
            seconds = time.monotonic() - started
            result = Compiled(
                text=full_text(done),
                memory=memory,
                seconds=seconds,
                cached=False,
                excess=0.0,
                largest=layout.largest if layout else (),
                versions=versions,
                options=options,
                kept=kept_arguments(done),
                results=tuple(_place(sharding) for sharding in jax.tree.leaves(done.output_shardings)),
            )
            if platform != "tpu":  # XLA for GPUs does not refuse
                result = dataclasses.replace(result, excess=max(result.peak - target.chip.hbm_bytes, 0.0))
    _write(key, result)
    return result


def _place(sharding: Any) -> dict[str, list] | None:
    """Where a result lies, by mesh axes, or None if its type does not say."""
    if not isinstance(sharding, NamedSharding):
        return None
    sliced = [[] if a is None else [a] if isinstance(a, str) else list(a) for a in sharding.spec.partitions]
    return {"sliced": sliced, "pending": sorted(sharding.spec.unreduced)}


def compiler_versions(target: Target) -> dict[str, str]:
    """The versions of JAX and of the target's compiler."""
    from importlib import metadata

    found = {"jax": jax.__version__}
    names = ("libtpu",) if target.chip.kind == "tpu" else ("jax-cuda12-pjrt", "jax-cuda13-pjrt")
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


_AMOUNT = r"([\d.]+)\s*([KMGT]?)i?B?"
_SCALE = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _amount(number: str, unit: str) -> float:
    return float(number) * _SCALE[unit]


def _refused(
    message: str,
    target: Target,
    seconds: float,
    versions: Mapping[str, str],
    options: Mapping[str, str],
    layout: MemoryLayout | None = None,
) -> Compiled:
    """The result for a program that does not fit, from the compiler's message.

    Raises:
        UserError: it refused for another reason, which the user can fix.
        RuntimeError: it refused for another reason.
    """
    exhausted = "RESOURCE_EXHAUSTED" in message
    of_option = not exhausted and "option" in message.lower() and any(name in message for name in options)
    if of_option or "No such compile option" in message or "unknown" in message.lower() and "option" in message.lower():
        seen = message.splitlines()[0][:200]
        fix = (
            "leave the option out, write its value as this platform's XLA does (True or False on GPUs), or "
            "install a version of the compiler that has it"
        )
        raise UserError(
            "Compiler options must be known to the compiler and have valid values.",
            seen=seen,
            where="compiler_options",
            fix=fix,
        )
    if not exhausted or "vmem" in message.lower() and "hbm" not in message.lower():
        raise RuntimeError(f"the compiler for {target.name} refused the step: {message[:2000]}")
    used = re.search(rf"[Uu]sed {_AMOUNT} of {_AMOUNT}", message) or re.search(
        rf"\({_AMOUNT}\) exceeds available HBM \({_AMOUNT}\)", message
    )
    peak, room = (_amount(*used.groups()[:2]), _amount(*used.groups()[2:])) if used else (0.0, target.chip.hbm_bytes)
    peak = max(peak, layout.num_bytes if layout else 0)
    return Compiled(
        text="",
        memory={"needed": int(peak)},
        seconds=seconds,
        cached=False,
        excess=max(peak - room, 1.0),
        largest=tuple(allocations(message)) or (layout.largest if layout else ()),
        versions=dict(versions),
        options=dict(options),
    )


def allocations(message: str) -> list[Allocation]:
    """The largest allocations that libtpu lists when a program does not fit, largest first."""
    found = []
    for block in re.split(r"\n\s*\d+\.\s+Size:\s*", message)[1:]:
        size = re.match(_AMOUNT, block)
        if not size:
            continue
        shape = re.search(r"Shape:\s*([^\s{]+)", block)
        made = re.search(r'op_name="([^"]*)"', block) or re.search(r"XLA label:\s*(%?[\w.\-]+)", block)
        line = re.search(r'source_file="([^"]*)"\s+source_line=(\d+)', block)
        source = f"{line[1].rpartition('/')[2]}:{line[2]}" if line else ""
        source = " ".join(part for part in (source, made[1] if made else "") if part)
        found.append(Allocation(_amount(size[1], size[2]), shape[1] if shape else "", source[-160:]))
    return sorted(found, key=lambda allocation: -allocation.num_bytes)


@contextlib.contextmanager
def _telling(what: str) -> Generator[None]:
    """Reports on stderr, every few seconds, that something is still under way."""
    done = threading.Event()
    started = time.monotonic()
    terminal = sys.stderr.isatty()

    def tell() -> None:
        while not done.wait(1.0 if terminal else 15.0):
            end = "" if terminal else "\n"
            print(
                f"\r{what}: {time.monotonic() - started:.0f} s"[0 if terminal else 1 :],
                end=end,
                file=sys.stderr,
                flush=True,
            )

    print(f"{what} (minutes for large models; kept for the next time)", file=sys.stderr, flush=True)
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        print(
            ("\r" if terminal else "") + f"{what}: {time.monotonic() - started:.0f} s, done",
            file=sys.stderr,
            flush=True,
        )


_FORMAT = 5  # of the files that hold compiled programs
# How much effort the compiler spends on speed and memory: the names in JAX 0.10, and those in JAX 0.12.
_EFFORT = (
    "jax_exec_time_optimization_effort", "jax_memory_fitting_effort", "jax_optimization_level",
    "jax_memory_fitting_level",
)  # fmt: skip


def _key(text: str, target: Target, options: Mapping[str, str], versions: Mapping[str, str]) -> str:
    around = [str(getattr(jax.config, name, None)) for name in _EFFORT]
    around += [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    said = json.dumps([_FORMAT, target.compiler_name, sorted(options.items()), sorted(versions.items()), around])
    return hashlib.sha256((said + text).encode()).hexdigest()[:32]


def _folder() -> Path:
    return cache_folder("plan")


def _read(key: str) -> Compiled | None:
    path = _folder() / f"{key}.json.z"
    try:
        found = json.loads(zlib.decompress(path.read_bytes()))
        found["largest"] = tuple(Allocation(**entry) for entry in found["largest"])
        return Compiled(**{**found, "cached": True})
    except (OSError, zlib.error, ValueError, TypeError):
        return None


def _write(key: str, compiled: Compiled) -> None:
    """Writes a file beside it and renames that, so that a second process never reads half a file."""
    folder = _folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{key}.{threading.get_ident()}.part"
        path.write_bytes(zlib.compress(json.dumps(dataclasses.asdict(compiled)).encode()))
        path.rename(folder / f"{key}.json.z")
