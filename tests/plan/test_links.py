"""Mesh axes on the links of a target."""

import dataclasses

import numpy as np
import pytest

from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.inspect.rows import Row
from trellis.mesh import make_mesh
from trellis.plan.links import EFFICIENCY, NETWORK_EFFICIENCY, links_of


def test_axes_fill_whole_sides_of_a_torus():
    links = links_of({"data": 16, "model": 16}, target("v5e:16x16"))
    assert links.describe("data") == "ring of 16 on side 1"
    assert links.describe("model") == "ring of 16 on side 0"
    one = 2 * 50e9 * EFFICIENCY["tpu"]
    assert links.bandwidth(["model"]) == one
    assert links.bandwidth(["data", "model"]) == 2 * one  # both sides at once


def test_a_part_of_a_side_is_a_line():
    links = links_of({"data": 64, "model": 4}, target("v5e:16x16"))
    assert links.describe("model") == "line of 4 on side 0"
    assert links.bandwidth(["model"]) == 50e9 * EFFICIENCY["tpu"]


def test_small_slices_have_no_rings():
    assert links_of({"data": 16}, target("v5e:4x4")).describe("data") == "line of 4 on side 0, line of 4 on side 1"


def test_hosts_and_slices_are_joined_by_the_network():
    links = links_of({"data": 4, "model": 8}, target("4x8xH100"))
    assert links.describe("model") == "8 over NVLink"
    assert links.crosses_network(["data"]) and not links.crosses_network(["model"])
    assert links.bandwidth(["data"]) == 50e9 * NETWORK_EFFICIENCY
    whole = links_of({"data": 32}, target("4x8xH100"))
    assert whole.bandwidth(["data"]) == 8 * 50e9 * NETWORK_EFFICIENCY  # eight GPUs share the way out of a host
    slices = links_of({"replica": 2, "data": 256}, target("2xv5e:16x16"))
    assert slices.crosses_network(["replica"]) and not slices.crosses_network(["data"])


def test_the_two_cores_of_a_chip_are_the_fastest_link():
    links = links_of({"data": 64, "model": 2}, target("v7x:4x4x4"))
    assert links.describe("model") == "2 over core"
    assert links.bandwidth(["model"]) > links.bandwidth(["data"]) * 0.9


def test_reduce_scatters_over_several_sides():
    links = links_of({"data": 16, "data_y": 16}, target("v5e:16x16"))
    assert links.scatters_as_reduce(["data", "data_y"])
    assert not links.scatters_as_reduce(["data"])
    parts = links_of({"data": 4, "data_y": 4, "data_z": 4}, target("v5p:4x4x4"))
    assert parts.sides(["data", "data_y"]) == 2 and not parts.scatters_as_reduce(["data", "data_y"])
    assert parts.scatters_as_reduce(["data", "data_y", "data_z"])
    assert not links_of({"data": 8}, target("8xH100")).scatters_as_reduce(["data"])


def test_reduce_scatters_that_run_alone():
    """A v6e's SparseCores take shares of whole sixteens of tiles, and sums over all of a slice."""
    row = Row(kind="reduce-scatter", axes=("data",), what="", dtype="bf16", payload=800, wire=700, tiles=16 * 8 * 5)
    links = links_of({"data": 8, "data_y": 8}, target("v6e:8x8"))
    assert not links.scatters_alone(row)
    uneven = dataclasses.replace(row, tiles=row.tiles + 8)
    assert links.scatters_alone(uneven)
    assert not links.scatters_alone(dataclasses.replace(uneven, axes=("data", "data_y")))
    assert not links.scatters_alone(dataclasses.replace(uneven, kind="all-reduce"))
    assert not links_of({"data": 8, "data_y": 8}, target("v5e:8x8")).scatters_alone(uneven)


def test_times_grow_with_bytes_and_hops():
    links = links_of({"data": 16, "model": 16}, target("v5e:16x16"))
    assert links.seconds(90e9, ["data"]) == pytest.approx(1.0, rel=1e-4)
    assert 0 < links.seconds(0, ["data"]) < 1e-4
    assert links.seconds(1e9, []) == 0.0


@pytest.mark.parametrize(
    "mesh, fix", [({"data": 8, "model": 4}, "use data=4 model=4"), ({"data": 5, "model": 3}, "use data=16 model=1")]
)
def test_a_mesh_that_does_not_tile(mesh, fix):
    with pytest.raises(UserError) as error:
        links_of(mesh, target("v5e:4x4"))
    assert "The sizes of the mesh axes must multiply to the number of devices." in str(error.value)
    assert "on v5e:4x4 (16 devices)" in str(error.value) and fix in str(error.value)


