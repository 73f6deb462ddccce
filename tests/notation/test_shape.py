"""Parse against print, and what is not in the notation."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from trellis.notation import Dim, NotationError, Shape, parse, parse_transition

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)


@st.composite
def shapes(draw):
    names = draw(st.lists(st.one_of(NAMES, st.integers(0, 999)), max_size=5, unique=True))
    axes = draw(st.lists(NAMES, max_size=6, unique=True))
    places = [draw(st.integers(0, len(names) + 1)) for _ in axes]
    dims = tuple(Dim(n, tuple(a for a, p in zip(axes, places, strict=True) if p == i)) for i, n in enumerate(names))
    pending, copied = (
        tuple(sorted(a for a, p in zip(axes, places, strict=True) if p == len(names) + k)) for k in (0, 1)
    )
    return Shape(dims, pending, copied, draw(st.booleans()))


@pytest.mark.slow
@given(shapes())
def test_what_is_printed_is_parsed_back(shape):
    assert parse(str(shape)) == shape
    assert parse("  ".join(str(shape).split(" ")) + " ") == shape


@pytest.mark.slow
@given(shapes())
def test_the_partition_spec_says_the_same(shape):
    if shape.ellipsis:
        with pytest.raises(NotationError, match=re.escape("a shape with '...' has no PartitionSpec")):
            _ = shape.spec
        return
    spec = shape.spec
    parts = [() if p is None else (p,) if isinstance(p, str) else tuple(p) for p in spec.partitions]
    assert parts == [dim.axes for dim in shape.dims]
    assert (spec.unreduced, spec.reduced) == (frozenset(shape.pending), frozenset(shape.copied))


@pytest.mark.slow
@given(shapes(), shapes())
def test_a_transition_keeps_its_dimensions(before, after):
    text = f"{before} -> {after}"
    if before.bare() == after.bare():
        assert parse_transition(text) == (before, after)
    else:
        with pytest.raises(NotationError, match="the two sides name different dimensions"):
            parse_transition(text)


def test_an_example():
    shape = parse("batch/data pos embed/model/context +stage ~expert")
    assert shape.names == ("batch", "pos", "embed")
    assert shape.mesh_axes == ("data", "model", "context")
    assert shape.spec == PartitionSpec("data", None, ("model", "context"), unreduced={"stage"}, reduced={"expert"})
    assert str(shape.bare()) == "batch pos embed"
    assert parse("") == Shape()
    assert parse("... 3/x embed").ellipsis


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "batch pos batch",
            "dimension 'batch' is written twice, in 'batch pos batch': give the second one another name "
            "(keys and queries: 'pos' and 'key_pos')",
        ),
        (
            "batch/data embed/data",
            "mesh axis 'data' is used twice, in 'batch/data embed/data': use each mesh axis once, to slice, sum or "
            "copy the array",
        ),
        ("a +x ~x", "mesh axis 'x' is used twice, in 'a +x ~x'"),
        ("a/x/x", "mesh axis 'x' is used twice, in 'a/x/x'"),
        ("a +", "'+' is not a state, in 'a +': write '+' and a mesh axis, as in '+model'"),
        ("a ~4", "'~4' is not a state, in 'a ~4': write '~' and a mesh axis, as in '~model'"),
        ("+x a", "dimension 'a' comes after a state, in '+x a': write all dimensions first, then '+axis' and '~axis'"),
        ("a ...", "'...' is not at the start, in 'a ...': it stands for any leading dimensions, so write it first"),
        (
            "a-b",
            "'a-b' is not a dimension, in 'a-b': write a name or an integer, then '/mesh_axis' for each axis that "
            "slices it",
        ),
        ("a/", "'a/' is not a dimension, in 'a/'"),
        (
            "größe/x b",
            "'größe/x' is not a dimension, in 'größe/x b': write a name or an integer, then '/mesh_axis' for each axis "
            "that slices it; names are of the letters a to z and A to Z, digits and '_'",
        ),
        ("4x", "'4x' is not a dimension, in '4x'"),
        ("a,b", "'a,b' is not a dimension, in 'a,b'"),
    ],
)
def test_not_in_the_notation(text, message):
    with pytest.raises(NotationError, match=re.escape(message)):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a/x",
            "a transition must have exactly one '->', got 0, in 'a/x': write 'before -> after', as in 'embed/data -> "
            "embed'",
        ),
        ("a -> b -> c", "a transition must have exactly one '->', got 2, in 'a -> b -> c'"),
        (
            "a b/x -> b/x a",
            "the two sides name different dimensions, 'a b' and 'b a', in 'a b/x -> b/x a': a transition moves data "
            "between "
            "devices and keeps names and order; use rearrange to reorder",
        ),
    ],
)
def test_not_a_transition(text, message):
    with pytest.raises(NotationError, match=re.escape(message)):
        parse_transition(text)
