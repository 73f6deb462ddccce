"""Where a step's time goes, by the profiler: kinds of work, the longest operations, and when the device has none."""

import collections
import gzip
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from trellis.inspect import parse_program

STEPS = 2
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def profile_of(findings: Any, step: Callable[[], Any], text: str) -> None:
    """Records two steps and tells where their time went.

    Args:
        findings: where it goes; the recording is kept beside it.
        step: dispatches a step and returns something of it.
        text: of the compiled step.
    """
    folder = findings.folder / "profiles" / findings.path.stem
    jax.block_until_ready(step())
    jax.profiler.start_trace(folder, create_perfetto_trace=True)
    jax.block_until_ready([step() for _ in range(STEPS)])
    jax.profiler.stop_trace()
    with gzip.open(folder / "program.txt.gz", "wt") as file:  # what the recording's operations are
        file.write(text)
    traces = sorted(folder.rglob("perfetto_trace.json.gz"))
    events = operations_of(traces[-1]) if traces else []
    if not events:
        findings.tell(profile=None, said=f"{findings.values['said']}; the profiler recorded no operations")
        return
    found = shares(events, parse_program(text))
    findings.tell(profile=found | {"recording": str(traces[-1].relative_to(findings.folder))})
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in found["kinds"].items())
    findings.tell(said=f"{findings.values['said']}; of a step: {kinds}, nothing {found['idle']:.1%}")


def operations_of(path: Path) -> list[tuple[str, float, float]]:
    """Operation, start and seconds of what ran on the first device, from the profiler's file for Perfetto.

    A GPU's kernels lie on its streams, each with the operation of the program it belongs to; a TPU has a track of
    operations; a CPU's threads run operations among other things.
    """
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("ph") == "M" and "name" in e["args"]
             and e["name"] == "thread_name"}  # fmt: skip
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == "process_name"}
    devices = sorted(pid for pid, name in processes.items() if re.match(r"/device:(GPU|TPU)", name))
    runs = [e for e in events if e.get("ph") == "X" and (not devices or e["pid"] == devices[0])]
    for wanted in (r"Stream ", r"XLA Ops", r""):
        tracks = {key for key, name in names.items() if re.match(wanted, name)}
        mine = [e for e in runs if (e["pid"], e.get("tid")) in tracks]
        if mine and devices:
            break
    if not devices:
        mine = [e for e in runs if "hlo_op" in e.get("args", {})]
    return [(_operation(e), e["ts"] / 1e6, e.get("dur", 0) / 1e6) for e in mine]


def _operation(event: dict[str, Any]) -> str:
    """What an event says that it runs; a kernel of a GPU's command buffer says what it is called alone."""
    operation = event.get("args", {}).get("hlo_op", event["name"])
    return event["name"] if operation.startswith("command_buffer") else operation


def shares(events: Iterable[tuple[str, float, float]], program: Any) -> dict[str, Any]:
    """What the recorded time went into.

    Args:
        events: operation, start and seconds.
        program: the step, which says what its operations are.

    Returns:
        `kinds`: shares of the time from the first operation to the end of the last; `idle`: the share without any;
        `longest`: operations with their share and line.
    """
    events = sorted(events, key=lambda event: event[1])
    whole = max(at + seconds for _, at, seconds in events) - events[0][1]
    kinds, operations, busy, end = collections.Counter(), collections.Counter(), 0.0, events[0][1]
    called = {re.sub(r"\W", "_", name): instruction for name, instruction in program.by_name.items()}
    find = lambda name: program.by_name.get(name) or called.get(name)
    for name, at, seconds in events:
        instruction = find(name)
        kinds[kind_of(instruction, program) if instruction else kind_of_kernel(name)] += seconds / whole
        operations[name] += seconds / whole
        busy += max(0.0, at + seconds - max(at, end))
        end = max(end, at + seconds)
    longest = []
    for name, share in operations.most_common(15):
        instruction = find(name)
        source = program.source(instruction, _in_the_language) if instruction else ""
        longest.append({"operation": name, "share": share, "source": source})
    return {
        "kinds": dict(kinds.most_common()),
        "idle": max(0.0, 1 - busy / whole),
        "seconds": whole,
        "longest": longest,
    }


def kind_of(instruction: Any, program: Any) -> str:
    """Products, attention, collectives, copies, loops or elementwise work, by what the program says of an operation."""
    inside = [instruction]
    for name in (name for names in instruction.called().values() for name in names):
        inside += program.computations.get(name, ()) if instruction.op in ("fusion", "call") else ()
    targets = " ".join(i.quoted("custom_call_target") or "" for i in inside).lower()
    ops = {i.op for i in inside}
    if any(op.startswith(_COLLECTIVES) for op in ops):
        return "collectives"
    called = kind_of_kernel(targets)
    if called == "attention":
        return called
    if ops & {"dot", "convolution"} or called == "products":
        return "products"
    if instruction.op in ("while", "conditional"):
        return "loops"
    return "copies" if instruction.op in ("copy", "transpose", "copy-start", "copy-done") else "elementwise"


# Kernels of libraries, by what they are called in a program or in a recording, the first that fits.
LIBRARIES = (
    ("collectives", "nccl"),
    ("attention", "sdpa|fmha|flash|attention|splash|cudnn::fusion"),
    ("products", "gemm|matmul|nvjet|cutlass|xmma|cublas|grouped_(product|gradient)"),
    ("copies", "memcpy|memset"),
)


def kind_of_kernel(name: str) -> str:
    """The same of a kernel that no operation of the program is called by.

    >>> kind_of_kernel("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"), kind_of_kernel("memcpy32_post")
    ('products', 'copies')
    """
    return next((kind for kind, pattern in LIBRARIES if re.search(pattern, name.lower())), "outside of the program")


def _in_the_language(file: str) -> bool:
    """Whether a line of this file is passed over for the line of a model or a step that called it."""
    rooms = ("named", "mesh", "notation", "program")
    return "/trellis/" not in file or any(f"/trellis/{room}/" in file for room in rooms)
