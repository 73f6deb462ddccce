"""The picture of a compiled step: well-formed, complete, and in the order in which things run."""

import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from trellis.inspect.graph import step_svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def boxes():
    """Every box of a step that has a product, a loop and a collective: (kind, left, top, right, bottom, title)."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    everywhere, sliced = NamedSharding(mesh, P()), NamedSharding(mesh, P("data", None))

    def step(w, x):
        hidden, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)
        return jax.reshard(hidden, P()) * 2 < 1

    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((64, 64)), everywhere)
        compiled = jax.jit(step).lower(w, jax.device_put(jnp.ones((64, 64)), sliced)).compile()
    found = []
    for group in ElementTree.fromstring(step_svg(compiled.as_text())).iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        x, y, width, height = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        found.append((box.get("class"), x, y, x + width, y + height, group.find(f"{SVG}title").text))
    return found


def one(boxes, kind):
    found = [box for box in boxes if box[0] == kind]
    assert len(found) == 1, f"{kind}: {found}"
    return found[0]


def test_products_loops_and_collectives_are_told_apart(boxes):
    assert "loop, 3 times" in one(boxes, "loop")[5]
    assert "all-gather" in one(boxes, "collective")[5]
    assert "f32[16,64]" in one(boxes, "product")[5] and "test_graph.py" in one(boxes, "product")[5]


def test_a_loop_holds_its_body_and_what_follows_is_below(boxes):
    loop, product, gather = (one(boxes, kind) for kind in ("loop", "product", "collective"))
    assert loop[1] < product[1] and product[3] < loop[3] and loop[2] < product[2] and product[4] < loop[4]
    assert gather[2] > loop[4]


def test_boxes_do_not_overlap(boxes):
    outer = one(boxes, "loop")
    for a in boxes:
        for b in boxes:
            if a is not b and outer not in (a, b):
                assert a[3] <= b[1] or b[3] <= a[1] or a[4] <= b[2] or b[4] <= a[2], (a, b)
