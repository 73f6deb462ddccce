"""Runs whose products are made in eight bits: the same on every layout, and to the bit where they are resumed."""

import json
import re
import shutil

import pytest

from tests.train.small import curve, trellis

WIDE = ("--model.embed", "64")  # tiles of 32 lie on one device of two
MESH = ("--layout.preset", "fsdp_tensor", "--devices", "4", "--mesh.model", "2")
NARROW = (
    "--precision.products.attention",
    "int8",
    "--precision.products.mlp",
    "fp8",
    "--precision.products.vocab",
    "fp8",
)


def trained(capsys, run_file, folder, *options):
    code, _, said = trellis(capsys, "train", run_file, "--run-dir", folder, *options)
    assert code == 0, said
    return curve(folder)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.slow
def test_a_narrow_run_is_the_same_on_every_layout_and_when_resumed(run_file, tmp_path, capsys):
    one = ("--layout.preset", "single", *NARROW)
    whole = trained(capsys, run_file, tmp_path / "one", *one)
    assert trained(capsys, run_file, tmp_path / "parts", *one, "--until", "3") == whole[:3]
    assert trained(capsys, run_file, tmp_path / "parts", *one) == whole

    many = trained(capsys, run_file, tmp_path / "many", *MESH, *NARROW)
    plain = trained(capsys, run_file, tmp_path / "plain", "--layout.preset", "single")
    assert many[:2] == pytest.approx(whole[:2], rel=1e-5)
    assert many == pytest.approx(whole, rel=5e-3)  # a last bit that sums in another order may round to another number
    assert 1e-4 < abs(whole[-1] / plain[-1] - 1) < 0.02  # narrow, and near


@pytest.mark.usefixtures("own_cache")
@pytest.mark.slow
def test_layers_that_come_first_are_narrow_too(run_file, tmp_path, capsys):
    """A Gemma's and a DeepSeek's first layers are a stack of their own; their delayed scales are, too."""
    gemma = ("--model.family", "gemma3", "--model.layers", "3", "--model.global_every", "2", "--model.window", "8")
    gemma = (*gemma, "--model.query_scale", "16", "--steps", "4")
    first = (*gemma, "--precision.products.first_layers", "fp8", "--precision.amax_history", "2")
    plain = trained(capsys, run_file, tmp_path / "plain", "--layout.preset", "single", *gemma)
    whole = trained(capsys, run_file, tmp_path / "one", "--layout.preset", "single", *first)
    many = trained(capsys, run_file, tmp_path / "many", *MESH, *first)
    assert many[:2] == pytest.approx(whole[:2], rel=1e-5)
    assert many == pytest.approx(whole, rel=5e-3)  # a last bit may round a number to another one
    assert 1e-6 < abs(whole[-1] / plain[-1] - 1) < 0.02  # narrow, and near


@pytest.mark.usefixtures("own_cache")
@pytest.mark.slow
def test_a_run_in_four_bits_is_the_same_on_every_layout_and_when_resumed(run_file, tmp_path, capsys):
    # Blocks of 16 positions, and of 16 numbers of a head, lie on one device.
    four = ("--precision.products.attention", "nvfp4", "--precision.products.mlp", "nvfp4", *WIDE)
    four = (*four, "--model.layers", "1", "--steps", "4")
    one = ("--layout.preset", "single", *four)
    whole = trained(capsys, run_file, tmp_path / "one", *one)
    assert trained(capsys, run_file, tmp_path / "parts", *one, "--until", "2") == whole[:2]
    assert trained(capsys, run_file, tmp_path / "parts", *one) == whole
    many = trained(capsys, run_file, tmp_path / "many", *MESH, *four)
    assert many[0] == pytest.approx(whole[0], rel=1e-5)
    assert many[:3] == pytest.approx(whole[:3], rel=5e-3)  # a last bit may round a number to another one


@pytest.mark.parametrize(
    "devices, options, said",
    [
        ("8xH100", (), "nvfp4 on NVIDIA H100"),
        ("v5e:2x4", (), "nvfp4 on TPU v5"),
        ("8xB200", ("--mesh.stage", "2"), "nvfp4 with mesh.stage=2"),
        ("8xB200", ("--precision.products.attention", "nvfp8"), "nvfp8"),
    ],
)
def test_four_bits_are_refused_where_there_are_no_units_for_them(devices, options, said, capsys):
    words = ("plan", "tiny", "--on", devices, "--precision.products.mlp", "nvfp4", *options)
    code, _, error = trellis(capsys, *words)
    assert code == 2 and said in error, error


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "part, options, said",
    [
        ("mlp", (), "mxfp8 for `layers.block.mlp.gate`: embed=64 in tiles of 32 over data=8"),
        ("mlp", ("--microbatches", "2"), None),  # gathered first, whole
        (
            "heads",
            ("--layout.preset", "auto", "--mesh.context", "4"),
            "attention.q`: embed=64 in tiles of 32 over data=2 x context=4",
        ),
        (
            "vocab",
            ("--layout.preset", "auto", "--mesh.context", "4"),
            "mxfp8 for `embedding`: pos=64 in tiles of 32 over context=4",
        ),
        ("vocab", ("--model.tie_embeddings", "false"), "mxfp8 for `head`: embed=64 in tiles of 32 over data=8"),
        ("vocab", (), None),  # tied: moved whole, once for both of its uses
    ],
)
def test_layouts_that_cut_a_tile_are_refused_before_anything_is_traced(part, options, said, capsys):
    words = ("plan", "tiny", "--on", "8xB200", f"--precision.products.{part}", "mxfp8", *options)
    code, _, error = trellis(capsys, *words)
    assert (code, error) == (0, "") if said is None else code == 2 and said in error and "precision.products" in error


