import dataclasses
import os
import types

import equinox as eqx
import jax
import pytest

from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.inspect import ledger
from trellis.named import dot, is_named, random, shard
from trellis.recipes import tiny
from trellis.run.layouts import PRESETS, LayoutChoice, MeshSizes, check_names, make_layout
from trellis.run.on_mesh import check_on_mesh
from trellis.train.assemble import model_axes, model_types
from trellis.train.devices import default_count, find_devices

WEIGHTS = {
    "mlp": ("layers", "embed", "mlp"),
    "q": ("layers", "embed", "heads", "head_dim"),
    "norm": ("layers", "embed"),
    "table": ("vocab", "embed"),
}
ACTIVATIONS = {
    "residual": ("batch", "pos", "embed"),
    "mlp": ("batch", "pos", "mlp"),
    "scores": ("batch", "heads", "pos", "key_pos"),
}


def specs(preset: str, **sizes: int) -> dict[str, str]:
    """Each array's shape with its mesh axes, as the notation writes it."""
    layout = make_layout(MeshSizes(**sizes), LayoutChoice(preset=preset), jax.devices()[:8])
    both = [("params", WEIGHTS), ("compute", ACTIVATIONS)]
    return {
        f"{which} {name}": " ".join(
            "/".join((n, *axes)) for n, axes in zip(names, layout.assign(names, which), strict=True)
        )
        for which, arrays in both
        for name, names in arrays.items()
    }


@pytest.mark.parametrize(
    ("preset", "sizes", "expected"),
    [
        (
            "data",
            {},
            {"params mlp": "layers embed mlp", "compute residual": "batch/data pos embed"},
        ),
        (
            "fsdp",
            {"data": 4, "data_y": 2},
            {"params mlp": "layers embed/data/data_y mlp", "compute residual": "batch/data/data_y pos embed"},
        ),
        (
            "tensor",
            {"data": 2, "model": 4},
            {
                "params q": "layers embed heads/model head_dim",
                "params table": "vocab/model embed",
                "compute mlp": "batch/data pos mlp/model",
                "compute residual": "batch/data pos embed",
            },
        ),
        (
            "fsdp_tensor_sequence",
            {"data": 4, "model": 2},
            {
                "params mlp": "layers embed/data mlp/model",
                "params norm": "layers embed/data",
                "compute mlp": "batch/data pos mlp/model",
                "compute residual": "batch/data pos/model embed",
                "compute scores": "batch/data heads/model pos key_pos",
            },
        ),
        (
            "context",
            {"data": 4, "context": 2},
            {"params mlp": "layers embed/data/context mlp", "compute residual": "batch/data pos/context embed"},
        ),
        (
            "auto",
            {"replica": 2, "context": 2, "model": 2},
            {
                "params mlp": "layers embed/context mlp/model",
                "compute mlp": "batch/replica pos/context mlp/model",
                "compute residual": "batch/replica pos/context/model embed",
            },
        ),
        (
            "auto",
            {"stage": 2, "data": 2, "model": 2},
            {
                "params mlp": "layers/stage embed/data mlp/model",
                "params table": "vocab/model embed/data",
                "compute residual": "batch/data/stage pos/model embed",
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_presets(preset, sizes, expected):
    found = specs(preset, **sizes)
    assert {name: found[name] for name in expected} == expected


def test_sums_over_both_slices_of_positions_are_scattered_as_parameters_lie():
    """In the order of the mesh: in another one, each gradient would be permuted after that."""
    layout = make_layout(MeshSizes(data=2, context=2, context_y=2), LayoutChoice(preset="context"), jax.devices())
    over = ("data", "context_y", "context")
    assert layout.mesh.axis_names == over and layout.assign(WEIGHTS["table"], "params") == ((), over)
    assert layout.assign(ACTIVATIONS["residual"])[1] == ("context", "context_y")
    with layout:
        table, x = (random.normal(jax.random.key(0), axes) for axes in ({"out": 8, "embed": 8}, {"pos": 8, "embed": 8}))
        loss = lambda table, x: dot(x, table, over="embed").sum().array
        moved = ledger(jax.grad(loss), shard(table), shard(x, "compute"))
    assert "reduce-scatter" in moved.per_kind() and "permute" not in moved.per_kind()


def test_own_entries_replace_the_presets():
    choice = LayoutChoice(preset="fsdp_tensor", params={"embed": "", "mlp": "data/model"}, compute={"pos": "model"})
    layout = make_layout(MeshSizes(data=4, model=2), choice, jax.devices())
    assert layout.assign(WEIGHTS["mlp"], "params") == ((), (), ("data", "model"))
    assert layout.assign(ACTIVATIONS["residual"]) == (("data",), ("model",), ())


def test_two_processors_of_one_cpu_keep_parameters_whole(monkeypatch):
    """Where they are processors: on a machine with one, two devices rehearse a larger machine."""

    def weights(count, **choice):
        layout = make_layout(MeshSizes(), LayoutChoice(**choice), jax.devices()[:count])
        assert layout.assign(ACTIVATIONS["residual"])[0] == ("data",)
        return layout.assign(WEIGHTS["mlp"], "params")

    sliced, whole = ((), ("data",), ()), ((), (), ())
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(2)), raising=False)
    assert weights(2) == whole
    assert weights(2, preset="fsdp") == weights(8) == sliced
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(1)), raising=False)
    assert weights(2) == sliced


