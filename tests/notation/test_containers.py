"""Which of several annotated types is meant, what holds annotated arrays, and arguments that are left out."""

import asyncio
import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import Stack, TypeMismatch, f32, i32


@pytest.fixture(autouse=True)
def on():
    with tr.checking(True):
        yield


@tr.checked
def either(x: f32["batch embed"] | i32["batch"] | f32["batch"], y: f32["batch"]) -> None:
    pass


@tr.checked
def stacked(x: Stack["layers", f32["embed"]] | f32["embed"], y: f32["embed"]) -> None:
    pass


def test_of_several_types_the_one_of_an_arrays_dtype_rank_and_names_is_meant():
    for x in (jnp.ones((4, 2)), jnp.ones(4, jnp.int32), jnp.ones(4), tr.ones({"batch": 4}, jnp.int32)):
        either(x, jnp.ones(4))
        with pytest.raises(TypeMismatch, match="got batch=4 from argument `x` of `either` and batch=3 from"):
            either(x, jnp.ones(3))
    with pytest.raises(TypeMismatch, match=re.escape("the names of its annotation in the same order, got f32[pos=4]")):
        either(tr.ones({"pos": 4}), jnp.ones(4))
    stacked(jnp.ones((2, 3)), jnp.ones(3))
    stacked(jnp.ones(3), jnp.ones(3))


def test_a_manual_function_takes_and_gives_the_type_that_is_meant():
    @tr.shard_map(mesh=tr.make_mesh(x=8))
    def ids_or_rows(x: f32["batch/x embed"] | i32["batch/x"]) -> f32["batch/x embed"] | i32["batch/x"]:
        return x

    for x in (np.ones((8, 2), np.float32), np.arange(8)):
        np.testing.assert_array_equal(ids_or_rows(x), x)


@tr.checked
def several(pair: tuple[f32["a"], f32["b"]], each: list[f32["a"]] = (), by: dict[str, f32["a"]] | None = None) -> None:
    pass


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ('got f32[2] for tuple[f32["a"], f32["b"]], in argument `pair` of `several`', lambda x: several(x)),
        ("got f32[2] for list[f32", lambda x: several((x, x), x)),
        ("got dict for list[f32", lambda x: several((x, x), {"a": x})),
        ("got 1 for 2, in argument `pair` of `several`: pass 2", lambda x: several((x,))),
        ("got 0 for 2, in argument `pair` of `several`: pass 2", lambda x: several(())),
    ],
)
def test_what_is_annotated_as_a_container_is_one(message, call):
    several((jnp.ones(2), jnp.ones(3)), (jnp.ones(2),), {"one": jnp.ones(2)})
    with pytest.raises(TypeMismatch, match=re.escape(message)):
        call(jnp.ones(2))


def test_an_array_that_is_a_default_is_checked():
    ones = np.ones(3, np.float32)

    @tr.checked
    def scaled(x: f32["embed"], by: f32["embed"] = ones, more: f32["embed"] = None) -> None:
        pass

    scaled(jnp.ones(3))
    scaled(jnp.ones(2), jnp.ones(2))
    with pytest.raises(TypeMismatch, match="got embed=2 from argument `x` of `scaled` and embed=3 from argument `by`"):
        scaled(jnp.ones(2))


def _first(x: f32["batch embed"], y: f32["embed"]) -> f32["batch"]:
    return x[:, 0]


class _Methods:
    @tr.checked
    @classmethod
    def from_class(cls, x: f32["batch embed"], y: f32["embed"]) -> f32["batch"]:
        return x[:, 0]

    @tr.checked
    @staticmethod
    def alone(x: f32["batch embed"], y: f32["embed"]) -> f32["batch"]:
        return x[:, 0]


@pytest.mark.parametrize("of", [_Methods, _Methods()])
@pytest.mark.parametrize("method", ["from_class", "alone"])
def test_class_and_static_methods_are_checked_under_their_decorators(of, method):
    assert getattr(of, method)(jnp.ones((2, 3)), jnp.ones(3)).shape == (2,)
    with pytest.raises(TypeMismatch, match="got embed=3 from argument `x`.*and embed=4 from argument `y`"):
        getattr(of, method)(jnp.ones((2, 3)), jnp.ones(4))


def test_what_a_partial_function_was_given_in_order_is_checked():
    taken = tr.checked(functools.partial(_first, jnp.ones((2, 3))))
    assert taken(jnp.ones(3)).shape == (2,)
    with pytest.raises(TypeMismatch, match="got embed=3 from argument `x` of `_first` and embed=4 from argument `y`"):
        taken(jnp.ones(4))


def test_what_an_async_function_gives_in_the_end_is_checked():
    @tr.checked
    async def row(x: f32["batch embed"], at: int) -> f32["embed"]:
        await asyncio.sleep(0)
        return x[at] if at else x[:, 0]

    assert asyncio.run(row(jnp.ones((2, 3)), 1)).shape == (3,)
    with pytest.raises(TypeMismatch, match="embed=3 from argument `x` of `row` and embed=2 from result of `row`"):
        asyncio.run(row(jnp.ones((2, 3)), 0))
