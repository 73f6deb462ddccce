"""A case compiled for hardware that is not here, and executed: what the compiler of a TPU or of a GPU makes of it."""

import trellis as tr
from trellis.errors import TrellisError
from trellis.hardware.chips import chips

from .case import Case
from .running import TOLERANCE, Outcome, meant, prepared, steady

# The slices of TPUs that there are of so many devices, by the sides of a torus.
SLICES = {2: {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"}, 3: {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"}}


def hardware(chip: str, devices: int) -> str | None:
    """So many devices of a chip, such as "v5e:2x4", or None where there is no such slice."""
    found = chips()[chip.lower()]
    if found.kind == "gpu":
        return f"{devices}x{chip}"
    shape = SLICES[found.torus].get(devices)
    return f"{chip}:{shape}" if shape else None


def target_of(case: Case, chip: str) -> str | None:
    """The hardware that a case can be proven for; None where there is none of that many devices, and for what breaks a
    rule, is on no mesh, or runs under several layouts."""
    if case.broken or case.late or case.earlier is not None or case.setting.mode == "alone":
        return None
    return hardware(chip, case.setting.devices)


def check(case: Case, on: str) -> Outcome:
    """Holds what a compiler made of a case, which is right on CPUs, against what it means on whole arrays.

    It is "not proven" where a result is wrong on some device, where devices would wait for each other for ever, and
    where collectives are said to be surely wrong though all numbers are right; and "unknown" where nothing is proven.
    """
    with prepared(case) as space:
        args = [space[x.value.var] for x in case.inputs]
        try:
            proof = tr.prove(eval(case.wrapped("ours", "eager"), space), *args, on=on, bound=TOLERANCE, explain=False)
        except TrellisError as error:
            # A program that runs without `jit` is proven in it; of NaNs alone nothing is proven; and a compiler of GPUs
            # has no tiles for some odd sizes.
            known = ("A proof needs a result with numbers", "A program must compile before it can be executed")
            if str(error).startswith(known) or case.run == "eager" and not str(error).startswith("The interpreter"):
                return Outcome("kept out", str(error), str(error).split("\n")[0][:60])
            return Outcome("unknown", str(error), " ".join(str(error).split("\n")[1:])[:60])
        except Exception as error:
            return Outcome("foreign", f"{type(error).__name__}: {error}", f"prove: {type(error).__name__}")
    if proof.fault:
        return Outcome("not proven", str(proof), "waiting")
    if not proof.proven:
        # What does not depend on an argument the compiler may round to a narrow type; the proof does not.
        rounded = 0.1 if "tr.Narrow" in case.ours_text() else 0.02 if case.rounded else 0.0
        if proof.error < rounded or not steady(case, *meant(case)):
            return Outcome("unsteady", str(proof))
        return Outcome("not proven", str(proof), "value")
    if proof.structure.certain:
        return Outcome("not proven", str(proof), proof.structure.faults[0].split(":")[0])
    return Outcome("right")
