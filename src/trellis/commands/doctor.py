"""`trellis doctor`: what this machine and environment have, and how to get what is missing."""

import argparse
import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from trellis.commands.command import Command, whole
from trellis.errors import UserError

_PIP = f"{sys.executable} -m pip install"
# The folder of a clone: of its `src/trellis/commands`.
_SOURCE = Path(__file__).parents[3]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis doctor`."""
    parser.add_argument("--devices", type=whole(most=4096), metavar="N", help="CPU devices to split this machine into")


def execute(args: argparse.Namespace) -> int:
    """`trellis doctor`."""
    import jax

    from trellis.cores import usable_cores
    from trellis.figures.numbers import flop_rate
    from trellis.hardware.measure import measure_machine
    from trellis.hardware.peak import matmul_peak
    from trellis.hardware.platform import choose_platform, devices_of_jax
    from trellis.mesh.platform import are_cpus

    choose_platform()
    if args.devices is not None:
        if args.devices < 1:
            seen, fix = f"devices={args.devices}", "use 1 or more, or leave it out"
            raise UserError("The number of devices must be 1 or more.", seen=seen, where="--devices", fix=fix)
        jax.config.update("jax_num_cpu_devices", args.devices)
    print(f"python           {platform.python_version()} at {sys.executable}")
    print(f"machine          {platform.system()} {platform.machine()}, {usable_cores()} cores")
    installed = distribution()
    if installed is None:
        print(f"trellis          not installed, only found at {_SOURCE}: {_PIP} {_SOURCE}")
    for name, version in dependencies(installed) if installed else ():
        print(f"{name:<16} {version or f'missing: {_PIP} {name}'}")
    devices = devices_of_jax()
    cpus = are_cpus(devices)
    print(f"\ndevices          {len(devices)} x {devices[0].device_kind} ({devices[0].platform})")
    if stats := devices[0].memory_stats():
        print(f"memory           {stats.get('bytes_limit', 0) / 2**30:.1f} GiB each")
    for dtype in ("float32", "bfloat16") if cpus else ("bfloat16",):
        peak = matmul_peak(devices, dtype)
        how = "measured, all devices together" if cpus else "published, all devices together"
        print(f"{dtype:<16} " + (f"{flop_rate(peak)} in matrix products ({how})" if peak else "peak not known"))
    if cpus:
        m = measure_machine()
        print(f"elementwise      {m.vector / 1e9:.1f} G operations/s (measured, one device)")
        print(
            f"memory           {m.memory / 1e9:.1f} GB/s, {m.cache / 1e9:.1f} GB/s in the cache (measured, one device)"
        )
        print(f"an operation     takes {m.launch * 1e6:.1f} us at least (measured)")
    for advice in advise(devices[0].platform, Path("/dev")):
        print(advice)
    if installed is None:
        return 0
    print("\nextras")
    for extra in extras(installed):
        missing = f"missing {', '.join(extra.missing)}: {_PIP} 'trellis[{extra.name}]'"
        print(f"  {extra.name:<14} {missing if extra.missing else 'installed'}")
    return 0


def distribution() -> importlib.metadata.Distribution | None:
    """What is installed of Trellis; None if it runs from a folder on Python's path."""
    try:
        return importlib.metadata.distribution("trellis")
    except importlib.metadata.PackageNotFoundError:
        return None


class Extra(NamedTuple):
    """An extra of the package, and the requirements of it that are not installed."""

    name: str
    missing: list[str]


def dependencies(distribution: importlib.metadata.Distribution) -> Iterator[tuple[str, str | None]]:
    """The name and installed version of the package and of everything that it always needs."""
    yield "trellis", distribution.version
    for requirement in distribution.requires or ():
        if "extra ==" not in requirement:
            yield (name := _name(requirement)), _version(name)
            if name == "jax":
                yield "jaxlib", _version("jaxlib")


def extras(distribution: importlib.metadata.Distribution) -> list[Extra]:
    """Every extra, with those of its requirements that are missing."""
    names = distribution.metadata.get_all("Provides-Extra") or []
    found = []
    for extra in names:
        mine = [r for r in distribution.requires or () if re.search(rf"extra == ['\"]{extra}['\"]", r)]
        found.append(Extra(extra, [r for r in _plugins(mine) if _version(r) is None]))
    return found


# jax[tpu] and jax[cuda13] are jax with a plugin: jax may be there without the plugin.
_JAX_EXTRAS = {"tpu": "libtpu", "cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin"}


def _plugins(requirements: Iterable[str]) -> Iterator[str]:
    for requirement in requirements:
        if _name(requirement) == "trellis":
            continue  # an extra that includes others
        asked = re.match(r"jax\[(\w+)\]", requirement)
        yield _JAX_EXTRAS[asked[1]] if asked else _name(requirement)


def advise(backend: str, dev: Path) -> list[str]:
    """What to install if there is hardware that JAX does not use.

    Args:
        backend: the platform that JAX uses.
        dev: the folder of device files.
    """
    if backend != "cpu":
        return []
    if any(dev.glob("nvidia[0-9]*")):
        return [f"advice           this machine has NVIDIA GPUs that JAX does not use: {_PIP} 'trellis[gpu]'"]
    if any(dev.glob("accel[0-9]*")):
        return [f"advice           this machine has TPUs that JAX does not use: {_PIP} 'trellis[tpu]'"]
    return []


def _name(requirement: str) -> str:
    return re.findall(r"^[A-Za-z0-9_.-]+", requirement)[0]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


COMMAND = Command(
    name="doctor",
    summary="show versions, devices, and what is installed or missing",
    description="Shows versions, devices, what is installed, and what is missing and how to install it.",
    arguments=arguments,
    execute=execute,
)
