"""Hardware as data: what chips, links and slices can do, by name.

The table is `chips.yaml` beside this file, each entry with its source; a user adds chips in a YAML file of
the same form. A target is a name such as `v5e:16x16` (a TPU slice), `2xv5e:16x16` (two of them joined by the
data-center network), `8xH100` (a node) or `4x8xH100` (four nodes).
"""

import dataclasses
import difflib
import functools
import importlib.resources
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from trellis.errors import UserError, did_you_mean
from trellis.files import load_yaml
from trellis.mesh.topology import TopologyError, parse_slice

# The share of the published memory bandwidth that streaming code reaches.
MEMORY_EFFICIENCY = 0.85

# More devices than there are of one kind in one place; a description of each takes a kilobyte.
MOST_DEVICES = 2**18

# Default GB/s between a device and its host, in one direction: 16 lanes of PCIe 3.
HOST_GBPS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of chip or GPU. Rates are for one JAX device (a chip has two on some TPUs).

    Attributes:
        name: as in `v5e` or `h100`.
        kind: "tpu" or "gpu"; "cpu" for this machine's.
        device_kinds: JAX's names for the device: beginnings of its `device_kind`, the usual one first.
        bf16_flops: dense bfloat16 peak, FLOP/s.
        fp4_flops: dense 4-bit float peak, FLOP/s; the 8-bit peak if the hardware has no units for it.
        fp8_flops: dense 8-bit float peak, FLOP/s; the bfloat16 peak if fp8 is not faster.
        int8_flops: the same for 8-bit whole numbers, operations a second.
        hbm_bytes: memory that a program can allocate.
        hbm_bandwidth: bytes a second.
        link_bandwidth: bytes a second, one direction; of one torus link (TPU), or of all NVLinks of a GPU.
        network_bandwidth: bytes a second, one direction, between slices or hosts.
        host_bandwidth: bytes a second, one direction, between a device's memory and its host's.
        torus: sides of the torus; 0 if every device of a host reaches every other (GPU).
        devices_per_chip: JAX devices of a chip.
        clock: cycles a second of the matrix units; None if it is not needed.
        vector_flops: elementwise float32 operations a second.
        matmul_efficiency: share of the peak that large products reach.
        attention_efficiency: the same for attention kernels.
        whole_attention_efficiency: the same if every query sees every key.
        attention_fill: keys that a query's start and end cost: where one sees so many, half of that rate is reached.
        grouped_efficiency: share of what products reach that kernels for grouped rows do.
        tile: products are padded to multiples of this.
        float32_share: rate of float32 products, as a share of the bfloat16 peak.
        fill: terms of a product's sum that its start and end cost: sums of this many terms reach half of the rate.
        cache_bytes: work that touches no more than this runs at `cache_bandwidth`; 0 for none.
        cache_bandwidth: bytes a second to and from the cache.
        launch_seconds: the least time that an operation takes.
        processors: a GPU's streaming multiprocessors; None if products do not come in waves over them.
        overlap: the communication of weights that the compiler hides by default: "gathers", "reductions".
        source: where the numbers come from.
    """

    name: str
    kind: str
    bf16_flops: float
    fp4_flops: float
    fp8_flops: float
    int8_flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    torus: int = 0
    devices_per_chip: int = 1
    clock: float | None = None
    vector_flops: float
    matmul_efficiency: float
    attention_efficiency: float
    whole_attention_efficiency: float
    tile: int
    float32_share: float
    fill: float = 0.0
    attention_fill: float = 0.0
    grouped_efficiency: float = 1.0
    cache_bytes: float = 0.0
    cache_bandwidth: float = 0.0
    launch_seconds: float = 0.0
    processors: int | None = None
    overlap: tuple[str, ...] = ()
    source: str
    device_kinds: tuple[str, ...] = ()

    @property
    def streaming_bandwidth(self) -> float:
        """The bytes a second that streaming code moves through memory."""
        return self.hbm_bandwidth * MEMORY_EFFICIENCY

    def attention_rate(self, keys: float, whole: bool = False) -> float:
        """FLOP/s that attention kernels reach.

        Args:
            keys: how many a query sees, on average.
            whole: whether every query sees every key.

        >>> h200 = chips()["h200"]
        >>> [round(h200.attention_rate(keys) / h200.bf16_flops, 2) for keys in (512, 2048, 4096)]
        [0.3, 0.47, 0.52]
        """
        share = self.whole_attention_efficiency if whole else self.attention_efficiency
        return self.bf16_flops * share * keys / (keys + self.attention_fill) if keys else self.bf16_flops * share

    @property
    def device_kind(self) -> str:
        """JAX's name for the device."""
        return _device_kind(self.kind, self.name, self.device_kinds)


