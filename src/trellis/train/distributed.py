"""Several processes as one run: how they find each other."""

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Generator, Mapping
from typing import Any

import jax

from trellis.errors import UserError
from trellis.figures.numbers import duration
from trellis.hardware.platform import has_tpu
from trellis.interrupts import ended_by_interrupts, instead_of_abort
from trellis.run.processes import check_processes
from trellis.train.stopping import leave_at_once

# Seconds. A process that waits for others longer than this says so.
_TOLD_AFTER = 5.0
# So many seconds later JAX's runtime would abort a process for which the others do not come.
_MORE = 60


def detect(
    env: Mapping[str, str],
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    tpu: bool | None = None,
) -> dict[str, Any] | None:
    """The arguments for `jax.distributed.initialize`, or None if the run is one process.

    They are looked for in this order: three options, or a number of processes that is 1, which is one whatever a
    cluster says; a SLURM step or Open MPI, of more than one process; a Kubernetes indexed job; a TPU host, where JAX
    asks the platform. With SLURM and GPUs each task gets its share of the node's GPUs (JAX alone gives a task one GPU,
    even if one task is to drive all eight).

    Args:
        env: the environment's variables.
        coordinator: address and port of process 0, such as `10.0.0.1:1234`.
        processes: how many there are.
        process: which one this is, from 0.
        tpu: whether this host has TPUs; None looks.

    Raises:
        UserError: the options are incomplete or wrong, or needed to complete what was found of a cluster.
    """
    options = {"coordinator": coordinator, "processes": processes, "process": process}
    if processes == 1 and coordinator is None and process in (None, 0):
        return None
    if processes is None and process is None and "OMPI_COMM_WORLD_SIZE" in env:
        processes, process = _count(env, "OMPI_COMM_WORLD_SIZE"), _count(env, "OMPI_COMM_WORLD_RANK")
        if processes == 1:
            return None
        if coordinator is None and "OMPI_MCA_orte_hnp_uri" in env:
            return {"cluster_detection_method": "ompi"}
        if coordinator is None:
            raise UserError(
                "The processes of a run need an address at which they find each other.",
                seen=f"Open MPI with {processes} processes, which names no address",
                where="the environment",
                fix="add --distributed.coordinator HOST:PORT, with the host of rank 0",
            )
    if coordinator is not None or options["processes"] is not None or options["process"] is not None:
        return _from_options(coordinator, processes, process)
    in_step = {"SLURM_NTASKS", "SLURM_STEP_NODELIST", "SLURM_PROCID"} <= env.keys()
    if in_step and _count(env, "SLURM_NTASKS") > 1:
        found: dict[str, Any] = {"cluster_detection_method": "slurm"}
        devices = _slurm_devices(env)
        return found | ({"local_device_ids": devices} if devices else {})
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return {"cluster_detection_method": "k8s"}
    if has_tpu() if tpu is None else tpu:
        return {}
    return None


