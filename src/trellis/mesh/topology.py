"""Devices to compile for, of hardware that is not here: TPU slices and GPU nodes.

A program lowered for these devices is compiled by the real compiler (libtpu's, or XLA's for CUDA); it cannot run.
TPU slices need the `libtpu` package, GPU nodes JAX's CUDA plugin; neither needs the hardware.

The torus facts (which slices have wrap-around links, chips per host, the chip configuration that makes one device
of a chip's two cores) come from Google Cloud's published slice tables. Without them, the compiler assumes a mesh
without wrap-around and emulates some gathers with all-reduces.
"""

import dataclasses
import difflib
import functools
import glob
import importlib
import importlib.util
import itertools
import math
import os
import re

import jax
from jax.experimental import topologies

from trellis.errors import TrellisError


class TopologyError(TrellisError, ValueError):
    """A target that does not exist, or whose compiler is not installed. The message gives the fix."""


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_OLD_FLAT = ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32")
_SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


@dataclasses.dataclass(frozen=True, slots=True)
class _Generation:
    """What is common to all slices of a TPU generation."""

    flat: tuple[str, ...]  # the shapes of a 2-D torus; empty for a 3-D one
    largest: int  # the longest side of a 3-D torus
    config: str  # libtpu's chip configuration
    devices_per_chip: int
    cores_per_chip: int  # what the number in a name such as "v5p-128" counts
    wrap_from: int  # a side of this length or more has wrap-around links


_GENERATIONS = {
    "v2": _Generation(_OLD_FLAT[:-3], 16, "default", 2, 2, 16),
    "v3": _Generation(_OLD_FLAT, 32, "default", 2, 2, 32),
    "v4": _Generation((), 16, "megacore", 1, 2, 4),
    "v5e": _Generation(_FLAT, 16, "default", 1, 1, 16),
    "v5p": _Generation((), 28, "megacore", 1, 2, 4),
    "v6e": _Generation(_FLAT, 16, "default", 1, 1, 16),
    "tpu7x": _Generation((), 24, "default", 2, 2, 4),
}


