"""Pictures of where arrays are."""

import re
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trellis.inspect import show

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


class Layout:
    """What `show` reads of a layout."""

    mesh = MESH
    params = (("embed", ("data",)), ("mlp", ("model",)))
    compute = (("batch", ("data", "model")),)


def placed(shape, *partitions, **states):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, P(*partitions, **states)))


def test_an_array_on_two_mesh_axes():
    picture = show(placed((8, 32), "data", "model"), "batch mlp")
    assert picture.text() == "\n".join(
        [
            "f32[batch/data mlp/model]",
            "           model 0     model 1",
            "        +-----------+-----------+",
            "data 0  | device 0  | device 1  |",
            "        | batch 0:2 | batch 0:2 |",
            "        | mlp 0:16  | mlp 16:32 |",
            "        +-----------+-----------+",
            "data 1  | device 2  | device 3  |",
            "        | batch 2:4 | batch 2:4 |",
            "        | mlp 0:16  | mlp 16:32 |",
            "        +-----------+-----------+",
            "data 2  | device 4  | device 5  |",
            "        | batch 4:6 | batch 4:6 |",
            "        | mlp 0:16  | mlp 16:32 |",
            "        +-----------+-----------+",
            "data 3  | device 6  | device 7  |",
            "        | batch 6:8 | batch 6:8 |",
            "        | mlp 0:16  | mlp 16:32 |",
            "        +-----------+-----------+",
            "  data (4): slices batch",
            "  model (2): slices mlp",
        ]
    )


def test_what_a_picture_says_is_what_the_devices_hold():
    x = jax.device_put(jnp.arange(64.0).reshape(16, 4), NamedSharding(MESH, P(("model", "data"), None)))
    said = {}
    for row in show(x, "rows columns").panels[0].boxes:
        for box in row:
            said[int(box.label.removeprefix("device "))] = box.bars[0].words()
    held = {shard.device.id: f"rows {shard.index[0].start}:{shard.index[0].stop}" for shard in x.addressable_shards}
    assert said == held


def test_copies_have_one_color_and_parts_have_others():
    text = show(placed((8, 32), "data", None)).text(color=True)
    assert len(set(re.findall(r"48;2;(\d+;\d+;\d+)m", text))) == 4


def test_states_are_named():
    text = show(placed((8, 32), None, None, unreduced={"data"}, reduced={"model"})).text()
    assert "f32[dim0 dim1 +data ~model]" in text
    assert "data (4): a partial sum on each device along it" in text
    assert "model (2): a copy on each device along it, whose gradient arrives as a partial sum" in text


def test_a_layout_has_two_panels():
    text = show(Layout()).text()
    assert "parameters, at rest" in text and "in use" in text
    assert "embed 4/4" in text and "batch 8/8" in text


def test_a_whole_array_and_no_mesh():
    assert "model (2): the same on each device along it" in show(placed((8, 32))).text()
    assert "not on a mesh" in show(jnp.zeros(3)).text()


def test_a_large_mesh_is_cut_and_says_so():
    mesh = AbstractMesh((32, 16), ("data", "model"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("data", "model")))
    assert "showing 128 of 512 devices" in show(x).text()


def test_svg_is_well_formed_and_fills_the_parts_held(tmp_path):
    picture = show(placed((8, 32), "data", "model"), "batch <mlp>")
    picture.save(tmp_path / "picture.svg")
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "device 7" in words and "<mlp> 16:32" in words
    quarters = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("width") == f"{134 / 4:.1f}"]
    assert len(quarters) == 8
    assert picture._repr_svg_() == picture.svg()


def test_what_cannot_be_drawn():
    with pytest.raises(
        TypeError, match="show can draw only arrays and layouts, got str, in show: pass an array, or a Layout"
    ):
        show("batch")
    with pytest.raises(TypeError, match=r"one name for each dimension, got 1 names for shape \(8, 32\)"):
        show(placed((8, 32)), "batch")