def _device_kind(kind: str, name: str, known: Sequence[str]) -> str:
    return known[0] if known else f"{'TPU' if kind == 'tpu' else 'NVIDIA'} {name.upper()}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Hardware to plan for: a number of devices of one chip, and how they are joined.

    Attributes:
        name: as the user wrote it.
        chip: the chip of each device.
        shape: devices along each side of one slice's torus; for GPUs (hosts, GPUs of a host).
        wrap: whether a side's ring is closed.
        num_slices: TPU slices joined by the data-center network.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    num_slices: int = 1

    @property
    def num_devices(self) -> int:
        """The total number of JAX devices."""
        return math.prod(self.shape) * self.chip.devices_per_chip * self.num_slices

    @property
    def generation(self) -> str:
        """The name that `trellis.mesh.topology` has for the chip's generation, of a TPU."""
        return "tpu7x" if self.chip.name == "v7x" else self.chip.name

    @property
    def compiler_name(self) -> str:
        """The name that `trellis.mesh.topology.target_devices` takes."""
        if self.chip.kind == "gpu":
            return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        one = f"{self.generation}:{'x'.join(map(str, self.shape))}"
        return one if self.num_slices == 1 else f"{self.num_slices}*{one}"


_FIELDS = {
    "kind", "bf16_tflops", "fp4_tflops", "fp8_tflops", "int8_tops", "hbm_gib", "hbm_gbps", "link_gbps", "links",
    "network_gbps", "host_gbps", "devices_per_chip", "kiloflops_per_cycle", "source", "like", "vector_tflops",
    "matmul_efficiency", "attention_efficiency", "whole_attention_efficiency", "float32_share", "tile", "fill",
    "attention_fill", "grouped_efficiency", "processors", "overlap", "device_kinds",
}  # fmt: skip
_MOST = 1e18  # so that no rate is infinite
_COUNTS = {"links", "devices_per_chip", "tile", "processors"}
_SHARES = {"matmul_efficiency", "attention_efficiency", "whole_attention_efficiency", "grouped_efficiency",
           "float32_share"}  # fmt: skip
_REQUIRED = ("kind", "bf16_tflops", "hbm_gib", "hbm_gbps", "link_gbps", "network_gbps", "vector_tflops",
             "matmul_efficiency", "attention_efficiency", "tile", "source")  # fmt: skip