def test_of_an_all_to_all_all_that_leaves_a_host_goes_through_the_device_s_own_share_of_the_network():
    links = links_of({"data": 4, "model": 8}, target("4x8xH100"))
    network = 50e9 * NETWORK_EFFICIENCY
    # Of 31 equal parts 24 leave the host; a gather of as many bytes is brought by all eight devices of a host.
    assert links.bandwidth(["data", "model"], "all-to-all") == pytest.approx(network * 31 / 24)
    assert links.bandwidth(["data", "model"]) == 8 * network
    assert links.bandwidth(["data"], "all-to-all") == pytest.approx(network)
    assert links.bandwidth(["model"], "all-to-all") == pytest.approx(links.bandwidth(["model"]))
    assert links.seconds(network, ["data"], "all-to-all") == pytest.approx(1.0, rel=1e-4)
    slices = links_of({"replica": 2, "data": 256}, target("2xv5e:16x16"))
    half = 1 / (slices.target.chip.network_bandwidth * NETWORK_EFFICIENCY) / 2
    assert slices.bandwidth(["replica", "data"], "all-to-all") == pytest.approx(511 / 512 / half)


@pytest.mark.parametrize(
    ("mesh", "on", "axes", "seconds"),
    [
        # One byte a device: half of what half of the devices send crosses the middle of a side, over its links.
        ({"data": 16, "model": 16}, "v5e:16x16", ["model"], 16 / 4 / 2),
        ({"data": 16, "model": 16}, "v5e:16x16", ["data", "model"], 16 / 4 / 2),  # both sides at once
        ({"data": 64, "model": 4}, "v5e:16x16", ["model"], 4 / 4),
        ({"data": 64, "model": 4}, "v5e:16x16", ["data", "model"], 16 / 4 / 2),  # both axes are on one of the sides
        ({"data": 8, "model": 8}, "v6e:8x8", ["model"], 8 / 4),  # no closed ring
    ],
)
def test_of_an_all_to_all_the_middle_of_a_side_carries_the_most(mesh, on, axes, seconds):
    links, link = links_of(mesh, target(on)), 0.9 * target(on).chip.link_bandwidth
    devices = 1
    for axis in axes:
        devices *= mesh[axis]
    assert links.bandwidth(axes, "all-to-all") == pytest.approx(link / seconds * (devices - 1) / devices)


def test_a_permute_goes_one_way_and_as_fast_as_its_slowest_link():
    links = links_of({"data": 32}, target("4x8xH100"))
    assert links.bandwidth(["data"], "permute") == 50e9 * NETWORK_EFFICIENCY
    ring = links_of({"data": 16, "model": 16}, target("v5e:16x16"))
    assert ring.bandwidth(["model"], "permute") == ring.bandwidth(["model"]) / 2


def test_devices_that_are_apart_share_links_with_those_between():
    links = links_of({"data": 64, "model": 4}, target("v5e:16x16"))
    assert links.describe("data") == "ring of 4 on side 0 (4 links apart), ring of 16 on side 1"
    one = 2 * 50e9 * EFFICIENCY["tpu"]
    assert links.bandwidth(["data"]) == pytest.approx(one * (1 + 1 / 4))
    assert links.bandwidth(["data", "model"]) == pytest.approx(2 * one)  # together they are two whole rings


@pytest.mark.parametrize(
    ("on", "sizes", "links"),
    [
        ("v5e:2x4", {"data": 2, "model": 4}, {"data": 0.5, "model": 2}),  # squares of four, pairs far apart
        ("v5e:2x4", {"data": 4, "model": 2}, {"data": 1, "model": 1}),
        ("v5e:8x16", {"data": 16, "context": 2, "model": 4}, {"data": 2, "context": 1 / 4, "model": 1}),
        ("v5p:4x4x8", {"data": 32, "context": 2, "model": 2}, {"data": 4, "context": 1, "model": 1}),
    ],
)
def test_axes_are_on_the_sides_that_the_mesh_gives_them(on, sizes, links):
    found = links_of(sizes, target(on))
    one = target(on).chip.link_bandwidth * EFFICIENCY["tpu"]
    assert {axis: found.bandwidth([axis]) / one for axis in sizes} == pytest.approx(links)


@pytest.mark.parametrize(
    ("on", "sizes"),
    [
        ("4xv5e:4x4", {"replica": 2, "data": 32}),
        ("8xv5e:2x4", {"replica": 2, "data": 8, "model": 4}),
        ("6xv5e:2x4", {"replica": 3, "stage": 2, "data": 8}),
        ("3xv5e:4x4", {"data": 16, "model": 3}),
        ("2xv7x:2x2x1", {"data": 4, "model": 4}),
    ],
)
def test_slices_are_crossed_by_the_axes_that_cross_them_in_the_mesh(on, sizes):
    mesh = make_mesh(described_devices(target(on)), **sizes)
    links = links_of(dict(mesh.shape), target(on))
    for number, axis in enumerate(mesh.shape):
        crossed = {device.slice_index for device in np.moveaxis(mesh.devices, number, 0).reshape(sizes[axis], -1)[:, 0]}
        network = [part.size for part in links.parts[axis] if part.where == "network"]
        assert network == [len(crossed)] * (len(crossed) > 1)
        assert np.prod([part.size for part in links.parts[axis]]) == sizes[axis]
