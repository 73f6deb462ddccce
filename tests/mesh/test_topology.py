"""Devices of hardware that is not here, and every way to ask for hardware that does not exist."""

import importlib.util

import jax
import pytest

from trellis.mesh import topology
from trellis.mesh.topology import (
    TopologyError,
    gpu_devices,
    parse_slice,
    slice_devices,
    slice_names,
    target_devices,
)


@pytest.mark.parametrize(
    ("name", "devices", "kind"),
    [
        ("v5e:2x4", 8, "TPU v5 lite"),
        ("v5e:1x1", 1, "TPU v5 lite"),
        ("v5p:2x2x2", 8, "TPU v5"),
        ("v5p:4x4x4", 64, "TPU v5"),
        ("v6e-8", 8, "TPU v6 lite"),
        ("v4:2x2x2", 8, "TPU v4"),
        ("tpu7x:2x2x2", 16, "TPU7x"),
        ("v3:4x4", 32, "TPU v3"),
        ("v2:2x2", 8, "TPU v2"),
    ],
)
def test_slices_have_their_devices(name, devices, kind):
    found = slice_devices(name)
    assert len(found) == devices == parse_slice(name).num_devices
    assert {device.device_kind for device in found} == {kind}


def test_every_name_parses_and_prints_back():
    for name in slice_names():
        assert str(parse_slice(name)) == name


def test_several_slices_are_numbered():
    found = slice_devices("v5e:2x4", num_slices=2)
    assert [device.slice_index for device in found] == [0] * 8 + [1] * 8
    assert len(target_devices("2*v5e:2x4")) == len(target_devices("2xv5e:2x4")) == 16


def test_the_same_slice_twice_is_the_same_devices():
    assert slice_devices("v5e:2x4") == slice_devices("v5e-8")


def test_names_by_count_take_the_cube_nearest_to_a_cube():
    assert str(parse_slice("v5p-128")) == "v5p:4x4x4"
    assert str(parse_slice("v5p-512")) == "v5p:4x8x8"
    assert str(parse_slice("v5e-256")) == "v5e:16x16"


def test_wrap_around_links():
    assert parse_slice("v5e:8x8").wrap == (False, False)
    assert parse_slice("v5e:16x16").wrap == (True, True)
    assert parse_slice("v5p:2x4x4").wrap == (False,) * 3
    assert parse_slice("v5p:4x4x8").wrap == (True,) * 3


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v5e:5x5", "v5e:4x4"),
        ("v5e:2x6", "v5e:2x4"),
        ("v5p:3x3x3", "v5p:2x4x4"),
        ("v5e-12", "v5e-8"),
        ("v5p", "v5p:2x2x1"),
        ("v5:4x4", "v5e:4x4"),
        ("TPUV9", "tpu7x:2x4x4"),
        ("abc", "v2:8x8, v3:8x8"),
    ],
)
def test_unknown_slice_offers_near_ones(name, near):
    with pytest.raises(TopologyError, match=f"there is no TPU slice '{name}'.*'v5e:4x4' or 'v5p:4x4x4'.*{near}"):
        slice_devices(name)


def test_no_slices():
    with pytest.raises(TopologyError, match=r"at least one slice, got num_slices=0 of 'v5e:2x4': pass 1 or more"):
        slice_devices("v5e:2x4", num_slices=0)


def test_libtpu_absent(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(TopologyError, match=r"'v5e:2x4' needs libtpu.*not installed.*pip install 'trellis\[plan\]'"):
        slice_devices("v5e:2x4")


def test_cuda_plugin_absent(monkeypatch):
    monkeypatch.setattr(topology, "_cuda_plugin", lambda: None)
    with pytest.raises(TopologyError, match=rf"'h100' needs JAX's CUDA plugin.*jax\[cuda13\]=={jax.__version__}"):
        gpu_devices("h100")


def test_unknown_gpu():
    with pytest.raises(TopologyError, match=r"there is no GPU 'h10' in the table \(a100-40gb, a100.*Similar: h100"):
        gpu_devices("h10")


def test_gpu_counts(monkeypatch):
    with pytest.raises(TopologyError, match="at least one device, got hosts=0, per_host=8: pass 1 or more"):
        gpu_devices("h100", hosts=0)
    asked = []
    monkeypatch.setattr(topology, "gpu_devices", lambda *args: asked.append(args))
    target_devices("h100:8")
    target_devices("a100-40gb:4x8")
    assert asked == [("h100", 1, 8), ("a100-40gb", 4, 8)]
    target_devices("8xH100")
    target_devices("4x8xA100-40GB")
    assert asked[2:] == asked[:2]
    with pytest.raises(TopologyError, match="'h100' is not a GPU target: write '8xh100' for one node"):
        target_devices("h100")
    with pytest.raises(TopologyError, match=r"'x\*v5e:2x4' is not a target: write '2xv5e:16x16'"):
        target_devices("x*v5e:2x4")


def test_target_configs_name_the_gpu():
    for gpu in topology._GPUS.values():
        text = topology._target_config(gpu)
        assert text.count("{") == text.count("}")
        assert f"device_memory_size: {gpu.memory_bytes}" in text


def test_a_generation_that_is_none():
    with pytest.raises(TopologyError, match="a TPU generation must be one of .*, got 'v55'"):
        slice_names("v55")
