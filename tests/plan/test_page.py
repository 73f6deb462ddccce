"""A plan's page and JSON have what its text has."""

import dataclasses
import functools
import html

import pytest

from tests.plan.small import small
from trellis.hardware.chips import target
from trellis.pages.plan import page
from trellis.pages.plan_pictures import slice_picture
from trellis.plan.candidate import Candidate
from trellis.plan.frontier import NOTHING_FITS, OWN_WINS, why_won
from trellis.plan.links import links_of
from trellis.plan.quick import Plan, quick_plan
from trellis.plan.search import Found
from trellis.plan.sketch import Sketch
from trellis.plan.text import as_json

pytestmark = pytest.mark.slow
_WHERE = target("v5e:2x2")


@functools.cache
def planned(model: str) -> Plan:
    return quick_plan(small(mesh__model=model), _WHERE)


def found(*models: str) -> Found:
    """A search that met these sizes of the mesh axis `model`; the first wins."""
    able = [
        Candidate(small(mesh__model=model), {} if model == "1" else {"mesh.model": model}, Sketch(0, 0), planned(model))
        for model in models
    ]
    return Found(_WHERE, len(able), tuple(able), tuple(able), able[0] if able else None)


def test_a_page_of_a_search_says_what_came_of_it():
    own, other = found("1", "2"), found("2", "1")
    assert "--mesh.model 2</code>" in page(planned("1"), found=other)
    for search in (own, other):
        assert why_won(search) and f">{why_won(search).capitalize()}." in page(planned("1"), found=search)
    assert f"{html.escape(OWN_WINS[1:])}." in page(planned("1"), found=own)
    assert f"{NOTHING_FITS[1:]}." in page(planned("1"), found=dataclasses.replace(own, winner=None))


def test_json_has_the_layers_of_uneven_stages_and_why_attention_has_no_kernel():
    values = as_json(dataclasses.replace(planned("1"), layers=(2, 1), refused=("a length of 100",)))
    assert (values["layers"], values["refused"]) == ([2, 1], ["a length of 100"])


@pytest.mark.parametrize("on, arrows", [("v5e:4x8", 2), ("v5p:2x4x4", 3)])
def test_the_picture_of_a_slice_shows_where_mesh_axes_run(on, arrows):
    mesh = {"data": 8, "model": 4}
    links = links_of(mesh, target(on))
    words = slice_picture(dataclasses.replace(planned("1"), target=target(on), mesh=mesh, links=links))
    assert words.count('class="axis"') == arrows  # one along each side
    for axis in mesh:
        assert f">{axis}</text>" in words
        for part in links.parts[axis]:
            assert f">{axis}: {part}, {part.bandwidth / 1e9:.0f} GB/s into a device</text>" in words
