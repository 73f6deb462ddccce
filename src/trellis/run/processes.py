"""What can be said of the processes of a run, whoever says it: options, a program, or a cluster's variables."""

import re

from trellis.errors import UserError


def check_processes(coordinator: str | None, processes: int | None, process: int | None, *, where: str = "{}") -> None:
    """Refuses an address, a number of processes and a process of which no run has processes. None is not said yet.

    Args:
        coordinator: the address and port of process 0.
        processes: how many there are.
        process: which one this is, from 0.
        where: what a field is called in messages.

    Raises:
        UserError: one of them is impossible, or does not go with another.
    """
    if coordinator is not None and not (
        re.fullmatch(r".+:[0-9]{1,5}", coordinator) and 0 < int(coordinator.rpartition(":")[2]) < 2**16
    ):
        raise UserError(
            "A coordinator must be an address and a port.",
            seen=f"coordinator={coordinator!r}",
            where=where.format("coordinator"),
            fix="write it as HOST:PORT, with a port from 1 to 65535",
        )
    if processes is not None and processes < (1 if coordinator is None and process in (None, 0) else 2):
        raise UserError(
            "The number of processes must be 2 or more.",
            seen=f"processes={processes}",
            where=where.format("processes"),
            fix="for one process use --distributed.processes 1 alone, or leave the options out",
        )
    if process is not None and (process < 0 or (processes is not None and process >= processes)):
        raise UserError(
            "A process must have a number from 0 to the number of processes minus 1.",
            seen=f"process={process}" + ("" if processes is None else f", processes={processes}"),
            where=where.format("process"),
            fix="use 0 or more" if processes is None else f"use 0 to {processes - 1}",
        )