def test_compiler_places_in_auto_mode():
    layout = make_layout(MeshSizes(), LayoutChoice(mode="auto"), jax.devices())
    assert set(layout.mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_overlap_drops_out_with_its_mesh_axis():
    choice = LayoutChoice(overlap=("mlp", "heads"))
    assert make_layout(MeshSizes(data=4, model=2), choice, jax.devices()).overlap == ("mlp", "heads")
    assert make_layout(MeshSizes(), choice, jax.devices()).overlap == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_layout(MeshSizes(data=4, model=4), LayoutChoice(), jax.devices()),
            [
                "The sizes of the mesh axes must multiply to the number of devices.",
                "data=4 model=4 (16), devices=8",
                "mesh",
                "use sizes that multiply to 8, or --devices 16 if a CPU simulates them",
            ],
        ),
        (
            lambda: make_layout(MeshSizes(model=3), LayoutChoice(), jax.devices()),
            [
                "The sizes of the mesh axes must multiply to the number of devices.",
                "data=-1 model=3 (a multiple of 3), devices=8",
                "mesh",
                "use sizes that multiply to 8, or --devices 3 if a CPU simulates them",
            ],
        ),
        (
            lambda: make_layout(MeshSizes(model=2), LayoutChoice(preset="fsdp"), jax.devices()),
            [
                "Every mesh axis must slice something in use: otherwise, its devices repeat each other's work.",
                "model=2 with the preset fsdp",
                "mesh.model",
                "use --mesh.model 1, --layout.preset auto, or an entry such as --layout.compute.batch model",
            ],
        ),
        (
            lambda: make_layout(MeshSizes(), LayoutChoice(preset="fsdp", compute={"batch": ""}), jax.devices()),
            [
                "Every mesh axis must slice something in use: otherwise, its devices repeat each other's work.",
                "data=8 with the preset fsdp, which slices only parameters at rest over it",
                "mesh.data",
                "use an entry such as --layout.compute.batch data",
            ],
        ),
        (
            lambda: MeshSizes(model=0),
            ["The size of a mesh axis must be 1 or more, or -1.", "model=0", "model", "use 1 or more"],
        ),
        (
            lambda: MeshSizes(model=-1),
            [
                "At most one mesh axis can be -1, which takes the remaining devices.",
                "data=-1, model=-1",
                "model",
                "give data or model a size",
            ],
        ),
        (
            lambda: LayoutChoice(params={"embed": "daata"}),
            [
                "A layout entry must map a name to mesh axes.",
                "embed: daata",
                "params.embed",
                "did you mean `data` or `data_z` or `data_y`?",
            ],
        ),
        (
            lambda: LayoutChoice(preset="fsdp", overlap=("mlp",)),
            [
                "The name of an overlapped product must be sliced in use.",
                "overlap=mlp with the preset fsdp, which slices `mlp` over no mesh axis",
                "overlap",
                "use --layout.preset fsdp_tensor_sequence, or --layout.compute.mlp model",
            ],
        ),
        (
            lambda: LayoutChoice(preset="fsdp_tensor", overlap=("mlp", "heads")),
            [
                "Overlap needs `pos` or `embed` sliced in use over the mesh axis of the product.",
                "overlap=mlp with the preset fsdp_tensor: activations beside `mlp` are whole along model",
                "overlap",
                "use --layout.preset fsdp_tensor_sequence, or --layout.compute.pos model",
            ],
        ),
        (
            lambda: LayoutChoice(mode="auto", overlap=("mlp",)),
            [
                "Overlapped products need layout mode explicit.",
                "overlap=mlp with mode=auto, where the compiler places communication",
                "overlap",
                "use --layout.mode explicit",
            ],
        ),
        (
            lambda: check_names(LayoutChoice(compute={"embd": "data"}), ["embed", "mlp"]),
            [
                "A layout entry must name an axis of the model.",
                "`embd`",
                "layout.compute.embd",
                "did you mean `embed`?",
            ],
        ),
        (
            lambda: check_names(LayoutChoice(params={"batch": "data"}), ["embed", "mlp"], ["batch"]),
            [
                "A layout entry must name an axis of the model.",
                "`batch`",
                "layout.params.batch",
                "no parameter has it: use --layout.compute.batch",
            ],
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(UserError) as error:
        make()
    rule, seen, where, fix = message
    assert str(error.value) == f"{rule}\n  seen:  {seen}\n  where: {where}\n  fix:   {fix}"


@pytest.mark.parametrize(("kv_heads", "sliced"), [(4, True), (2, False), (3, False), (8, True)])
def test_key_heads_that_a_mesh_axis_does_not_divide_stay_whole(kv_heads, sliced):
    axes = {"embed": 8, "heads": 8, "kv_heads": kv_heads, "mlp": 8, "vocab": 8}
    layout = make_layout(MeshSizes(data=2, model=4), LayoutChoice(), jax.devices(), axes)
    for which in ("params", "compute"):
        assert layout.assign(("kv_heads",), which) == ((("model",) if sliced else ()),)
        assert layout.assign(("heads",), which) == (("model",),)


@pytest.mark.parametrize(
    ("experts", "sizes", "more", "at_rest"),
    [
        (8, dict(data=8), {}, (("data",), ())),
        (8, dict(data=4, data_y=2), {}, (("data", "data_y"), ())),
        (8, dict(data=4, expert=2), {}, (("expert", "data"), ())),
        (8, dict(data=2, context=4), {}, (("data", "context"), ())),
        (4, dict(data=8), {}, ((), ("data",))),  # over all of FSDP's mesh axes, or over none of them
        (4, dict(data=4, data_y=2), {}, ((), ("data", "data_y"))),
        (12, dict(data=4, expert=2), {}, (("expert",), ("data",))),
        (8, dict(data=8), {"params": {"experts": ""}}, ((), ("data",))),
        (8, dict(data=8), {"params": {"mlp": "data", "embed": ""}}, ((), ())),
        (8, dict(data=4, data_y=2), {"params": {"experts": "data_y"}}, (("data_y",), ("data",))),
        (8, dict(data=8), {"preset": "data"}, ((), ())),
    ],
)
def test_experts_are_sliced_by_number_where_the_devices_of_fsdp_divide_it(experts, sizes, more, at_rest):
    axes = {"embed": 16, "mlp": 16, "experts": experts}
    layout = make_layout(MeshSizes(**sizes), LayoutChoice(**more), jax.devices(), axes)
    assert layout.assign(("experts", "embed"), "params") == at_rest
    assert layout.assign(("experts", "embed"), "compute") == (("expert",) if "expert" in sizes else (), ())


def test_what_has_no_experts_is_sliced_by_width_beside_them():
    layout = make_layout(MeshSizes(data=8), LayoutChoice(), jax.devices(), {"embed": 16, "mlp": 16, "experts": 8})
    assert layout.assign(("mlp", "embed"), "params") == ((), ("data",))


def test_key_heads_are_sliced_where_the_user_says_so():
    choice = LayoutChoice(compute={"kv_heads": "model"})
    layout = make_layout(MeshSizes(data=2, model=4), choice, jax.devices(), {"heads": 8, "kv_heads": 2})
    assert layout.assign(("kv_heads",), "compute") == (("model",),)
    assert layout.assign(("kv_heads",), "params") == ((),)


def test_a_mesh_beside_a_replica_on_each_host_has_the_devices_of_a_host():
    devices = described_devices(target("3x2xH100"))
    choice = LayoutChoice(preset="hybrid")
    assert dict(make_layout(MeshSizes(data=2), choice, devices).mesh.shape) == {"replica": 3, "data": 2}
    with pytest.raises(UserError) as error:
        make_layout(MeshSizes(data=6), choice, devices)
    assert error.value.seen == "data=6, 3 hosts of 2 devices"
    assert error.value.fix.startswith("use sizes that multiply to 2, ")


def test_every_preset_can_be_named():
    for name in PRESETS:
        assert LayoutChoice(preset=name).maps()


@pytest.mark.parametrize(
    ("fields", "cores", "count"),
    [
        ({}, 2, 2),
        ({}, 6, 4),  # 8 sequences do not divide over 6 or 5
        ({}, 64, 8),
        ({"batch_size": 3}, 2, 1),
        ({"microbatches": 4}, 8, 2),
        ({"mesh": MeshSizes(model=2)}, 4, 4),
        ({"mesh": MeshSizes(model=4)}, 2, 1),  # too few cores: making the mesh says so
        ({"mesh": MeshSizes(data=2)}, 4, 2),
        ({"layout": LayoutChoice(preset="single")}, 4, 1),
    ],
)
def test_cpu_devices_by_default(fields, cores, count):
    assert default_count(dataclasses.replace(tiny(), **fields), cores) == count


@pytest.mark.parametrize("mine", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_run_takes_nearly_all_of_a_gpus_memory_unless_told_otherwise(monkeypatch, mine):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(mine, "0.5")
    assert len(jax.devices()) == 8  # JAX has looked, whichever test is first: `find_devices` makes no others
    find_devices(tiny())
    assert {name: value for name, value in os.environ.items() if name.endswith("MEM_FRACTION")} == {mine: "0.5"}
    monkeypatch.delenv(mine)
    find_devices(tiny())
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.95"


def test_devices_are_those_asked_for():
    assert len(jax.devices()) == 8  # likewise
    assert find_devices(dataclasses.replace(tiny(), devices=4)) == jax.devices()[:4]
    with pytest.raises(UserError) as error:
        find_devices(dataclasses.replace(tiny(), devices=16))
    assert str(error.value) == (
        "A run cannot use more devices than JAX has.\n  seen:  devices=16 where JAX has 8 (cpu)\n  where: --devices\n"
        '  fix:   use 8 or fewer, or ask for more before JAX first looks: jax.config.update("jax_num_cpu_devices", 16)'
    )


@pytest.mark.parametrize(("mine", "made"), [(-1, 2), (8, 8)])
def test_a_program_keeps_the_cpu_devices_that_it_asked_for(monkeypatch, mine, made):
    told: dict[str, object] = {}
    held = types.SimpleNamespace(jax_platforms="cpu", jax_num_cpu_devices=mine, update=told.__setitem__)
    held.jax_disable_jit = False
    monkeypatch.setattr(jax, "config", held)
    assert len(find_devices(dataclasses.replace(tiny(), devices=2))) == 2
    assert told["jax_num_cpu_devices"] == made


@pytest.mark.parametrize(
    ("error", "seen"), [(RuntimeError("Unable\nto do it"), "Unable to do it"), (AssertionError(), "none")]
)
def test_a_platform_that_is_not_there_is_told_in_one_message(monkeypatch, error, seen):
    def none():
        raise error

    monkeypatch.setattr(jax, "devices", none)
    with pytest.raises(UserError, match="JAX must have devices of the platform that it is to use") as told:
        find_devices(tiny())
    assert told.value.seen == seen
    assert told.value.where.startswith("JAX_PLATFORMS=") and "JAX_PLATFORMS to cpu" in told.value.fix


def test_a_run_is_refused_where_nothing_is_compiled():
    with jax.disable_jit(), pytest.raises(UserError, match="A run compiles its step") as error:
        find_devices(tiny())
    assert "JAX_DISABLE_JIT" in error.value.where


def test_processes_of_several_use_all_their_devices(monkeypatch):
    assert len(jax.devices()) == 8  # likewise
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert find_devices(tiny()) == find_devices(dataclasses.replace(tiny(), devices=8)) == jax.devices()
    with pytest.raises(UserError, match=r"devices=4 where each process has 8 \(cpu\)"):
        find_devices(dataclasses.replace(tiny(), devices=4))


@pytest.mark.parametrize("kind", ["ring", "exchange"])
def test_a_table_in_the_order_of_positions_is_looked_up(kind):
    """Where positions are dealt out over devices: added as it is, it would be that of others."""
    run = dataclasses.replace(tiny(), mesh=MeshSizes(data=1, context=2), layout=LayoutChoice(context=kind))
    model = model_types(run.model)
    of_positions = lambda scale: scale.rename(embed="pos")
    with_table = eqx.tree_at(lambda m: m.norm.scale, model, replace_fn=of_positions, is_leaf=is_named)
    layout = make_layout(run.mesh, run.layout, jax.devices()[:2], model_axes(run.model))
    check_on_mesh(run, layout, model)
    if kind == "exchange":
        return check_on_mesh(run, layout, with_table)
    with pytest.raises(UserError) as error:
        check_on_mesh(run, layout, with_table)
    assert str(error.value) == (
        "If positions are dealt out over devices, a table of positions must be looked up by the batch's.\n"
        "  seen:  a parameter 'pos'\n"
        "  where: `norm.scale`\n"
        "  fix:   rename its rows and look them up, as gpt2 does: take(table, 'positions', positions); or use "
        "--layout.context exchange"
    )
