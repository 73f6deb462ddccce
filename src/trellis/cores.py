"""How many of the machine's cores this process may use."""

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """The cores that this process may run on, or fewer where its container is given the time of fewer."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        return max(1, min(allowed, cores_of_quota(_QUOTA.read_text()) or allowed))
    except OSError:
        return allowed


def cores_of_quota(quota: str) -> int | None:
    """The cores of a container's share of processor time, rounded up; None where it has no limit.

    Args:
        quota: what Linux says of the control group: microseconds of a period, as `150000 100000`.

    >>> cores_of_quota("150000 100000"), cores_of_quota("max 100000")
    (2, None)
    """
    time, _, period = quota.partition(" ")
    return math.ceil(int(time) / int(period)) if time.isdigit() and period.strip().isdigit() else None
