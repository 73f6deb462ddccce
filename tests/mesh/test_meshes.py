"""Meshes and layouts: arrangement, assignment, and their errors."""

import dataclasses

import jax
import pytest

from trellis import Layout, MeshError, NamesError, NotationError, current_layout, make_mesh, shard
from trellis.mesh.meshes import arrange


def test_axes_are_ordered_from_rarely_to_often_talking():
    mesh = make_mesh(model=2, mine=1, data=4)
    assert mesh.axis_names == ("data", "model", "mine")
    assert dict(mesh.shape) == {"data": 4, "model": 2, "mine": 1}
    assert make_mesh(data_y=2, data=2, model=2).axis_names == ("data", "data_y", "model")  # the torus's next sides


def test_one_size_may_be_left_open():
    assert dict(make_mesh(data=-1, model=2).shape) == {"data": 4, "model": 2}


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a device as arranging needs."""

    id: int
    process_index: int
    slice_index: int = 0
    platform: str = "cuda"


def test_hosts_lie_along_the_outermost_axes():
    devices = [Device(id, id // 4) for id in range(8)]
    hosts = [[d.process_index for d in row] for row in arrange(devices[::-1], ["data", "model"], [4, 2])]
    assert hosts == [[0, 0], [0, 0], [1, 1], [1, 1]]
    hosts = [[d.process_index for d in row] for row in arrange(devices, ["data", "model"], [2, 4])]
    assert hosts == [[0] * 4, [1] * 4]


def test_axes_that_do_not_divide_over_hosts_are_refused():
    with pytest.raises(
        MeshError, match=r"must divide evenly over its hosts, got \{'data': 4, 'model': 3\} for 5 of them"
    ):
        arrange([Device(id, id % 5) for id in range(12)], ["data", "model"], [4, 3])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3, "model": 2}, r"got data=3 model=2 \(6\) for 8 devices, in make_mesh: 'data=4' fits"),
        ({"data": -1, "model": 3}, r"got data=-1 model=3 \(at least 3\) for 8 devices"),
        ({"data": -1, "model": -1}, r"at most one mesh axis can have size -1, got data=-1 model=-1"),
        (
            {"data": 0},
            r"positive integer size, or -1 for the remaining devices, got data=0, in make_mesh: correct 'data'",
        ),
        ({}, r"at least one axis, got none, in make_mesh: write make_mesh\(data=-1\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(MeshError, match=message):
        make_mesh(**sizes)


def test_unknown_axis_type():
    with pytest.raises(MeshError, match="'explicit' or 'auto', got axis_type='manual'"):
        make_mesh(data=8, axis_type="manual")


def test_earlier_entries_win_a_mesh_axis():
    mesh = make_mesh(data=4, model=2)
    layout = Layout(mesh, compute={"batch": "data", "mlp": "model", "pos": "model"})
    assert layout.assign(("batch", "pos", "embed")) == (("data",), ("model",), ())
    assert layout.assign(("batch", "pos", "mlp")) == (("data",), (), ("model",))
    assert layout.spec(("pos", "mlp")) == jax.sharding.PartitionSpec(None, "model")


def test_tuples_are_major_to_minor_and_axes_of_size_one_drop_out():
    layout = Layout(make_mesh(replica=2, data=4, model=1), compute={"batch": ("replica", "data"), "mlp": "model"})
    assert layout.assign(("batch", "mlp")) == (("replica", "data"), ())
    pairs = Layout(layout.mesh, compute=[["pos", ["data"]]], context=[["data", "ring"]])  # as a YAML file has them
    assert hash(pairs) == hash(Layout(layout.mesh, compute={"pos": "data"}, context={"data": "ring"}))


def test_layout_is_in_force_inside_with_and_nests():
    outer, inner = Layout(make_mesh(data=8)), Layout(make_mesh(data=4, model=2))
    assert current_layout() is None
    with outer:
        with inner:
            assert current_layout() is inner
            assert jax.sharding.get_abstract_mesh() == inner.mesh.abstract_mesh
        assert current_layout() is outer
        assert jax.sharding.get_abstract_mesh() == outer.mesh.abstract_mesh
    assert current_layout() is None


def test_a_layout_that_ends_inside_of_another_is_told():
    def generator():
        with Layout(make_mesh(data=8)):
            yield

    steps = generator()
    next(steps)
    with pytest.raises(MeshError, match=r"the end of one of \(data=4, model=2\) inside of one of \(data=8\)"):
        with Layout(make_mesh(data=4, model=2)):
            with pytest.raises(MeshError, match="the layout that began last must end first"):
                next(steps)
    assert current_layout() is None and jax.sharding.get_abstract_mesh().empty


def test_a_map_to_an_axis_that_is_not_there():
    with pytest.raises(MeshError, match=r"got 'mlp: model' in params, where the mesh has data: use one of these"):
        Layout(make_mesh(data=8), params={"mlp": "model"})


@pytest.mark.parametrize("written", ["data model", "data,model", "data, model"])
def test_several_axes_that_are_not_separated_by_a_slash(written):
    mesh = make_mesh(data=4, model=2)
    with pytest.raises(MeshError, match=rf"got 'batch: {written}' in compute, .*: write 'data/model'$"):
        Layout(mesh, compute={"batch": written})
    assert Layout(mesh, compute={"batch": "data/model"}).compute == (("batch", ("data", "model")),)


def test_sizes_that_do_not_divide_name_the_nearest():
    layout = Layout(make_mesh(data=4, model=2), compute={"batch": "data"})
    with pytest.raises(NotationError, match=r"got batch=6 over data=4, in 'batch/data': make batch 4 or 8"):
        layout.check(("batch", "pos"), (6, 32))


def test_dealt_over_what_is_no_mesh_axis():
    assert Layout(make_mesh(data=8), dealt="data").dealt == ("data",)
    with pytest.raises(MeshError, match="dealt out over axes of the mesh, got dealt 'pos' where the mesh has data"):
        Layout(make_mesh(data=8), dealt=("pos",))


def test_unknown_gather():
    with pytest.raises(MeshError, match="'joint' or 'per_axis', got gather='twice'"):
        Layout(make_mesh(data=8), gather="twice")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: make_mesh(data=2.0, model=4), r"a positive integer size, .* got data=2.0 model=4, in make_mesh"),
        (lambda: make_mesh(data=8, model=True), r"a positive integer size, .* got data=8 model=True, in make_mesh"),
        (lambda: make_mesh(**{"a/b": 8}), r"a name that is valid in a type, got 'a/b', in make_mesh"),
        (lambda: Layout(None), r"a layout needs a mesh, got None, in Layout"),
        (
            lambda: Layout(make_mesh(data=8), "batch"),
            r"got params='batch', in Layout: write params=\{'batch': 'data'\}",
        ),
        (lambda: Layout(make_mesh(data=8), compute=3), r"got compute=3, in Layout"),
        (lambda: Layout(make_mesh(data=8), {"embed": 3}), r"got 'embed': 3 in params, in Layout: write a name, and"),
        (lambda: Layout(make_mesh(data=8), {"embed": ["data", None]}), r"got 'embed': \['data', None\] in params"),
        (lambda: Layout(make_mesh(data=8), {"a b": "data"}), r"got 'a b': 'data' in params"),
        (lambda: Layout(make_mesh(data=8), uneven=5), r"got uneven=5, in Layout: write uneven=\('layers',\)"),
        (lambda: Layout(make_mesh(data=8), pipeline_groups=0), r"1 or more, got pipeline_groups=0, in Layout"),
        (lambda: Layout(make_mesh(data=8), pipeline_groups=None), r"1 or more, got pipeline_groups=None"),
        (lambda: Layout(make_mesh(data=8), pipeline_groups=True), r"1 or more, got pipeline_groups=True, in Layout"),
        (lambda: Layout(make_mesh(data=8), strict="no"), r"must be True or False, got strict='no', in Layout: pass"),
        (lambda: Layout(make_mesh(data=8), pipeline_microbatches=0), r"1 or more, got pipeline_microbatches=0"),
        (lambda: Layout(make_mesh(data=8), pipeline_microbatches="4"), r"got pipeline_microbatches='4', in Layout"),
    ],
)
def test_what_is_no_mesh_and_no_map_is_told(make, message):
    with pytest.raises(MeshError, match=message):
        make()


def test_a_tree_goes_where_a_map_says():
    with Layout(make_mesh(data=8)), pytest.raises(NamesError, match="got 'compuet', in shard: write 'params', 'comp"):
        shard({}, "compuet")
