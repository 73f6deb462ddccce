import dataclasses
import pickle
from collections.abc import Mapping
from typing import Literal

import pytest
import yaml

from trellis.errors import UserError
from trellis.frozen import FrozenMap
from trellis.run.run_file import to_yaml
from trellis.run.schema import build, fields_of, plain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    kind: Literal["circle"] = "circle"
    radius: float
    """How far
    from the middle."""

    def __post_init__(self):
        if self.radius <= 0:
            raise UserError("A radius is positive.", seen=f"radius={self.radius}", where="radius", fix="use 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    kind: Literal["square"] = "square"
    side: int
    """Length."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    name: str
    shape: Circle | Square
    more: tuple[Circle | Square, ...] = ()
    scale: float | None = None
    color: Literal["red", "green"] = "red"
    filled: bool = False
    sizes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=FrozenMap)
    grid: int | tuple[int, ...] = 1


FULL = Drawing(
    name="x",
    shape=Circle(radius=1 / 3),
    more=(Square(side=2), Circle(radius=1e-9)),
    scale=1e22,
    color="green",
    filled=True,
    sizes=FrozenMap({"a": (1, 2), "b": ()}),
    grid=(3, 4),
)


def test_round_trip_through_yaml_is_exact():
    assert build(Drawing, yaml.safe_load(to_yaml(FULL))) == FULL
    assert hash(FULL) == hash(build(Drawing, plain(FULL)))
    assert pickle.loads(pickle.dumps(FULL)) == FULL


def test_docs_are_the_strings_under_fields():
    assert fields_of(Circle)["radius"].doc == "How far from the middle."
    assert fields_of(Drawing)["name"].doc == ""


def test_numbers_as_yaml_writes_them():
    drawing = build(Drawing, yaml.safe_load("{name: x, shape: {kind: circle, radius: 3e-4}, scale: 2}"))
    assert drawing.shape.radius == 3e-4 and type(drawing.scale) is float
    with pytest.raises(TypeError, match="a configuration cannot be changed"):
        FULL.sizes["a"] = (1,)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"name": "x", "shape": {"kind": "circle", "radius": 1}, "colour": "red"},
            ["`Drawing` has no field of this name.", "`colour`", "`colour`", "did you mean `color`?"],
        ),
        (
            {"name": "x", "shape": {"kind": "circel", "radius": 1}},
            ["`shape` must have a known `kind`.", "kind: 'circel'", "`shape.kind`", "did you mean `circle`?"],
        ),
        (
            {"name": "x", "shape": {"radius": 1}},
            ["`shape` must have a known `kind`.", "no `kind`", "`shape.kind`", "write kind: circle | square"],
        ),
        (
            {"name": "x", "shape": {"kind": "square"}},
            [
                "A field without a default must be set.",
                "no `shape.side`",
                "`shape`",
                "add shape.side: int",
            ],
        ),
        (
            {"name": "x", "shape": {"kind": "square", "side": 1.5}},
            ["`shape.side` must be of type int.", "1.5 (float)", "`shape.side`", "write a whole number, as in 8"],
        ),
        (
            {"name": "x", "shape": {"kind": "square", "side": True}},
            ["`shape.side` must be of type int.", "True (bool)", "`shape.side`", "write a whole number, as in 8"],
        ),
        (
            {"name": "x", "shape": {"kind": "circle", "radius": -1}},
            ["A radius is positive.", "radius=-1.0", "`shape.radius`", "use 1"],
        ),
        (
            {"name": "x", "shape": {"kind": "circle", "radius": 1}, "color": "blue"},
            ["`color` must be one of red | green.", "'blue' (str)", "`color`", "use one of: green, red"],
        ),
        (
            {"name": "x", "shape": "circel"},
            ["`shape` must be of type circle | square.", "'circel' (str)", "`shape`", "did you mean `circle`?"],
        ),
        (
            {"name": None, "shape": {"kind": "circle", "radius": 1}},
            [
                "`name` must be of type str.",
                "null",
                "`name`",
                "write text, in quotes if YAML would read it as something else",
            ],
        ),
        (
            {"name": "x", "shape": {"kind": "circle", "radius": 1}, "more": [{"kind": "square", "side": "a"}]},
            ["`more.0.side` must be of type int.", "'a' (str)", "`more.0.side`", "write a whole number, as in 8"],
        ),
        (
            {"name": "x", "shape": {"kind": "circle", "radius": 1}, "sizes": {"a": [1, "b"]}},
            ["`sizes.a.1` must be of type int.", "'b' (str)", "`sizes.a.1`", "write a whole number, as in 8"],
        ),
        (
            {"name": "x", "shape": {"kind": "circle", "radius": 1}, "grid": "many"},
            ["`grid` must be of type int or list of int.", "'many' (str)", "`grid`", "write a whole number, as in 8"],
        ),
        (
            {"name": "x", "shape": {"kind": "circle", "radius": 1}, "grid": [1, "b"]},
            ["`grid.1` must be of type int.", "'b' (str)", "`grid.1`", "write a whole number, as in 8"],
        ),
        (
            {"name": "x", "shape": {"kind": "circle", "radius": 1}, "filled": 1},
            ["`filled` must be of type bool.", "1 (int)", "`filled`", "write true or false"],
        ),
        (
            {"name": "x", "shape": {"kind": "circle", "radius": 1}, "scale": "big"},
            ["`scale` must be of type float or null.", "'big' (str)", "`scale`", "write a number, as in 0.001"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(data, message):
    with pytest.raises(UserError) as error:
        build(Drawing, data)
    rule, seen, where, fix = message
    assert str(error.value) == f"{rule}\n  seen:  {seen}\n  where: {where}\n  fix:   {fix}"


def test_scalar_in_place_of_fields():
    with pytest.raises(UserError) as error:
        build(Circle, 3, "shape")
    assert str(error.value) == (
        "`shape` must be written as its fields: kind, radius.\n  seen:  3\n  where: `shape`\n"
        "  fix:   set a field by its name, as in shape.kind"
    )
