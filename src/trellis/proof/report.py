"""A proof as text and as JSON."""

import math
from typing import Any

from trellis.figures.text import aligned
from trellis.proof.comparing import Output
from trellis.proof.proof import Proof

_MODEL, _OPTIMIZER = "model.", "optimizer."


def text(proof: Proof, most: int = 40) -> str:
    """The whole proof, the verdict last.

    Args:
        proof: it.
        most: parameters that are shown, those that deviate most.
    """
    table = _table(proof, most) if proof.outputs else ""
    return "\n\n".join(part for part in (_head(proof), table, _verdict(proof)) if part)


def _head(proof: Proof) -> str:
    compiled = proof.compiled
    mesh = " ".join(f"{axis}={size}" for axis, size in proof.mesh.items())
    versions = ", ".join(f"{name} {version}" for name, version in compiled.versions.items())
    kept = "kept from before" if compiled.cached else f"{compiled.seconds:.0f} s"
    lines = [
        f"{proof.name} on {proof.target}: {math.prod(proof.mesh.values())} devices, mesh {mesh}",
        *(f"  fitted      {line}" for line in proof.fitted),
        *(f"  left out    {line}" for line in proof.left_out),
        f"  compiled    by {versions} ({kept})",
    ]
    if compiled.options:
        lines.append("  options     " + " ".join(f"{name}={value}" for name, value in compiled.options.items()))
    if proof.kernels:
        lines.append(f"  references  stand for {', '.join(proof.kernels)}, whose inside the program does not show")
    lines.append(f"  structure   {proof.structure.line}")
    lines += [f"              {fault}" for fault in proof.structure.faults]
    if proof.rounded is not None:
        lines.append(
            "  held to     the step for one device as it is written, with its constants in bfloat16; that one deviates "
            f"from float32 by {proof.rounded:.0e}"
        )
    if proof.rounding is not None:
        lines.append(f"  floats      of 64 bits: with 32, rounding makes deviations of up to {proof.rounding:.0e}")
    if proof.unrounded:
        lines.append("  int8        held as the floats that it is rounded from: rounded, right programs would differ")
    if proof.written:
        lines.append("  constants   held as they are written: the compiler rounds them to bfloat16 once and for all")
    return "\n".join(lines)


def _table(proof: Proof, most: int) -> str:
    """A line for each parameter, with its moments, and then one for each other result."""
    parameters = [output for output in proof.outputs if output.name.startswith(_MODEL)]
    moments = {output.name: _moments(output, proof) for output in parameters}
    rows = []
    for output in sorted(parameters, key=lambda o: -max(o.error, *(m.error for m in moments[o.name]), 0.0))[:most]:
        name, own = output.name.removeprefix(_MODEL), moments[output.name]
        error = max((m.error for m in own), default=math.nan)
        numbers = _number(error), _number(output.error), _number(output.bound)
        rows.append((name, output.type, *numbers, _where(output, own), ", ".join(_way(proof, output))))
    shown = {output.name for output in parameters} | {m.name for own in moments.values() for m in own}
    others = [output for output in proof.outputs if output.name not in shown]
    rows += [(o.name, o.type, "", _number(o.error), _number(o.bound), _where(o, []), "") for o in others]
    hidden = len(parameters) - min(len(parameters), most)
    header = ("result", "type", "moments", "new value", "bound", "", "collectives" if any(r[-1] for r in rows) else "")
    table = aligned(header, rows, right=(2, 3, 4))
    return table + (f"\nand {hidden} parameters that deviate less" if hidden else "")


def _way(proof: Proof, parameter: Output) -> list[str]:
    """The collectives on a parameter's way, there and back."""
    return proof.structure.on_the_way_of(parameter.name)


def _moments(parameter: Output, proof: Proof) -> list[Output]:
    """What the optimizer keeps of a parameter: its gradient shows there."""
    end = "." + parameter.name.removeprefix(_MODEL)
    return [output for output in proof.outputs if output.name.startswith(_OPTIMIZER) and output.name.endswith(end)]


def _number(value: float) -> str:
    return "" if math.isnan(value) else "not finite" if math.isinf(value) else f"{value:.1e}"


def _where(output: Output, moments: list[Output]) -> str:
    """The devices on which it is wrong."""
    devices = sorted({device for each in (output, *moments) for device in each.devices})
    return f"WRONG on {'devices' if len(devices) > 1 else 'device'} {_ranges(devices)}" if devices else ""


def _ranges(numbers: list[int]) -> str:
    """Numbers in rising order, in short.

    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _verdict(proof: Proof) -> str:
    devices = math.prod(proof.mesh.values())
    seconds = sum(proof.seconds.values())
    if proof.proven:
        most = max((output.bound for output in proof.outputs), default=0.0)
        return (
            f"PROVEN: {len(proof.outputs)} results on {devices} devices deviate by at most {proof.error:.1e} from the "
            f"plain program on one device, where {most:.0e} may be rounding ({seconds:.0f} s)"
        )
    wrong = [output for output in proof.outputs if not output.right]
    lines = [f"NOT PROVEN: {len(wrong)} of {len(proof.outputs)} results are wrong ({seconds:.0f} s)"]
    if proof.unknown:
        lines.append(
            "  held to     the plain step in float32 alone: of the step as it is written, whose constants in bfloat16 "
            f"may explain this, the interpreter does not know {proof.unknown}"
        )
    if proof.between:
        lines.append(
            "  experts     in all numbers that were drawn, some token is tied between two experts, and right programs "
            "can differ there: --seed N draws others"
        )
    if proof.fault:
        lines = [f"NOT PROVEN: the program does not run to its end: {proof.fault}"]
    if (finding := proof.finding) is not None:
        lines.append(f"  reason      {finding.culprit}")
        if finding.place is not None:
            lines.append(f"  first       {finding.place}" + (f", in turn {finding.turn}" if finding.turn > 1 else ""))
            if finding.place.scope:
                lines.append(f"  in          {finding.place.scope}")
    return "\n".join(lines)


def as_json(proof: Proof) -> dict[str, Any]:
    """Everything, as plain values; what is not finite is null."""
    compiled, finding = proof.compiled, proof.finding
    finite = lambda value: value if math.isfinite(value) else None
    place = finding.place if finding else None
    return {
        "name": proof.name,
        "target": proof.target,
        "mesh": dict(proof.mesh),
        "proven": proof.proven,
        "error": finite(proof.error),
        "rounded": proof.rounded,
        "rounding": proof.rounding and finite(proof.rounding),
        "unrounded": proof.unrounded,
        "written": proof.written,
        "unknown": proof.unknown,
        "between": proof.between,
        "fault": proof.fault,
        "kernels": list(proof.kernels),
        "structure": proof.structure.as_dict(),
        "fitted": list(proof.fitted),
        "left_out": list(proof.left_out),
        "versions": dict(compiled.versions),
        "options": dict(compiled.options),
        "seconds": dict(proof.seconds),
        "outputs": [
            {
                "name": output.name,
                "type": output.type,
                "error": finite(output.error),
                "bound": output.bound,
                "right": output.right,
                "devices": list(output.devices),
                "collectives": _way(proof, output),
            }
            for output in proof.outputs
        ],
        "finding": finding
        and {
            "culprit": finding.culprit,
            "what": place and place.what,
            "type": place and place.type,
            "source": place and place.source,
            "scope": place and place.scope,
            "turn": finding.turn,
        },
    }
