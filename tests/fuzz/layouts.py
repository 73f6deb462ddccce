"""Random meshes and layouts, their text, and simpler ones."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

Entries = tuple[tuple[str, tuple[str, ...]], ...]

NAMES = ("batch", "pos", "embed", "mlp", "heads", "vocab", "layers")
AXES = ("data", "model", "context", "expert", "replica")
MESHES = (
    (2,), (2,), (4,), (8,), (3,), (1,),
    (4, 2), (2, 4), (2, 2), (2, 2), (2, 1), (1, 4), (3, 2), (2, 3), (1, 1),
    (2, 2, 2), (2, 2, 2), (2, 1, 2), (1, 2, 3), (4, 1, 2), (1, 1, 2),
)  # fmt: skip
# Of more devices than that, where loops over devices are no longer written out and tables of devices are long.
MANY_MESHES = (
    (9,), (12,), (16,), (18,), (24,), (13,),
    (3, 4), (4, 3), (5, 2), (2, 5), (6, 2), (2, 6), (3, 3), (4, 4), (2, 8), (7, 2), (3, 5), (6, 3), (2, 12), (12, 1),
    (2, 3, 2), (3, 2, 2), (2, 2, 3), (3, 2, 3), (4, 2, 2), (2, 4, 3), (2, 1, 6), (1, 5, 2), (2, 2, 2, 2), (2, 3, 2, 2),
)  # fmt: skip
MOST = max(math.prod(sizes) for sizes in MANY_MESHES)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """Where a program runs.

    Attributes:
        mode: "explicit" or "auto" under a layout; "types" on an explicit mesh without a layout; "manual"; "alone",
            without a mesh.
        mesh: the mesh axes and their sizes.
        params, compute: the layout's maps.
        options: further arguments of `tr.Layout`, as text.
    """

    mode: str
    mesh: tuple[tuple[str, int], ...]
    params: Entries = ()
    compute: Entries = ()
    options: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def strict(self) -> bool:
        return "strict=True" in self.options

    def parts(self, name: str, which: str) -> int:
        """Into how many slices a map cuts a name at most."""
        return math.prod(self.sizes[a] for entry, axes in getattr(self, which) if entry == name for a in axes)

    def divides(self, name: str, size: int) -> bool:
        """Whether a name may have this size under both maps."""
        return not any(size % self.parts(name, which) for which in ("params", "compute"))

    def mesh_text(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.mesh)
        kind = ', axis_type="auto"' if self.mode == "auto" else ""
        return f"tr.make_mesh(jax.devices()[:{self.devices}]{kind}, {sizes})"

    def text(self) -> str:
        """The context that the program runs in, for `with`."""
        match self.mode:
            case "alone":
                return "contextlib.nullcontext()"
            case "types" | "manual":
                return "jax.set_mesh(mesh)"
        maps = [f"params={entries_text(self.params)}", f"compute={entries_text(self.compute)}"]
        return f"tr.Layout(mesh, {', '.join((*maps, *self.options))})"

    def simpler(self) -> Iterator["Setting"]:
        """Settings with less in them."""
        for i in range(len(self.options)):
            yield dataclasses.replace(self, options=self.options[:i] + self.options[i + 1 :])
        for which in ("params", "compute"):
            entries = getattr(self, which)
            for i, (name, axes) in enumerate(entries):
                yield dataclasses.replace(self, **{which: entries[:i] + entries[i + 1 :]})
                for axis in axes if len(axes) > 1 else ():
                    fewer = tuple(a for a in axes if a != axis)
                    yield dataclasses.replace(self, **{which: (*entries[:i], (name, fewer), *entries[i + 1 :])})
        for axis, size in self.mesh:
            if len(self.mesh) > 1 and self.mode in ("explicit", "auto"):
                rest = tuple(pair for pair in self.mesh if pair[0] != axis)
                fewer = [
                    tuple((name, kept) for name, axes in entries if (kept := tuple(a for a in axes if a != axis)))
                    for entries in (self.params, self.compute)
                ]
                yield dataclasses.replace(self, mesh=rest, params=fewer[0], compute=fewer[1])
            if size > 2 and size % 2 == 0 and self.mode != "manual":
                halved = tuple((name, 2 if name == axis else s) for name, s in self.mesh)
                yield dataclasses.replace(self, mesh=halved)


def entries_text(entries: Entries) -> str:
    """A map from names to mesh axes, as a dict."""
    shown = (f'"{name}": ' + (f'"{axes[0]}"' if len(axes) == 1 else str(tuple(axes))) for name, axes in entries)
    return "{" + ", ".join(shown) + "}"


def draw_mesh(rng: np.random.Generator, many: bool = False) -> tuple[tuple[str, int], ...]:
    """One to three mesh axes on at most eight devices, or one to four on `many`: 9 to 24."""
    meshes = MANY_MESHES if many else MESHES
    sizes = meshes[rng.integers(len(meshes))]
    axes = rng.permutation(AXES)[: len(sizes)] if rng.random() < 0.5 else AXES[: len(sizes)]
    return tuple((str(axis), size) for axis, size in zip(axes, sizes, strict=True))


def draw_setting(
    rng: np.random.Generator, mode: str, mesh: tuple[tuple[str, int], ...] | None = None, *, many: bool = False
) -> Setting:
    """A mesh, if none is given, and two maps over the names that programs start with."""
    mesh = mesh or draw_mesh(rng, many)
    if mode in ("alone", "types", "manual"):
        return Setting(mode, mesh)
    compute = _entries(rng, mesh)
    params = compute if rng.random() < 0.2 else _entries(rng, mesh)
    options = [text for text, chance in (("strict=True", 0.04), ('gather="per_axis"', 0.1)) if rng.random() < chance]
    sizes = dict(mesh)
    alone = [name for name, axes in compute if sum(sizes[a] > 1 for a in axes) == 1]
    if alone and rng.random() < 0.1:
        options.append(f'overlap=("{alone[rng.integers(len(alone))]}",)')
    return Setting(mode, mesh, params, compute, tuple(options))


def _entries(rng: np.random.Generator, mesh) -> Entries:
    axes = [axis for axis, _ in mesh]
    found = []
    for name in rng.permutation((*NAMES, "out")):
        if rng.random() < 0.55:
            several = 2 if len(axes) > 1 and rng.random() < 0.2 else 1
            found.append((str(name), tuple(str(a) for a in rng.permutation(axes)[:several])))
    return tuple(found)


def draw_sizes(rng: np.random.Generator, setting: Setting) -> dict[str, int]:
    """A size for each name, which almost always divides over its mesh axes."""
    sizes = {}
    for name in NAMES:
        parts = math.lcm(setting.parts(name, "params"), setting.parts(name, "compute"))
        if setting.mode in ("types", "manual"):
            parts = math.lcm(*(size for _, size in setting.mesh))
        if parts > 1 and rng.random() < 0.97:
            sizes[name] = parts * int(rng.choice([1, 2, 2, 3] if parts < 4 else [1, 2]))
        else:
            sizes[name] = int(rng.choice([1, 2, 3, 4, 5, 6]))
    return sizes
