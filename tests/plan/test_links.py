"""Mesh axes on the links of a target."""

import pytest

from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.plan.links import EFFICIENCY, NETWORK_EFFICIENCY, place


def test_axes_fill_whole_sides_of_a_torus():
    links = place({"data": 16, "model": 16}, target("v5e:16x16"))
    assert links.describe("data") == "ring of 16 on side 0"
    assert links.describe("model") == "ring of 16 on side 1"
    one = 2 * 50e9 * EFFICIENCY["tpu"]
    assert links.bandwidth(["model"]) == one
    assert links.bandwidth(["data", "model"]) == 2 * one  # both sides at once


def test_a_part_of_a_side_is_a_line():
    links = place({"data": 64, "model": 4}, target("v5e:16x16"))
    assert links.describe("model") == "line of 4 on side 1"
    assert links.bandwidth(["model"]) == 50e9 * EFFICIENCY["tpu"]


def test_small_slices_have_no_rings():
    assert place({"data": 16}, target("v5e:4x4")).describe("data") == "line of 4 on side 0, line of 4 on side 1"


def test_hosts_and_slices_are_joined_by_the_network():
    links = place({"data": 4, "model": 8}, target("4x8xH100"))
    assert links.describe("model") == "8 over NVLink"
    assert links.crosses_network(["data"]) and not links.crosses_network(["model"])
    assert links.bandwidth(["data"]) == 50e9 * NETWORK_EFFICIENCY
    whole = place({"data": 32}, target("4x8xH100"))
    assert whole.bandwidth(["data"]) == 8 * 50e9 * NETWORK_EFFICIENCY  # eight GPUs share the way out of a host
    slices = place({"replica": 2, "data": 256}, target("2xv5e:16x16"))
    assert slices.crosses_network(["replica"]) and not slices.crosses_network(["data"])


def test_the_two_cores_of_a_chip_are_the_fastest_link():
    links = place({"data": 64, "model": 2}, target("v7x:4x4x4"))
    assert links.describe("model") == "2 over core"
    assert links.bandwidth(["model"]) > links.bandwidth(["data"]) * 0.9


def test_reduce_scatters_over_several_sides():
    links = place({"data": 16, "data_y": 16}, target("v5e:16x16"))
    assert links.scatters_as_reduce(["data", "data_y"])
    assert not links.scatters_as_reduce(["data"])
    assert not place({"data": 8}, target("8xH100")).scatters_as_reduce(["data"])


def test_times_grow_with_bytes_and_hops():
    links = place({"data": 16, "model": 16}, target("v5e:16x16"))
    assert links.seconds(90e9, ["data"]) == pytest.approx(1.0, rel=1e-4)
    assert 0 < links.seconds(0, ["data"]) < 1e-4
    assert links.seconds(1e9, []) == 0.0


@pytest.mark.parametrize(
    "mesh, fix", [({"data": 8, "model": 4}, "use data=4 model=4"), ({"data": 5, "model": 3}, "use data=16 model=1")]
)
def test_a_mesh_that_does_not_tile(mesh, fix):
    with pytest.raises(UserError) as error:
        place(mesh, target("v5e:4x4"))
    assert "The axes of a mesh multiply to the number of devices." in str(error.value)
    assert "on v5e:4x4 (16 devices)" in str(error.value) and fix in str(error.value)
