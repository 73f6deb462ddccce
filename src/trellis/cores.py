"""How many of the machine's cores this process may use."""

import math
import os
import sys
from pathlib import Path

# With more programs than this for each core, a measurement shows how they share the machine.
_CROWD = 1.5
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """The number of cores that this process may use; fewer if its container is given the time of fewer."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        return max(1, min(allowed, cores_of_quota(_QUOTA.read_text()) or allowed))
    except OSError:
        return allowed


def is_crowded() -> bool:
    """Whether many more programs want to run on this machine than it has cores, as far as the system says."""
    if sys.platform == "win32":
        return False
    try:
        return os.getloadavg()[0] > _CROWD * (os.cpu_count() or 1)
    except OSError:
        return False


def cores_of_quota(quota: str) -> int | None:
    """A container's share of processor time in cores, rounded up; None if it has no limit.

    Args:
        quota: what Linux says of the control group: microseconds of a period, as `150000 100000`.

    >>> cores_of_quota("150000 100000"), cores_of_quota("max 100000")
    (2, None)
    """
    time, _, period = quota.partition(" ")
    return math.ceil(int(time) / int(period)) if time.isdigit() and period.strip().isdigit() else None
