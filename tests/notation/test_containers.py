"""Which of several annotated types is meant, what holds annotated arrays, and arguments that are left out."""

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