@functools.cache
def _shapes(generation: str) -> tuple[str, ...]:
    facts = _GENERATIONS[generation]
    if facts.flat:
        return facts.flat
    sides = range(4, facts.largest + 1, 4)
    cubes = sorted(itertools.combinations_with_replacement(sides, 3), key=lambda sides: (math.prod(sides), sides))
    return _SMALL_CUBES + tuple("x".join(map(str, cube)) for cube in cubes)


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """One TPU slice.

    Attributes:
        generation: as in `v5e`.
        shape: chips along each side of the torus.
        wrap: whether each side has links that close the ring.
        chips_per_host: chips of one host along each side.
        devices_per_chip: JAX devices a chip has (two on v2, v3 and tpu7x).
        config: libtpu's name for how a chip's cores are joined.
    """

    generation: str
    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    chips_per_host: tuple[int, ...]
    devices_per_chip: int
    config: str

    def __str__(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        """Chips in the slice."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """JAX devices in the slice."""
        return self.num_chips * self.devices_per_chip


def slice_names(generation: str | None = None) -> list[str]:
    """The TPU slices that `target_devices` knows, of one generation or of all.

    >>> slice_names("v5e")
    ['v5e:1x1', 'v5e:2x2', 'v5e:2x4', 'v5e:4x4', 'v5e:4x8', 'v5e:8x8', 'v5e:8x16', 'v5e:16x16']

    Raises:
        TopologyError: there is no such generation.
    """
    if generation is not None and generation not in _GENERATIONS:
        raise TopologyError(
            f"a TPU generation must be one of {', '.join(_GENERATIONS)}, got {generation!r}: use one of them"
        )
    generations = [generation] if generation else list(_GENERATIONS)
    return [f"{name}:{shape}" for name in generations for shape in _shapes(name)]


@functools.cache
def _by_count() -> dict[str, str]:
    """Names by count of cores, as clouds sell them: `v5e-16`, `v5p-128`; the shape nearest to a cube wins."""
    names: dict[str, str] = {}
    for name in slice_names():
        generation, shape = name.split(":")
        chips = math.prod(map(int, shape.split("x")))
        names.setdefault(f"{generation}-{chips * _GENERATIONS[generation].cores_per_chip}", name)
    for generation in (name for name, facts in _GENERATIONS.items() if not facts.flat):
        best: dict[int, tuple[int, str]] = {}
        for shape in _shapes(generation):
            sides = tuple(map(int, shape.split("x")))
            best[math.prod(sides)] = min(best.get(math.prod(sides), (10**9, "")), (sum(sides), shape))
        for chips, (_, shape) in best.items():
            names[f"{generation}-{chips * _GENERATIONS[generation].cores_per_chip}"] = f"{generation}:{shape}"
    return names


def parse_slice(name: str) -> Slice:
    """Reads `v5e:4x4`, or the cloud's name by count of cores, `v5e-16`.

    >>> parse_slice("v5p-128").shape
    (4, 4, 4)
    >>> parse_slice("v5e:8x16").wrap
    (False, True)

    Raises:
        TopologyError: no such slice.
    """
    full = _by_count().get(name, name)
    generation, _, shape = full.partition(":")
    if generation not in _GENERATIONS or shape not in _shapes(generation):
        raise TopologyError(_unknown_slice(name, generation))
    facts = _GENERATIONS[generation]
    sides = tuple(map(int, shape.split("x")))
    if facts.flat:
        wrap = tuple(side >= facts.wrap_from for side in sides)
    else:  # only whole 4x4x4 cubes are joined by optical links
        wrap = (all(side % 4 == 0 for side in sides),) * 3
    chips_per_host = tuple(min(side, most) for side, most in zip(sides, (2, 2, 1)))
    return Slice(generation, sides, wrap, chips_per_host, facts.devices_per_chip, facts.config)


def _unknown_slice(name: str, generation: str) -> str:
    if generation.split("-")[0] in _GENERATIONS:
        generation = generation.split("-")[0]
        known = slice_names(generation)
        asked = [int(side) for side in re.findall(r"\d+", name[len(generation) :])]
        if "-" in name and asked:
            known = [n for n in _by_count() if n.startswith(f"{generation}-")]
            near = sorted(known, key=lambda n: abs(int(n.rpartition("-")[2]) - asked[0]))[:4]
        elif asked:
            chips = math.prod(asked)
            near = sorted(known, key=lambda n: abs(math.log(parse_slice(n).num_chips / max(chips, 1))))[:4]
        else:
            near = known[:4]
    else:
        near = [f"{n}:{_shapes(n)[3]}" for n in difflib.get_close_matches(generation.lower(), _GENERATIONS, 4, 0.3)]
        near = near or [f"{n}:{_shapes(n)[3]}" for n in _GENERATIONS]
    return (
        f"there is no TPU slice '{name}': write a generation ({', '.join(_GENERATIONS)}) and the number of chips "
        f"along each side of the torus, as in 'v5e:4x4' or 'v5p:4x4x4'. Similar: {', '.join(near)}"
    )


def _attached() -> bool:
    """Whether this machine has TPUs of its own (then their environment stays as it is)."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def quiet_libtpu() -> None:
    """Tells libtpu that no TPU is attached, so that loading it asks no metadata server and prints nothing.

    It sets only variables that are not set yet, and none if the machine has TPUs. It has to run before JAX looks at
    its devices, which loads libtpu if it is installed.
    """
    if _attached():
        return
    for key, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5e-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(key, value)


def _require_libtpu(name: str) -> None:
    if os.environ.get("TPU_LIBRARY_PATH") or importlib.util.find_spec("libtpu"):
        return
    raise TopologyError(
        f"compiling for '{name}' needs libtpu, the TPU compiler, which is not installed (no TPU is needed): "
        f"pip install 'trellis[plan]', or pip install libtpu in the version that matches JAX {jax.__version__}"
    )


def slice_devices(name: str, *, num_slices: int = 1) -> list[jax.Device]:
    """The devices of a TPU slice to compile for, which need not exist.

    Args:
        name: as in `v5e:4x4`, `v5p:4x4x4` or `v5e-16`; see `slice_names`.
        num_slices: slices joined by the data-center network.

    Returns:
        The devices in libtpu's order: the slices one after the other, hosts within a slice.

    Raises:
        TopologyError: no such slice, fewer than one of them, or libtpu is not installed.
    """
    target = parse_slice(name)
    if num_slices < 1:
        raise TopologyError(
            f"a target needs at least one slice, got num_slices={num_slices} of '{name}': pass 1 or more"
        )
    _require_libtpu(name)
    quiet_libtpu()
    return list(_tpu_devices(target, num_slices))


@functools.cache
def _tpu_devices(target: Slice, num_slices: int) -> tuple[jax.Device, ...]:
    pad = 3 - len(target.shape)
    topology = topologies.get_topology_desc(
        str(target),
        platform="tpu",
        chip_config_name=target.config,
        chips_per_host_bounds=[*target.chips_per_host, *[1] * pad],
        num_slices=num_slices,
        wrap=[*target.wrap, *[False] * pad],
    )
    return tuple(topology.devices)


@dataclasses.dataclass(frozen=True, slots=True)
class _Gpu:
    """What XLA's GPU compiler asks about a device (NVIDIA's data sheets; memory as the driver reports it)."""

    label: str
    capability: int
    cores: int  # streaming multiprocessors
    fpus_per_core: int
    memory_bytes: int
    bandwidth: int  # bytes a second
    l2_bytes: int
    clock_ghz: float
    shared_per_core: int
    links: int  # NVLink links in use


_GPUS = {
    "a100-40gb": _Gpu("NVIDIA A100-SXM4-40GB", 8, 108, 64, 42331013120, 1555200000000, 41943040, 1.41, 167936, 12),
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 85100068864, 2039040000000, 41943040, 1.41, 167936, 12),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 84942979072, 3352320000000, 52428800, 1.98, 233472, 18),
    "h200": _Gpu("NVIDIA H200", 9, 132, 128, 151397597184, 4800000000000, 52428800, 1.98, 233472, 18),
    "b200": _Gpu("NVIDIA B200", 10, 148, 128, 191514411008, 7672320000000, 132644864, 1.965, 233472, 18),
}