def chip_from(name: str, entry: Mapping, where: str = "chips.yaml") -> Chip:
    """A chip from its YAML entry.

    Raises:
        UserError: a field is unknown, missing or not a number.
    """
    entry = {key: value for key, value in entry.items() if value is not None or key not in _FIELDS}
    _check_fields(name, entry, where)
    hidden, kinds = entry.get("overlap", []), entry.get("device_kinds", [])
    _check_rates(name, entry, _device_kind(entry["kind"], name, kinds), where)
    per_chip = entry.get("devices_per_chip", 1)
    bf16, fp8 = entry["bf16_tflops"] * 1e12, entry.get("fp8_tflops", entry["bf16_tflops"])
    cycle = entry.get("kiloflops_per_cycle")
    return Chip(
        name=name,
        kind=entry["kind"],
        bf16_flops=bf16 / per_chip,
        fp4_flops=entry.get("fp4_tflops", fp8) * 1e12 / per_chip,
        fp8_flops=fp8 * 1e12 / per_chip,
        int8_flops=entry.get("int8_tops", entry["bf16_tflops"]) * 1e12 / per_chip,
        hbm_bytes=entry["hbm_gib"] * 2**30 / per_chip,
        hbm_bandwidth=entry["hbm_gbps"] * 1e9 / per_chip,
        link_bandwidth=entry["link_gbps"] * 1e9,
        network_bandwidth=entry["network_gbps"] * 1e9 / per_chip,
        host_bandwidth=entry.get("host_gbps", HOST_GBPS) * 1e9 / per_chip,
        torus=entry.get("links", 0 if entry["kind"] == "gpu" else 2),
        devices_per_chip=per_chip,
        clock=bf16 / (cycle * 1e3) if cycle else None,
        vector_flops=entry["vector_tflops"] * 1e12 / per_chip,
        matmul_efficiency=entry["matmul_efficiency"],
        attention_efficiency=entry["attention_efficiency"],
        whole_attention_efficiency=entry.get("whole_attention_efficiency", entry["attention_efficiency"]),
        tile=entry["tile"],
        # several bfloat16 passes on TPUs, TF32 on GPUs
        float32_share=entry.get("float32_share", {"tpu": 1 / 6, "gpu": 0.5}[entry["kind"]]),
        fill=entry.get("fill", 0.0),
        attention_fill=entry.get("attention_fill", 0.0),
        grouped_efficiency=entry.get("grouped_efficiency", 1.0),
        processors=entry.get("processors"),
        overlap=tuple(hidden),
        source=str(entry["source"]),
        device_kinds=tuple(kinds),
    )


def _check_fields(name: str, entry: Mapping, where: str) -> None:
    """Refuses fields that are unknown or missing, and words that say nothing."""
    for key in entry:
        if key not in _FIELDS:
            raise UserError(
                "A hardware entry can have only known fields.", seen=f"{name}.{key}", where=where,
                fix=did_you_mean(str(key), _FIELDS),
            )  # fmt: skip
    missing = [key for key in _REQUIRED if key not in entry]
    if missing:
        raise UserError(
            "A hardware entry must have all rates and their source.", seen=f"{name} without {', '.join(missing)}",
            where=where, fix=f"add `{missing[0]}`, or write `like: h100` and only the fields that differ",
        )  # fmt: skip
    if entry["kind"] not in ("tpu", "gpu"):
        raise UserError(
            "The kind of a chip must be tpu or gpu.",
            seen=f"{name}.kind: {entry['kind']}",
            where=where,
            fix="write tpu or gpu",
        )
    hidden = entry.get("overlap", [])
    if not isinstance(hidden, list) or any(word not in ("gathers", "reductions") for word in hidden):
        raise UserError(
            "`overlap` must list gathers, reductions, or both.", seen=f"{name}.overlap: {hidden}", where=where,
            fix="write overlap: [gathers, reductions], or one of them",
        )  # fmt: skip
    kinds = entry.get("device_kinds", [])
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(
            "`device_kinds` must be a list of strings.", seen=f"{name}.device_kinds: {kinds}", where=where,
            fix="write device_kinds: [NVIDIA H100]",
        )  # fmt: skip


def _check_rates(name: str, entry: Mapping, called: str, where: str) -> None:
    """Refuses numbers that a chip cannot have.

    Args:
        name: the chip's.
        entry: its fields.
        called: what JAX calls its devices.
        where: the file.
    """
    words = {"kind", "source", "like", "overlap", "device_kinds"}
    rates = {key: value for key, value in entry.items() if key not in words}
    for key, value in rates.items():
        if isinstance(value, str):
            rule, fix = "A rate must be a number, as YAML reads one.", "write it without quotes; 1e30 as 1.0e+30"
        elif not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < _MOST:
            rule, fix = "A rate must be a positive number.", "write a number"
        elif key in _COUNTS and value % 1:
            rule, fix = "A count must be a whole number.", f"write {max(1, round(value))}"
        elif key in _SHARES and value > 1:
            rule, fix = "A share must be at most 1.", f"write {value / 100:g} for {value:g} percent"
        elif key == "links" and entry["kind"] == "gpu":
            rule, fix = "Only a TPU has sides of a torus.", "leave `links` out, or write links: null"
        elif key == "links" and value > 3:
            rule, fix = "A torus must have at most 3 sides.", "write 2 or 3"
        elif key == "devices_per_chip" and value > 1 and not called.startswith("TPU7x"):
            rule, fix = "Only chips like v7x are several JAX devices.", "write devices_per_chip: 1"
        else:
            continue
        raise UserError(rule, seen=f"{name}.{key}: {value}", where=where, fix=fix)