def initialize(
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    heartbeat_seconds: int = 100,
    timeout_seconds: int = 300,
) -> bool:
    """Joins this process to the others of its run, if there are any. Call it before anything touches a device.

    Args:
        coordinator: see `detect`; likewise `processes` and `process`.
        heartbeat_seconds: a process that is silent for this long is taken for dead, and the others stop.
        timeout_seconds: how long to wait for all processes to join.

    Returns:
        Whether JAX's runtime of several processes was started.

    Raises:
        UserError: the options are wrong, or the others did not join.
    """
    found = detect(os.environ, coordinator=coordinator, processes=processes, process=process)
    if found is None:
        return False
    if found.get("process_id") == 0:
        _check_port(found["coordinator_address"])
    times = {"heartbeat_timeout_seconds": heartbeat_seconds, "initialization_timeout": timeout_seconds + _MORE}
    try:
        with _awaited(found, timeout_seconds):
            jax.distributed.initialize(**found, **times)
    except (ValueError, RuntimeError) as error:
        if found == {}:  # a TPU host that belongs to no pod
            return False
        raise _not_joined(found, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    return True  # the number of processes is known once JAX looks at its devices, which must not happen here


@contextlib.contextmanager
def _awaited(found: dict[str, Any], seconds: int) -> Generator[None]:
    """Within it this process joins the others: it says that it waits, and ends if they do not come or Ctrl-C does.

    JAX's runtime would wait without a word, and then abort the process.
    """
    at = f" at {found['coordinator_address']}" if "coordinator_address" in found else ""
    text = f"waits    for the other processes of the run{at}, {duration(seconds)} at most"
    told = threading.Timer(_TOLD_AFTER, print, (text,), {"file": sys.stderr, "flush": True})
    late = threading.Timer(seconds, lambda: leave_at_once(_not_joined(found, f"not all within {duration(seconds)}")))
    aborted = lambda: leave_at_once(_not_joined(found, "JAX's runtime ended this process, for the reason above"))
    with contextlib.ExitStack() as until, instead_of_abort(aborted), ended_by_interrupts():
        for timer in (told, late):
            timer.daemon = True
            timer.start()
            until.callback(timer.cancel)
        yield


def _not_joined(found: dict[str, Any], seen: str) -> UserError:
    fix = (
        "check that all processes run, each with its own number and the same options otherwise, and that the port of "
        "process 0 is open"
    )
    if found.get("cluster_detection_method") == "k8s":  # only its API knows how many pods a job has
        fix = (
            "for one pod use --distributed.processes 1; several need a headless service and `pip install kubernetes`, "
            f"or the three options --distributed.*; {fix}"
        )
    return UserError(
        "All processes of a run must be able to reach process 0.",
        seen=seen,
        where=f"jax.distributed.initialize({', '.join(f'{k}={v!r}' for k, v in found.items())})",
        fix=fix,
    )


def _check_port(address: str) -> None:
    """Refuses a port that is in use for the first process to wait at; JAX 0.10.2 ends in a segmentation fault.

    Raises:
        UserError: the port is in use.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was used a moment ago is free
        if family == socket.AF_INET6:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            tried.bind(("", int(address.rpartition(":")[2])))
        except (OSError, OverflowError) as error:
            raise UserError(
                "Process 0 needs a free port at which to wait for the others.",
                seen=str(error),
                where=f"--distributed.coordinator {address}",
                fix="use another port for all of them",
            ) from None


def is_first() -> bool:
    """Whether this is the process that prints and writes the run's files."""
    return jax.process_index() == 0


def _from_options(coordinator: str | None, processes: int | None, process: int | None) -> dict[str, Any]:
    given = {
        "--distributed.coordinator": coordinator,
        "--distributed.processes": processes,
        "--distributed.process": process,
    }
    where = "the options --distributed.*"
    if coordinator is None or processes is None or process is None:
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise UserError(
            "The coordinator, the number of processes and the process must be set together.",
            seen=" ".join(f"{name} {value}" for name, value in given.items() if value is not None),
            where=where,
            fix=f"add {missing}",
        )
    check_processes(coordinator, processes, process, where="--distributed.{}")
    # Otherwise JAX would take the devices of this process from the cluster around it.
    return {
        "coordinator_address": coordinator,
        "num_processes": processes,
        "process_id": process,
        "cluster_detection_method": "deactivate",
    }


def _count(env: Mapping[str, str], name: str) -> int:
    """The number in a variable of a cluster's."""
    if not re.fullmatch("[0-9]+", text := env.get(name, "")):
        raise UserError(
            "What a cluster says of its processes must be whole numbers.",
            seen=f"{name}={text!r}",
            where="the environment",
            fix=f"start the processes as the cluster does, or unset {name}",
        )
    return int(text)


def _slurm_devices(env: Mapping[str, str]) -> list[int] | None:
    """This task's share of the node's GPUs; None if SLURM does not say, or has bound them to the task itself.

    >>> _slurm_devices({"SLURM_GPUS_ON_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_LOCALID": "1"})
    [4, 5, 6, 7]
    """
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    tasks = {int(n) for n in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", per_node)}
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    if len(tasks) != 1 or not gpus.isdigit() or "SLURM_LOCALID" not in env:
        return None
    share, rest = divmod(int(gpus), tasks.pop())
    local = _count(env, "SLURM_LOCALID")
    return list(range(local * share, (local + 1) * share)) if share and not rest else None