def capability_of_kind(kind: str) -> int:
    """The major compute capability of a GPU that is compiled or planned for, by its `device_kind`; 0 for others.

    >>> capability_of_kind("NVIDIA B200"), capability_of_kind("NVIDIA H100")
    (10, 9)
    """
    return next((gpu.capability for gpu in _GPUS.values() if gpu.label.startswith(kind)), 0)


def _target_config(gpu: _Gpu) -> str:
    """XLA's `GpuTargetConfigProto`, as text."""
    extension = "ACCELERATED_FEATURES" if gpu.capability >= 9 else "NONE"
    return f"""
gpu_device_info {{
  name: "{gpu.label}"
  cuda_compute_capability {{ major: {gpu.capability} feature_extension: {extension} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2_bytes}
  shared_memory_per_core: {gpu.shared_per_core}
  shared_memory_per_block_optin: {gpu.shared_per_core - 1024}
  shared_memory_per_block: 49152
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {gpu.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.label}"
"""


_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def _cuda_plugin() -> str | None:
    for module in _PLUGINS:
        try:
            if importlib.util.find_spec(module):
                return module
        except ModuleNotFoundError:
            continue
    return None


def gpu_devices(name: str, hosts: int = 1, per_host: int = 8) -> list[jax.Device]:
    """The devices of GPU nodes to compile for, which need not exist.

    Args:
        name: as in `h100`.
        hosts: nodes, joined by a network.
        per_host: GPUs in a node, joined by NVLink.

    Returns:
        The devices, node by node.

    Raises:
        TopologyError: no such GPU, fewer than one, or JAX's CUDA plugin is not installed.
    """
    if name not in _GPUS:
        near = difflib.get_close_matches(name.lower(), _GPUS, 3, 0.4) or list(_GPUS)
        raise TopologyError(f"there is no GPU '{name}' in the table ({', '.join(_GPUS)}). Similar: {', '.join(near)}")
    if hosts < 1 or per_host < 1:
        raise TopologyError(
            f"a target needs at least one device, got hosts={hosts}, per_host={per_host}: pass 1 or more"
        )
    module = _cuda_plugin()
    if module is None:
        raise TopologyError(
            f"compiling for '{name}' needs JAX's CUDA plugin, which is not installed (no GPU is needed): "
            f"pip install 'jax[cuda13]=={jax.__version__}'"
        )
    return list(_cuda_devices(name, hosts, per_host, module))


@functools.cache
def _cuda_devices(name: str, hosts: int, per_host: int, module: str) -> tuple[jax.Device, ...]:
    # Without a driver, the plugin's version check fails; the compiler does not need what it checks.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    describe = functools.partial(
        topologies.get_topology_desc,
        name,
        platform="cuda",
        target_config=_target_config(_GPUS[name]),
        topology=f"1x{hosts}x{per_host}",
    )
    try:
        return tuple(describe().devices)
    except NotImplementedError:  # JAX looked for plugins before the check was switched off, and dropped this one
        importlib.import_module(module).initialize()
        return tuple(describe().devices)


def target_devices(name: str) -> list[jax.Device]:
    """The devices of any target, by the name that `trellis plan --on` takes.

    `v5e:4x4` is a slice, `2xv5e:16x16` (or `2*v5e:16x16`) is two of them joined by a network, `8xH100` (or `h100:8`)
    is a node of eight GPUs, `4x8xH100` (or `h100:4x8`) is four such nodes.

    Raises:
        TopologyError: no such target, or its compiler is not installed.
    """
    if (nodes := re.fullmatch(r"(?:(\d+)x)?(\d+)x([a-z].*)", name.lower())) and not nodes[3].startswith("v"):
        return gpu_devices(nodes[3], int(nodes[1] or 1), int(nodes[2]))
    count, star, rest = re.sub(r"^(\d+)x(?=v)", r"\1*", name).rpartition("*")
    kind, _, shape = rest.partition(":")
    if kind in _GPUS:
        sizes = re.fullmatch(r"(?:(\d+)x)?(\d+)", shape)
        if star or not sizes:
            raise TopologyError(f"'{name}' is not a GPU target: write '8x{kind}' for one node or '4x8x{kind}' for four")
        return gpu_devices(kind, int(sizes[1] or 1), int(sizes[2]))
    if star and not count.isdigit():
        raise TopologyError(f"'{name}' is not a target: write '2xv5e:16x16' for two slices")
    return slice_devices(rest, num_slices=int(count or 1))
