"""Hardware by name, near names, and a user's own chips."""

import pytest

from trellis.errors import UserError
from trellis.hardware.chips import chips, target
from trellis.hardware.described import described_devices
from trellis.plan.compile import compiler_devices


@pytest.mark.parametrize(
    "name, devices, compiler",
    [
        ("v5e:16x16", 256, "v5e:16x16"),
        ("v5p:4x4x8", 128, "v5p:4x4x8"),
        ("v5p-128", 64, "v5p:4x4x4"),
        ("v5litepod-16", 16, "v5e:4x4"),
        ("2xv5e:16x16", 512, "2*v5e:16x16"),
        ("v7x:4x4x4", 128, "tpu7x:4x4x4"),
        ("8xA100", 8, "a100:1x8"),
        ("4x8xH100", 32, "h100:4x8"),
        ("8xh200", 8, "h200:1x8"),
        ("8xB200", 8, "b200:1x8"),
    ],
)
def test_names(name, devices, compiler):
    found = target(name)
    assert found.num_devices == devices
    assert found.compiler_name == compiler
    assert len(described_devices(found)) == devices


def test_every_chip_has_a_source_and_positive_rates():
    for chip in chips().values():
        assert len(chip.source) > 20, chip.name
        assert min(chip.bf16_flops, chip.hbm_bytes, chip.hbm_bandwidth, chip.link_bandwidth) > 0, chip.name
        assert chip.fp8_flops >= chip.bf16_flops


def test_published_peaks():
    known = chips()
    assert known["v5e"].bf16_flops == 197e12
    assert known["h100"].bf16_flops == 989e12
    assert known["v7x"].bf16_flops == 2307e12 / 2  # a device is half a chip
    assert known["v5e"].clock == pytest.approx(1.5e9, rel=0.01)


@pytest.mark.parametrize(
    "name, near",
    [
        ("v5e:16x17", "v5e:16x16, v5e:8x16"),
        ("8xH10", "Similar: `8xh100`"),
        ("H200", "Similar: `8xh200`, `8xh100`"),
        ("v5:4x4", "Similar: `v5p:4x4x4`, `v5e:4x4`"),
        ("v9z", "Similar: `v4:4x4x4`, `v5e:4x4`, `v5p:4x4x4`, `v6e:4x4`, `v7x:4x4x4`, `8xa100`, `8xa100-40gb`"),
    ],
)
def test_unknown_targets_offer_near_names(name, near):
    with pytest.raises(UserError) as error:
        target(name)
    message = str(error.value)
    assert message.startswith("A target must be the name of a TPU slice or of GPU nodes.")
    assert f"seen:  {name}" in message and "where: --on" in message
    assert near in message


@pytest.mark.parametrize("name", ["99999999xh100", "40000x8xh100", "2000xv5e:16x16"])
def test_targets_of_more_devices_than_can_be_looked_at(name):
    with pytest.raises(UserError, match="A target must have at most 262,144 devices"):
        target(name)


def test_own_chips(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("h100-pcie: {like: h100, bf16_tflops: 756, link_gbps: 64, source: a data sheet of mine}\n")
    found = target("2x4xh100-pcie", str(file))
    assert found.shape == (2, 4)
    assert found.chip.bf16_flops == 756e12
    assert found.chip.hbm_bandwidth == chips()["h100"].hbm_bandwidth
    with pytest.raises(UserError, match="seen:  h100-pcie, a chip of a table of your own"):
        compiler_devices(found)


def test_own_chips_may_be_like_later_ones_of_their_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("a: {like: b, hbm_gbps: 2}\nb: {like: h100, hbm_gib: 3}\nh100: {like: h100, bf16_tflops: 7}")
    found = chips(str(file))
    assert (found["a"].hbm_bandwidth, found["a"].hbm_bytes, found["a"].bf16_flops) == (2e9, 3 * 2**30, 7e12)
    assert found["h100"].hbm_bytes == chips()["h100"].hbm_bytes


@pytest.mark.parametrize(
    "text, said",
    [
        ("a: {like: b}\nb: {like: a}", "A chip cannot be like one that is like it.\n  seen:  b.like: a"),
        ("a: {like: a}", "`like` must name a known chip."),
        ("a: {like: h100, bf16_tflop: 3}", "did you mean `bf16_tflops`"),
        ("a: {like: h10}", "did you mean `h100`"),
        ("123: {like: h100}", "A chip's name must be a letter, and then letters, digits and hyphens"),
        ("my_chip: {like: h100}", "seen:  `my_chip`"),
        ("a: {kind: gpu, bf16_tflops: 3}", "add `hbm_gib`"),
        ("a: {like: h100, hbm_gbps: -2}", "A rate must be a positive number."),
        ("a: {like: h100, bf16_tflops: .nan}", "A rate must be a positive number."),
        ("a: {like: h100, link_gbps: .inf}", "A rate must be a positive number."),
        ("a: {like: v7x, devices_per_chip: 1.5}", "A count must be a whole number."),
        ("a: {like: h100, matmul_efficiency: 90}", "A share must be at most 1."),
        ("a: {like: h100, kind: npu}", "write tpu or gpu"),
        ("a: {like: h100, overlap: [all]}", "write overlap: [gathers, reductions]"),
        ("a: {like: h100, overlap: gathers}", "seen:  a.overlap: gathers\n"),
        ("a: {like: [h100]}", "`like` must name a known chip."),
        ("a: {like: h100, bf16_tflops: null}", "add `bf16_tflops`"),
        ("a: {like: h100, bf16_tflops: 1e3}", "A rate must be a number, as YAML reads one."),
        ("a: {like: h100, hbm_gib: 1.0e+300}", "A rate must be a positive number."),
        ("a: {like: h100, links: 3}", "Only a TPU has sides of a torus."),
        ("a: {like: v5e, kind: gpu}", "Only a TPU has sides of a torus."),
        ("a: {like: v5e, links: 4}", "A torus must have at most 3 sides."),
        ("a: {like: v5p, devices_per_chip: 2}", "Only chips like v7x are several JAX devices."),
        ("a: {like: h100, devices_per_chip: 2}", "Only chips like v7x are several JAX devices."),
        ("- 3", "A hardware file must map names to entries."),
        ("mine: 3", "A hardware file must map names to entries.\n  seen:  mine: 3"),
        ("a: [", "A hardware file must be readable YAML."),
    ],
)
def test_own_chips_that_are_wrong(tmp_path, text, said):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        target("8xh100", str(file))
    assert said in str(error.value) and f"where: {file}" in str(error.value)


def test_own_chips_come_before_the_clouds_names_of_others(tmp_path):
    file = tmp_path / "mine.yaml"
    mine = "v5litepod: {like: v5e, hbm_gib: 3}", "my-v7x: {like: v7x}", "gpu: {like: v5e, kind: gpu, links: null}"
    file.write_text("\n".join(mine))
    assert target("v5litepod:2x2", str(file)).chip.hbm_bytes == 3 * 2**30
    assert target("v5litepod-4").chip.name == "v5e"
    assert len(described_devices(target("my-v7x:2x2x1", str(file)))) == 8
    assert target("2x8xgpu", str(file)).chip.torus == 0


def test_a_missing_file():
    with pytest.raises(UserError, match="A hardware file must be readable YAML."):
        chips("no-such-file.yaml")
