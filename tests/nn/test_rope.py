"""Rotary embeddings of named slices: in a manual program right, or refused."""

import jax
import numpy as np
import pytest

import trellis as tr
from trellis import f32, nn
from trellis.named import NamesError
from trellis.nn import rope

NAMES = "batch pos heads head_dim"


def program(name, pairs):
    of = lambda names: names.replace(name, f"{name}/model")

    @tr.shard_map
    def manual(x: f32[of(NAMES)], cos: f32[of("pos head_dim")], sin: f32[of("pos head_dim")]) -> f32[of(NAMES)]:
        return nn.rotate(x, (cos, sin), pairs=pairs)

    return manual


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("name", ["pos", "heads", "head_dim"])
def test_slices_are_rotated_as_the_whole_is_or_refused(name, pairs):
    x = tr.random.normal(jax.random.key(0), {"batch": 2, "pos": 8, "heads": 2, "head_dim": 8})
    tables = nn.rotary_tables(tr.arange(tr.Axis("pos", 8)), tr.Axis("head_dim", 8), 1e4, pairs=4 if pairs else None)
    wanted, manual = nn.rotate(x, tables, pairs=pairs), program(name, pairs)
    with jax.set_mesh(tr.make_mesh(jax.devices()[:2], model=2)):
        if name == "head_dim":  # the other of a pair is on another device
            with pytest.raises(
                NamesError, match="rotate needs the whole of 'head_dim', got .*head_dim/model.*: reshard"
            ):
                manual(x, *tables)
        else:
            np.testing.assert_allclose(manual(x, *tables).array, wanted.array, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_product_that_exchanges_pairs_renames_one_dimension(monkeypatch):
    """On a TPU; another name may have that of the rotated one within it."""
    x = tr.random.normal(jax.random.key(0), {"pos": 4, "heads": 2, "d": 6})
    tables = nn.rotary_tables(tr.arange(tr.Axis("pos", 4)), tr.Axis("d", 6), 1e4)
    wanted = nn.rotate(x, tables, "d")
    monkeypatch.setattr(rope, "swaps_by_product", lambda _: True)
    found = nn.rotate(x, tables, "d")
    assert found.names == wanted.names
    np.testing.assert_allclose(found.array, wanted.array, atol=1e-6)


@pytest.mark.parametrize("by_product", [False, True])
def test_a_last_element_without_a_neighbour_is_not_rotated(monkeypatch, by_product):
    monkeypatch.setattr(rope, "swaps_by_product", lambda _: by_product)
    array = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    turned = lambda x, size: nn.rotate(
        tr.named(x, "pos head_dim"),
        nn.rotary_tables(tr.arange(tr.Axis("pos", 3)), tr.Axis("head_dim", size), 1e4, pairs=4),
        pairs=True,
    )
    wanted = np.concatenate([turned(array[:, :4], 4).array, array[:, 4:]], 1)
    np.testing.assert_allclose(turned(array, 5).array, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("size", "theta", "pairs", "message"),
    [
        (5, 1e4, None, "need an even number of elements, since they rotate pairs, got 5"),
        (8, 1e4, 3, "need an even number of elements, since they rotate pairs, got 3"),
        (8, 1e4, 10, "got pairs=10 of head_dim=8, in rotary_tables: use 8 or fewer"),
        (8, 0.0, None, "theta must be more than 0, got theta=0.0"),
    ],
)
def test_what_cannot_be_rotated_is_refused(size, theta, pairs, message):
    with pytest.raises(NamesError, match=message):
        nn.rotary_tables(tr.arange(tr.Axis("pos", 4)), tr.Axis("head_dim", size), theta, pairs=pairs)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_a_single_frequency(truncate):
    """It is the highest, of which YaRN stretches none."""
    scaling = nn.YarnScaling(factor=4.0, original_context=2048, truncate=truncate)
    assert rope.frequencies(2, 1e4, scaling).tolist() == [1.0]


def test_what_is_not_rotated_is_not_scaled():
    """As in transformers, with `partial_rotary_factor`."""
    scaling, x = nn.YarnScaling(factor=8.0, original_context=64), tr.ones({"pos": 3, "head_dim": 6})
    tables = lambda size, pairs: nn.rotary_tables(
        tr.arange(tr.Axis("pos", 3)), tr.Axis("head_dim", size), 1e4, scaling, pairs=pairs
    )
    found = nn.rotate(x, tables(6, 4), pairs=True).array
    wanted = nn.rotate(tr.ones({"pos": 3, "head_dim": 4}), tables(4, 4), pairs=True).array
    np.testing.assert_allclose(found[:, :4], wanted, rtol=1e-6)
    np.testing.assert_array_equal(found[:, 4:], 1)
    np.testing.assert_array_equal(nn.rotate(x, tables(6, 0), pairs=True).array, 1)