@functools.cache
def _builtin() -> dict[str, dict]:
    return load_yaml(importlib.resources.files("trellis.hardware").joinpath("chips.yaml").read_text("utf-8"))


def published_peak(device_kind: str) -> float | None:
    """The dense bfloat16 peak of one JAX device, in FLOP/s; None if it is not in the table.

    >>> published_peak("NVIDIA H200") / 1e12, published_peak("cpu")
    (989.0, None)
    """
    peaks = {kind: tflops * 1e12 for kind, tflops in _builtin()["peaks"].items()}
    peaks |= {kind: chip.bf16_flops for chip in chips().values() for kind in chip.device_kinds}
    return peaks[found] if (found := _longest(peaks, device_kind)) else None


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls by this name; None if it is not in the table.

    >>> chip_of("NVIDIA A100-SXM4-40GB").name
    'a100-40gb'
    """
    known = {kind: chip for chip in chips().values() for kind in chip.device_kinds}
    return known[found] if (found := _longest(known, device_kind)) else None


def _longest(kinds: Iterable[str], device_kind: str) -> str | None:
    """The longest of `kinds` that a device kind begins with."""
    return max((kind for kind in kinds if device_kind.startswith(kind)), key=len, default=None)


def chips(extra: str | None = None) -> dict[str, Chip]:
    """All chips by name; `extra` is the path of a YAML file with more (or with corrections).

    An entry with `like: h100` takes what it leaves out from that one, wherever it is in the file:

        h100-pcie: {like: h100, bf16_tflops: 756, link_gbps: 64, source: "NVIDIA H100 PCIe data sheet"}

    Raises:
        UserError: the file cannot be read, or an entry is wrong.
    """
    entries, where = {name: entry for name, entry in _builtin().items() if name != "peaks"}, "chips.yaml"
    if extra:
        import yaml

        where = extra
        try:
            with open(extra, encoding="utf-8") as file:
                more = load_yaml(file.read()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise UserError(
                "A hardware file must be readable YAML.", seen=str(error).splitlines()[0], where=extra,
                fix="see src/trellis/hardware/chips.yaml for the format",
            ) from None  # fmt: skip
        named = isinstance(more, dict)
        wrong = [f"{name}: {e}" for name, e in more.items() if not isinstance(e, dict)] if named else [more]
        if wrong:
            raise UserError(
                "A hardware file must map names to entries.", seen=str(wrong[0])[:80], where=extra,
                fix="see src/trellis/hardware/chips.yaml for the format",
            )  # fmt: skip
        own = {str(key).lower(): entry for key, entry in more.items()}
        for key in more:
            if not _NAME.fullmatch(str(key).lower()):
                raise UserError(
                    "A chip's name must be a letter, and then letters, digits and hyphens: targets are read so.",
                    seen=f"`{key}`", where=extra, fix="write rtx-5090: {like: h100, ...}, and --on 8xrtx-5090",
                )  # fmt: skip
        entries |= {name: _whole(name, own, entries, extra) for name in own}
    return {name: chip_from(name, entry, where) for name, entry in entries.items()}


def _whole(name: str, own: Mapping[str, Mapping], known: Mapping[str, Mapping], where: str) -> dict:
    """An entry of a user's file with what it leaves out. One that is like itself corrects the built-in chip."""
    names, found, mine = [name], [own[name]], True
    while mine and (like := found[-1].get("like")) is not None:
        mine = isinstance(like, str) and like in own and like != names[-1]
        rule, fix = "`like` must name a known chip.", did_you_mean(str(like), {*known, *own} - {*names})
        if mine and like in names:
            rule, fix = "A chip cannot be like one that is like it.", "leave out one `like`, and write its rates"
        elif mine or (isinstance(like, str) and like in known):
            found.append(own[like] if mine else known[like])
            names.append(like)
            continue
        raise UserError(rule, seen=f"{names[-1]}.like: {like}", where=where, fix=fix)
    return {key: value for entry in reversed(found) for key, value in entry.items()}


