"""The table at the end: what was measured, beside what others published."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from tables import aligned
from texts import gibibytes, milliseconds, percent


@dataclasses.dataclass(frozen=True)
class Published:
    """A figure of others', for one device of several."""

    model: str
    who: str
    on: str
    tokens: float | None
    mfu: float | None


# `model` begins as the names of the rows do that it stands beside. Utilisations count as their authors do.
PUBLISHED = (
    Published("84m", "seqax", "8 A100", None, 0.14),
    Published("270m", "seqax", "8 A100", None, 0.24),
    Published("540m", "seqax", "8 A100", None, 0.35),
    Published("1b", "seqax", "8 A100", None, 0.416),
    Published("2b", "seqax", "8 A100", None, 0.507),
    Published("8b", "KempnerForge, Llama 8.03B, 4k", "1 H200", 10_471, 0.578),
    Published("8b", "MaxText, Llama 2 7B, 4k", "8 H100", 11_361, 0.49),
    Published("8b", "torchtitan, Llama 3.1 8B, 8k", "8 H100", 6_667, None),
)
# Names of rows as they are in `rows.py`, by the size that they train.
SIZES = ("1b", "8b", "2b", "540m", "270m", "84m", "gpt-oss", "qwen3", "mixtral")


def table(lines: Iterable[dict[str, Any]]) -> str:
    """All rows that were saved, as text.

    Args:
        lines: of `rows.jsonl`.
    """
    lines = [line for line in lines if line["values"] or line["outcome"] != "done"]
    parts = ["checks and rates\n\n" + "\n".join(_line(x) for x in lines if not _trains(x))]
    rows = []
    for size in SIZES:
        mine = [
            _speed(line)
            for line in lines
            if _trains(line) and size in line["row"].replace(",", " ").split("_")[-1].split()
        ]
        rows += mine
        if mine:
            others = (p for p in PUBLISHED if p.model == size)
            rows += [(f"{p.who}, published", p.on, _count(p.tokens), percent(p.mfu), "", "", "") for p in others]
    if rows:
        header = ("what", "on", "tokens/s/device", "MFU (non-causal)", "step", "memory", "first step")
        parts.append(aligned(header, rows, right=(2, 3, 4, 5, 6)))
    for line in lines:
        if profile := line["values"].get("profile"):
            parts.append(f"{line['row']}, a step's time: {_kinds(profile)}\n" + "\n".join(_longest(profile)))
    failed = [line for line in lines if line["outcome"] != "done"]
    if failed:
        parts.append(
            "what went wrong, or lacked something\n\n" + "\n".join(f"{line['row']}: {line['why']}" for line in failed)
        )
    return "\n\n".join(parts) + "\n"


def _trains(line: dict[str, Any]) -> bool:
    return "tokens_per_second" in line["values"]


def _line(line: dict[str, Any]) -> str:
    return f"{line['row']}: {line['values'].get('said') or line['why']}"


def _speed(line: dict[str, Any]) -> tuple[str, ...]:
    v = line["values"]
    memory = v.get("measured_peak") or v.get("compiled_peak")
    return (
        line["row"] + (f": {v['settings']}" if "settings" in v else ""),
        line["device"],
        _count(v["tokens_per_second"]),
        f"{percent(v.get('mfu'))} ({percent(v.get('mfu_noncausal'))})" if v.get("mfu") else "",
        milliseconds(v["step_seconds"], v.get("plan_seconds")),
        gibibytes(memory, v.get("plan_peak")) if memory else "",
        f"{v['first_step_seconds']:.0f} s",
    )


def _kinds(profile: dict[str, Any]) -> str:
    return (
        ", ".join(f"{kind} {share:.1%}" for kind, share in profile["kinds"].items()) + f", idle {profile['idle']:.1%}"
    )


def _longest(profile: dict[str, Any]) -> list[str]:
    return [f"{row['share']:7.1%}  {row['operation']}  {row['source']}" for row in profile["longest"]]


def _count(value: float | None) -> str:
    return f"{value:,.0f}" if value else ""
