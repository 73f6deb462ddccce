"""Rotary embeddings of named slices: in a manual program right, or refused."""

import jax
import numpy as np
import pytest

import trellis as tr
from trellis import f32, nn
from trellis.named import NamesError

NAMES = "batch pos heads head_dim"


def program(name, pairs):
    of = lambda names: names.replace(name, f"{name}/model")

    @tr.shard_map
    def manual(x: f32[of(NAMES)], cos: f32[of("pos head_dim")], sin: f32[of("pos head_dim")]) -> f32[of(NAMES)]:
        return nn.rotate(x, (cos, sin), pairs=pairs)

    return manual


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
