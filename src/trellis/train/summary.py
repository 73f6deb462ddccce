"""A summary of what a run is about to do: model, data, mesh, memory and communication, as plain values and in words."""

import math
import platform
from collections.abc import Mapping
from typing import Any

import jax

from trellis.cores import usable_cores
from trellis.figures.numbers import count, size
from trellis.hardware.platform import processor
from trellis.inspect import Ledger
from trellis.named import is_named
from trellis.notation.typeof import short_dtype
from trellis.program import Program, trace
from trellis.program.sizes import local_bytes
from trellis.train.assemble import Assembled
from trellis.train.flops import num_parameters
from trellis.train.pace import tokens_of


def machine() -> dict[str, Any]:
    """The machine that the run runs on."""
    from trellis import __version__

    devices = jax.devices()
    stats = devices[0].memory_stats() if devices[0] in jax.local_devices() else None
    return {
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
        "platform": devices[0].platform,
        "device_memory": stats.get("bytes_limit") if stats else None,
        "processes": jax.process_count(),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": processor(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "trellis": __version__,
    }


def arrays(assembled: Assembled) -> list[dict[str, Any]]:
    """The model's parameters: name, axes with sizes and mesh axes, dtype, and bytes in total and on a device."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(assembled.abstract.model, is_leaf=is_named):
        if not is_named(leaf):
            continue
        axes = assembled.layout.assign(leaf.names, "params")
        dims = [
            {"name": name, "size": length, "mesh": list(mesh_axes)}
            for (name, length), mesh_axes in zip(leaf.shape.items(), axes, strict=True)
        ]
        found.append(
            {
                "name": jax.tree_util.keystr(path, simple=True, separator="."),
                "dims": dims,
                "dtype": short_dtype(leaf.dtype),
                "bytes": math.prod(leaf.array.shape) * leaf.dtype.itemsize,
                "device_bytes": local_bytes(leaf.array),
            }
        )
    return found


def step_program(assembled: Assembled, step: int = 0) -> Program:
    """A traced step, from which its ledger and memory are read. JAX need not trace it again."""
    made = assembled.at(step)
    with made.layout:
        return trace(made.step, made.abstract, made.abstract_batch(step))


def sections(
    assembled: Assembled, memory: Mapping[str, int], ledger: Ledger, tokens: int | None, filled: float = 1.0
) -> dict[str, Any]:
    """Everything that the page of a run shows besides its metrics, as plain values.

    Args:
        assembled: the run.
        memory: bytes of its step on a device, by kind.
        ledger: the ledger of its step.
        tokens: tokens of the corpus, if known.
        filled: the share of the run's positions that hold tokens, not padding.
    """
    run, layout = assembled.run, assembled.layout
    return {
        "machine": machine(),
        "model": {"family": run.model.family, "parameters": num_parameters(assembled.abstract.model)},
        "tokens": {"run": round(tokens_of(run, 0, run.steps) * filled), "corpus": tokens},
        "mesh": dict(layout.mesh.shape),
        "microbatches": assembled.options.microbatches,
        "layout": {
            "preset": run.layout.preset,
            "params": {name: list(axes) for name, axes in layout.params},
            "compute": {name: list(axes) for name, axes in layout.compute},
        },
        "arrays": arrays(assembled),
        "memory": dict(memory),
        "ledger": ledger_sums(ledger),
    }


def ledger_sums(ledger: Ledger) -> dict[str, Any]:
    """A ledger in short: bytes that a device sends in a step. `auto` lists mesh axes along which a compiler
    chooses, and they are what it is told."""
    return {
        "per_axis": ledger.per_axis(),
        "per_kind": ledger.per_kind(),
        "total": ledger.total(),
        "count": ledger.count(),
        "auto": list(ledger.auto),
    }


def lengths(assembled: Assembled, memory: Mapping[int, Mapping[str, int]]) -> list[dict[str, Any]]:
    """For each phase of a run whose sequences become longer: its first step, its sequences, and a device's memory.

    If a phase's batch grows, `later` has the steps from which it has more sequences, and how many.

    Args:
        assembled: the run.
        memory: for each phase, by its first step: bytes of a step on a device, by kind.
    """
    found: list[dict[str, Any]] = []
    for step, made in assembled.phases().items():
        size, length = made.abstract_batch(step).shape
        more = [[entry.step, entry.size] for entry in made.run.at(step).batch_sizes() if entry.step > step]
        held = sum(memory[step].values())
        found.append({"step": step, "length": length, "batch_size": size, "later": more, "memory": held})
    return found if assembled.later else []


def describe(found: Mapping[str, Any]) -> str:
    """What a run is about to do, in a few lines.

    Args:
        found: what `sections` returned.
    """
    model, tokens, host, ledger = (found[name] for name in ("model", "tokens", "machine", "ledger"))
    per_axis = ", ".join(f"{axis} {size(total)}" for axis, total in ledger["per_axis"].items())
    moves = f"{size(ledger['total'])} from each device in a step: {per_axis}" if per_axis else "nothing between devices"
    if ledger["auto"]:
        told = f"{moves}, or " if per_axis else ""
        moves = f"{told}what the compiler chooses along {', '.join(ledger['auto'])} (auto mode)"
    memory = ", ".join(f"{kind} {size(held)}" for kind, held in found["memory"].items())
    read = f"{count(tokens['run'])} to read"
    if tokens["corpus"]:
        read += f", {tokens['run'] / tokens['corpus']:.2g} times the corpus of {count(tokens['corpus'])}"
    mesh = " ".join(f"{axis}={n}" for axis, n in found["mesh"].items())
    parts = f", a batch in {found['microbatches']} microbatches" if found["microbatches"] > 1 else ""
    lines = {
        "model": f"{model['family']}, {count(model['parameters'])} parameters",
        "tokens": read,
        "devices": f"{math.prod(found['mesh'].values())} x {host['device_kind']}, mesh {mesh}{parts}",
        "memory": f"{size(sum(found['memory'].values()))} on each device: {memory}",
        "moves": moves,
    }
    if found.get("lengths"):
        lines["lengths"] = ", then ".join(
            f"{p['batch_size']:,} x {p['length']:,} tokens from step {p['step'] + 1} on"
            + "".join(f", {rows:,} x {p['length']:,} from step {step + 1} on" for step, rows in p["later"])
            + f" ({size(p['memory'])})"
            for p in found["lengths"]
        )
    return "\n".join(f"{name:<8} {line}" for name, line in lines.items())
