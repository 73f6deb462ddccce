"""The loss with an unembedding that stays sliced: values, gradients, what moves, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trellis.inspect import ledger
from trellis.mesh.meshes import make_mesh
from trellis.nn.loss import LossError, vocab_chunks
from trellis.nn.loss import linear_cross_entropy as cross_entropy
from trellis.nn.loss.vocab_chunks import cut

BATCH, POS, EMBED, VOCAB, WORDS = 8, 4, 16, 4 * 20, 77
TOKENS = ("data", "context")
# Three chunks of the 10 words on each of 8 devices would be 4, 4 and 2; chunks are in tiles of 8, so 8 and 2.
PLACES = {
    "words": (("data", "context"), None),
    "words over some": (("data",), None),
    "columns": (None, ("data", "context")),
    "columns over some": (None, "context"),
}


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    x, table = jax.random.normal(keys[0], (BATCH, POS, EMBED)), jax.random.normal(keys[1], (VOCAB, EMBED))
    targets = jax.random.randint(keys[2], (BATCH, POS), 0, WORDS)
    targets = targets.at[0].set(jnp.argmax(x[0] @ table[:WORDS].T, axis=-1))  # some are predicted right
    return x, table, targets, jax.random.uniform(keys[3], (BATCH, POS)).at[:, 2].set(0.0)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 8 rows, the smallest there are."""
    monkeypatch.setattr(vocab_chunks, "CHUNK_BYTES", 1)


def mean(x, table, targets, weights, **settings):
    sums = cross_entropy(x, table, targets, weights, vocab_first=True, **settings)
    return sums.total / sums.tokens, sums


def placed(arrays, place, batch_axes=TOKENS):
    mesh = make_mesh(data=4, context=2)
    put = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))
    x, table, targets, weights = arrays
    tokens = [put(a, *batch_axes) for a in (x, targets, weights)]
    return mesh, (tokens[0], put(table, *place), *tokens[1:])


def assert_near(seen, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), seen, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("settings", [{}, dict(z_loss=0.1, logit_softcap=4.0, vocab_size=WORDS)], ids=["plain", "all"])
def test_chunks_equal_one_device(arrays, place, settings, small_chunks):
    run = jax.value_and_grad(lambda *a: mean(*a, **settings), (0, 1, 3), has_aux=True)
    wanted = jax.jit(run)(*arrays)
    mesh, sliced = placed(arrays, place)
    with jax.set_mesh(mesh):
        (value, sums), gradients = jax.jit(run)(*sliced)
        assert state_axes(gradients[1]) == state_axes(sliced[1])
        assert_near(((value, sums), gradients), wanted)
        assert_near(jax.jit(lambda *a: mean(*a, **settings))(*sliced), wanted[0])
    assert 0 < sums.correct < sums.tokens


def state_axes(x):
    return tuple(x.sharding.spec)


@pytest.mark.slow
def test_a_copied_table_gives_pending_gradients(arrays, small_chunks):
    """Over the tokens' other mesh axes the table may be held as copies; one sum of the sliced gradient settles them."""
    wanted = jax.jit(jax.value_and_grad(lambda *a: mean(*a)[0], (0, 1)))(*arrays)
    mesh, (x, table, targets, weights) = placed(arrays, (("data",), None))

    def copied(x, table):
        return mean(x, jax.reshard(table, P("data", None, reduced={"context"})), targets, weights)[0]

    with jax.set_mesh(mesh):
        assert_near(jax.jit(jax.value_and_grad(copied, (0, 1)))(x, table), wanted)


@pytest.mark.slow
def test_each_word_moves_once(arrays, small_chunks):
    """The table is gathered once and its gradient scattered once, in chunks: the whole of either is nowhere."""
    mesh, sliced = placed(arrays, PLACES["words"])
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(jax.grad(lambda *a: mean(*a)[0], (0, 1)))(*sliced)
        moved = ledger(jax.grad(lambda *a: mean(*a)[0], (0, 1)), *sliced)
    rows = {kind: sum(r.total for r in moved.rows if r.kind == kind) for kind in ("all-gather", "reduce-scatter")}
    filled = 2 * 8 * 8 * EMBED * 4  # two chunks of 8 rows from each of 8 devices, in float32
    assert rows["all-gather"] == rows["reduce-scatter"] == filled * 7 // 8
    assert f"f32[{VOCAB},{EMBED}]" not in str(jaxpr) and f"f32[64,{EMBED}]" in str(jaxpr)


@pytest.mark.slow
def test_low_precision_keeps_exponentials_in_its_own_type(arrays, small_chunks):
    low = [a.astype(jnp.bfloat16) for a in arrays[:2]]
    run = jax.value_and_grad(lambda *a: mean(*a)[0], (0, 1))
    exact = jax.jit(run)(*(a.astype(jnp.float32) for a in low), *arrays[2:])
    mesh, sliced = placed((*low, *arrays[2:]), PLACES["words"])
    with jax.set_mesh(mesh):
        value, gradients = jax.jit(run)(*sliced)
        text = str(jax.make_jaxpr(run)(*sliced))
    assert f"bf16[1,{BATCH * POS // 8},64]" in text and {g.dtype for g in gradients} == {jnp.dtype("bfloat16")}
    np.testing.assert_allclose(value, exact[0], rtol=1e-4)
    for seen, wanted in zip(gradients, exact[1], strict=True):
        error = np.asarray(seen, np.float32) - np.asarray(wanted)
        assert np.linalg.norm(error) < 0.01 * np.linalg.norm(np.asarray(wanted))


def test_chunks_fill_the_room_they_are_given():
    for dim, local, devices in ((0, 2004, 64), (0, 504, 256), (1, 128_256, 16), (0, 5, 4)):
        chunks = cut(dim, ("data",), devices, local, tokens=4096)
        assert (chunks.number - 1) * chunks.rows < local <= chunks.number * chunks.rows
        wide = chunks.rows * (1 if dim else devices)
        assert chunks.number == 1 or 4096 * 4 * (wide - 8 * devices) < 1 << 27


@pytest.mark.parametrize(
    "place,more",
    [
        (("data", "context"), {}),
        (("data", None), {"chunk": 4}),
        (("data", None), {"bias": True}),
    ],
    ids=["both sides", "chunks", "bias"],
)
def test_refusals(arrays, place, more):
    mesh, (x, table, targets, _) = placed(arrays, place)
    with jax.set_mesh(mesh), pytest.raises(LossError) as caught:
        if more.get("bias"):
            more = {"bias": jax.device_put(jnp.zeros(VOCAB), NamedSharding(mesh, P("data")))}
        cross_entropy(x, table, targets, vocab_first=True, **more)
    shown = "@".join(("80", "data")), ("16@context" if place[1] else "16")
    assert str(caught.value) == (
        "an unembedding gathered in chunks must be 'vocab embed' (vocab_first), with one dimension sliced, over mesh "
        "axes of the tokens only, and without bias, chunk and tiles of narrow numbers, got x "
        f"float32[8@data,4@context,16], unembed float32[{','.join(shown)}], in linear_cross_entropy: gather it first "
        "with reshard"
    )