_NAME = re.compile(r"[a-z][a-z0-9-]*")
_TPU = re.compile(r"(?:(\d+)[x*])?([a-z][a-z0-9-]*?)[:-](\d+(?:x\d+)*)")
_CLOUDS_NAMES = {"tpu7x": "v7x", "v5litepod": "v5e"}
_GPU = re.compile(r"(?:(\d+)x)?(\d+)x([a-z][a-z0-9-]*)")


def target(name: str, hardware: str | None = None) -> Target:
    """The hardware with this name.

    >>> target("v5e:16x16").num_devices
    256
    >>> target("4x8xH100").shape
    (4, 8)

    Args:
        name: `v5e:16x16`, `v5p:4x4x8`, `v5e-256`, `2xv5e:16x16`, `8xH100`, `4x8xH100`.
        hardware: the path of a YAML file with the user's own chips.

    Raises:
        UserError: there is no such chip or slice, and the message offers similar names; or it has too many devices.
    """
    found = _target(name, hardware)
    if found.num_devices > MOST_DEVICES:
        raise UserError(
            f"A target must have at most {MOST_DEVICES:,} devices: a plan looks at each.",
            seen=f"{name}, {found.num_devices:,} devices", where="--on", fix="name fewer hosts, slices or chips",
        )  # fmt: skip
    return found


def _target(name: str, hardware: str | None) -> Target:
    known = chips(hardware)
    text = name.strip().lower()
    if (match := _GPU.fullmatch(text)) and match[3] in known and known[match[3]].kind == "gpu":
        hosts, per_host = int(match[1] or 1), int(match[2])
        if hosts >= 1 and per_host >= 1:
            return Target(name=name, chip=known[match[3]], shape=(hosts, per_host), wrap=(False, False))
    match = _TPU.fullmatch(text)
    chip = (known.get(match[2]) or known.get(_CLOUDS_NAMES.get(match[2], ""))) if match else None
    if match and chip and chip.kind == "tpu" and int(match[1] or 1) >= 1:
        generation = {"v7x": "tpu7x"}.get(chip.name, chip.name)
        separator = ":" if "x" in match[3] or ":" in text else "-"
        try:
            one = parse_slice(f"{generation}{separator}{match[3]}")
            shape, wrap = one.shape, one.wrap
        except TopologyError as error:
            if generation in _builtin() or generation == "tpu7x":
                raise _unknown(name, str(error).rpartition(": ")[2].replace("tpu7x", "v7x")) from None
            shape = tuple(map(int, match[3].split("x")))  # a chip of the user's own: any torus
            if len(shape) != chip.torus:
                raise _unknown(name, f"{chip.name}:{'x'.join('4' * chip.torus)}") from None
            wrap = tuple(side >= 4 for side in shape)
        return Target(name=name, chip=chip, shape=shape, wrap=wrap, num_slices=int(match[1] or 1))
    words = re.findall(r"[a-z]+\d+[a-z]*", text)
    near = difflib.get_close_matches(words[0] if words else text, known, n=3)
    written = lambda chip: f"8x{chip.name}" if chip.kind == "gpu" else f"{chip.name}:{'x'.join('4' * chip.torus)}"
    raise _unknown(name, ", ".join(f"`{written(known[chip])}`" for chip in near or known))


def _unknown(name: str, near: str) -> UserError:
    return UserError(
        "A target must be the name of a TPU slice or of GPU nodes.", seen=name, where="--on",
        fix=f"write it like v5e:16x16, v5p:4x4x8, 2xv5e:16x16, 8xH100 or 4x8xH100. Similar: {near}",
    )  # fmt: skip