def test_a_router_is_refused_and_not_suggested(capsys):
    mixture = ("--model.family", "mixtral", "--model.experts", "4", "--model.experts_per_token", "2")
    code, _, said = trellis(capsys, "plan", "tiny", "--on", "1xH100", *mixture, "--precision.products.router", "fp8")
    assert code == 2 and "`router`, which matches no weight that multiplies" in said
    fix = said.partition("fix:")[2]
    assert "block.mlp.gate" in fix and "router" not in fix


@pytest.mark.usefixtures("own_cache")
@pytest.mark.slow
def test_moments_in_eight_bits_are_checkpointed_sharded_and_resumed(run_file, tmp_path, capsys):
    narrow = (*WIDE, "--precision.moments", "{attention.o: mxfp8, mlp.up: mxfp8, mlp.down: mxfp8, embedding: mxfp8}")
    one = ("--layout.preset", "single", *narrow)
    whole = trained(capsys, run_file, tmp_path / "one", *one)
    assert trained(capsys, run_file, tmp_path / "parts", *one, "--until", "3") == whole[:3]
    shutil.copytree(tmp_path / "parts", tmp_path / "many")
    assert trained(capsys, run_file, tmp_path / "parts", *one) == whole
    many = (*MESH, *narrow)
    found = trained(capsys, run_file, tmp_path / "many", *many)
    assert found[3] == pytest.approx(whole[3], rel=1e-6)  # from the same bits, on another mesh
    assert found == pytest.approx(whole, rel=5e-3)
    lines = json.loads((tmp_path / "many/checkpoints/step-00000006/manifest.json").read_text())["entries"]
    up = {name.rsplit("/", 1)[1]: line for name, line in lines.items() if "/mu/layers/" in name and "/up/" in name}
    assert up["values"]["dtype"] == "float8_e4m3fn" and up["values"]["names"] == ["layers", "embed", "mlp"]
    assert up["scales"]["dtype"] == "float8_e8m0fnu" and up["scales"]["names"] == ["layers", "embed", "mlp_block"]
    plain = trained(capsys, run_file, tmp_path / "plain", "--layout.preset", "single", *WIDE)
    assert 1e-6 < abs(whole[-1] / plain[-1] - 1) < 0.02


@pytest.mark.slow
def test_moments_that_an_optimizer_does_not_keep_are_refused(run_file, tmp_path, capsys):
    words = ("train", run_file, "--run-dir", tmp_path / "run", "--precision.moments.mlp", "mxfp8")
    code, _, said = trellis(capsys, *words, "--optimizer", "{kind: adafactor, learning_rate: 0.01}")
    assert code == 2 and "`mlp` with adafactor, which keeps none of it" in said
    code, _, said = trellis(capsys, *words[:-2], "--precision.moments.norm", "mxfp8")
    assert code == 2 and "`norm` with adamw, which keeps none of it" in said
    code, _, said = trellis(capsys, *words[:-2], "--precision.moments.mpl", "mxfp8")
    assert code == 2 and "did you mean" in said


@pytest.mark.usefixtures("own_cache")
@pytest.mark.slow
def test_what_leaves_the_range_is_named_with_its_step_and_layer(run_file, tmp_path, capsys):
    words = ("--layout.preset", "single", "--precision.moments.mlp", "mxfp8", "--optimizer.learning_rate", "1e38")
    code, _, said = trellis(capsys, "train", run_file, "--run-dir", tmp_path, *words)
    assert code == 3
    assert re.search("the first that was not finite: the gradient of `layers.*` of layer 1, at step 2", said), said


@pytest.mark.usefixtures("own_cache")
@pytest.mark.slow
def test_updates_at_random_are_the_same_when_resumed(run_file, tmp_path, capsys):
    words = ("--layout.preset", "single", "--precision.params", "bfloat16", "--precision.updates", "random")
    whole = trained(capsys, run_file, tmp_path / "one", *words)
    assert trained(capsys, run_file, tmp_path / "parts", *words, "--until", "3") == whole[:3]
    assert trained(capsys, run_file, tmp_path / "parts", *words) == whole
    nearest = trained(capsys, run_file, tmp_path / "nearest", *words[:4])
    assert nearest[0] == whole[0] and nearest[-1] != whole[-1]
