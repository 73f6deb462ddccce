"""What a proof should hold for: every recipe on its own hardware, and every layout, with every family, everywhere."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from tests.equivalence import test_models, test_stages
from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.models import (
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MixtralConfig,
    ModelConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Routing,
)
from trellis.recipes.load import RECIPES, hardware_of
from trellis.run.config import Remat, Run
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.run.run_file import write_run
from trellis.train.assemble import model_axes

# The smallest of each kind of hardware with a place for three mesh axes.
EIGHT = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "H100": "8xH100", "H200": "8xH200", "B200": "8xB200"}
EVERYWHERE = ("v5e", "v5p", "v6e", "H100")
# Recipes that were written for no hardware in particular. Those for another GPU than these are proven on v5e and H100.
ANYWHERE = {"tiny": EVERYWHERE, "starter": EVERYWHERE, "gpt2_small": EVERYWHERE}
_BESIDES_DATA = ("model", "context", "expert", "expert_y", "stage", "replica")

_WIDTHS = dict(vocab=1019, embed=256, layers=4, heads=4, mlp=384)
_LLAMA = dict(_WIDTHS, kv_heads=2, head_dim=64, rope_theta=1e4)
_EXPERTS = dict(_LLAMA, experts=8, experts_per_token=2, tie_embeddings=False)
LENGTH = 2048
FAMILIES: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**_LLAMA, tie_embeddings=True),
    "qwen3": Qwen3Config(**_LLAMA, tie_embeddings=False),
    "mixtral": MixtralConfig(**_EXPERTS, routing=Routing(balance=0.02, z_loss=0.01)),
    "gpt2": GPT2Config(
        **_WIDTHS, positions=LENGTH, norm_eps=1e-5, dropout=0.0, scale_by_inverse_layer=True, upcast_attention=True
    ),
    "qwen3_moe": Qwen3MoeConfig(**_EXPERTS, routing=Routing(balance=0.02, normalize=False)),
    "gptj": GPTJConfig(**_WIDTHS, rotary_dim=32, head_bias=True),
}
STAGES = {
    "stages, tensor": test_stages.TENSOR,
    "stages, deep": test_stages.DEEP,
    "stages, experts": test_stages.EXPERTS,
}
POLICIES = ("none", "full", "saved", "dots")


@dataclasses.dataclass(frozen=True)
class Case:
    """One proof.

    Attributes:
        name: of the recipe or the layout.
        family: of the model, where the layout is what is to be proven.
        on: the target.
        options: of the command.
        run: what is proven, where it is no recipe.
    """

    name: str
    family: str
    on: str
    options: tuple[str, ...] = ()
    run: Run | None = None

    def arguments(self, folder: Path) -> list[str]:
        """Of `trellis prove`; a run that is no recipe is written to the folder."""
        what = self.name
        if self.run is not None:
            what = str(folder / "run.yaml")
            write_run(self.run, Path(what))
        return ["prove", what, "--on", self.on, *self.options]


def recipes() -> Iterator[Case]:
    """Every recipe on eight devices of the hardware that it is written for, its mesh axes with a part of them each."""
    for name, make in RECIPES.items():
        planned = [kind for kind in EIGHT if kind in (hardware_of(name) or "")]
        kinds = ANYWHERE.get(name, planned or ("v5e", "H100"))
        for kind in kinds:
            yield Case(name, "", EIGHT[kind], (*_mesh(make().mesh), *_by_width(make(), hardware_of(name))))


def _mesh(mesh: MeshSizes) -> tuple[str, ...]:
    """Two parts for each axis of a mesh that slices more than the batch, and the rest for the batch; else nothing."""
    axes = [axis for axis in _BESIDES_DATA if getattr(mesh, axis) > 1]
    if not axes:
        return ()
    rest = {"data": 8 // 2 ** len(axes), "data_y": 1, "data_z": 1}
    return tuple(f"--mesh.{axis}={size}" for axis, size in {**dict.fromkeys(axes, 2), **rest}.items())


def _by_width(run: Run, hardware: str | None) -> tuple[str, ...]:
    """Experts that a recipe's devices slice by width are so on eight devices, too, of which there may be few enough."""
    if run.model.experts == 1 or hardware is None or "experts" in run.layout.params:
        return ()
    layout = make_layout(run.mesh, run.layout, described_devices(target(hardware)), model_axes(run.model))
    _, width = layout.assign(("experts", "embed"), "params")
    return ("--layout.params.experts=expert_y/expert",) if width else ()


def layouts() -> Iterator[Case]:
    """Every layout of the equivalence suite, with one family after the other, on each kind of hardware."""
    dense = [(name, *entry, "auto") for name, entry in {**test_models.LAYOUTS, **STAGES}.items()]
    experts = [(name, *entry) for name, entry in test_models.EXPERTS.items()]
    for kind in EVERYWHERE:
        for index, (name, sizes, choice, way) in enumerate([*dense, *experts]):
            families = ("mixtral", "qwen3_moe") if "expert" in name or name == "dense" else tuple(FAMILIES)
            family = families[index % len(families)]
            yield Case(name, family, _target(kind, sizes), (), _run(family, index, sizes, choice, way))


def _target(kind: str, sizes: MeshSizes) -> str:
    """Eight devices, or four where a layout has no more."""
    four = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "H100": "4xH100"}
    count = 1
    for size in dataclasses.asdict(sizes).values():
        count *= size
    return four[kind] if count == 4 else EIGHT[kind]


def _run(family: str, index: int, sizes: MeshSizes, choice: LayoutChoice, way: str) -> Run:
    """A run in bfloat16 of such a layout; each policy and both accumulations meet each other."""
    model = FAMILIES[family]
    if way != "auto":
        model = dataclasses.replace(model, routing=dataclasses.replace(model.routing, way=way))
    if choice.preset == "hybrid" and sizes.replica == 1:  # it would have a replica on each host, of which v5p has two
        choice = dataclasses.replace(choice, preset="auto")
    base = RECIPES["llama_84m"]()
    return dataclasses.replace(
        base,
        name=family,
        model=model,
        data=dataclasses.replace(base.data, sequence_length=LENGTH),
        batch_size=32,
        microbatches=None if sizes.stage > 1 else 1 + index % 2,
        remat=Remat(policy=POLICIES[index // 2 % len(POLICIES)]),
        z_loss=1e-4,
        mesh=sizes,
        layout=choice,
    )
