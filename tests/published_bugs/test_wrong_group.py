"""3. NVIDIA/Megatron-LM issue 7452: a scatter ran over another group of devices than the one the values belong to.

Each device kept a slice of the sequence by its place in the wrong group, so that rows of different samples were mixed.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from tests.mesh.told import told
from trellis import f32


def program(transition: str, result: str):
    def scatter(x: f32["batch/data embed/model"], w: f32["embed/model out"]) -> None:
        y = tr.einsum("batch/data embed/model, embed/model out -> batch/data out +model", x, w)
        return tr.reduce_scatter(transition, y)

    scatter.__annotations__["return"] = f32[result]
    return tr.shard_map(scatter)


@pytest.mark.slow
def test_3_manual_a_scatter_over_another_axis_is_refused(put):
    x, w = put("b/data e/model", 8, 4), put("e/model o", 4, 8, seed=1)
    y = program("batch/data out +model -> batch/data out/model", "batch/data out/model")(x, w)
    np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(w), rtol=1e-4, atol=1e-5)
    message = "mesh axis 'data' is used twice, in 'batch/data out +data'"
    with pytest.raises(tr.NotationError, match=re.escape(message)):
        program("batch/data out +data -> batch/data out/data", "batch/data out")(x, w)
    message = (
        "the left side of a text must describe the array, got f32[2 8 +model] (one slice; differs over data), which "
        "is pending along model, for 'rows out +data', in reshard('rows out +data -> rows out/data'): write +model "
        "there"
    )
    with pytest.raises(
        tr.TypeMismatch, match=re.escape("a name must have one length in a call, got batch=8 from argument")
    ):
        program("batch out +data -> batch out/data", "batch out/data")(x, w)
    with pytest.raises(tr.TypeMismatch) as error:
        program("rows out +data -> rows out/data", "rows out/data")(x, w)
    assert message in told(error, by_line=True)


def test_3_manual_slices_cannot_be_taken_for_others(put):
    @tr.shard_map
    def cut(x: f32["batch/data pos embed"]) -> f32["batch/data pos/model embed"]:
        return tr.reshard("batch/data pos embed -> batch/data pos/data embed", x)

    @tr.shard_map
    def mislabeled(x: f32["batch/data pos embed"]) -> f32["batch/data pos/model embed"]:
        return tr.reshard("batch/model pos embed -> batch/model pos/data embed", x)

    x = put("b/data p e", 8, 4, 3)
    with pytest.raises(tr.NotationError, match=re.escape("mesh axis 'data' is used twice")):
        cut(x)
    with pytest.raises(
        tr.TypeMismatch, match=re.escape("got batch=8 from argument `x` of `mislabeled` and batch=4 from")
    ):
        mislabeled(x)


def test_3_explicit_the_text_must_be_what_the_array_is(put):
    x = tr.named(put("b/data e", 8, 4), "batch embed")
    message = (
        "the left side of a transition must describe the array, got an array of type 'batch/data embed', in "
        "reshard('batch embed +model -> batch/model embed'): write 'batch/data embed -> ...'"
    )
    with pytest.raises(tr.ReshardError, match=re.escape(message)):
        tr.reshard("batch embed +model -> batch/model embed", x)
    # Whole arrays have no groups: position i of the batch is sample i on every mesh, and stays it.
    ids = tr.named(jnp.arange(8), "batch")
    for text in ("batch -> batch/model", "batch -> batch/data/model"):
        np.testing.assert_array_equal(jax.jit(lambda x, text=text: tr.reshard(text, x).array)(ids), np.arange(8))
