"""A sum that is settled in a loop and made pending again there is refused: compilers sum it twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.inspect import ledger
from trellis.inspect.ledger import ledger_of
from trellis.mesh.topology import slice_devices
from trellis.recipes import load_run
from trellis.train.assemble import assemble
from trellis.train.summary import step_program

MESH = tr.make_mesh(jax.devices()[:4], x=4)
KEYS = jax.random.split(jax.random.key(0), 2)
W = jax.device_put(jax.random.normal(KEYS[0], (8, 16)), NamedSharding(MESH, P()))
PARTS = jax.device_put(jax.random.normal(KEYS[1], (3, 8, 8)), NamedSharding(MESH, P(None, "x", None)))


def local_loss(w, x):
    """Summed over devices; the gradient of `w`, the same everywhere, is settled inside."""
    return jax.lax.psum(jnp.sum(jnp.tanh(x @ w)), "x")


def loss(copies, part, *, settled: bool):
    if settled:
        whole, spec = jax.reshard(copies, P(None, None)), P(None, None)
        return jax.shard_map(local_loss, in_specs=(spec, P("x", None)), out_specs=P())(whole, part)
    hidden = jnp.einsum("be,em->bm", part, copies, out_sharding=P("x", None))
    return jnp.sum(jnp.tanh(hidden))


def accumulated(w, parts, *, settled: bool, turns: bool = True):
    copies = jax.reshard(w, P(None, None, reduced={"x"}))
    gradient = jax.grad(lambda copies, part: loss(copies, part, settled=settled))
    if not turns:
        return jax.reshard(gradient(copies, parts[0]), P(None, None))
    zero = jax.lax.broadcast_in_dim(jnp.float32(0), w.shape, (), out_sharding=P(None, None, unreduced={"x"}))
    total, _ = jax.lax.scan(lambda total, part: (total + gradient(copies, part), None), zero, parts)
    return jax.reshard(total, P(None, None))


def test_a_settled_sum_that_is_made_pending_in_a_loop_is_refused():
    with jax.set_mesh(MESH), pytest.raises(tr.PendingSumError) as error:
        ledger(lambda w, parts: accumulated(w, parts, settled=True), W, PARTS)
    text = str(error.value)
    assert "a sum that is settled in a loop must stay settled, got one over 'x'" in text
    assert "made pending again as f32[8 16 -> 8 16 +x]" in text
    assert "test_settled.py" in text and "(~x)" in text and "settled once, after the loop" in text


def test_named_jit_refuses_it_for_all_but_cpus():
    step = tr.named_jit(lambda w, parts: accumulated(w, parts, settled=True))
    with jax.set_mesh(MESH):  # whose compiler leaves the sums where they are
        np.testing.assert_allclose(step(W, PARTS), accumulated(W, PARTS, settled=False), rtol=1e-4)
    tpus = tr.make_mesh(slice_devices("v5e:2x2"), x=4)
    w, parts = (
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(tpus, a.sharding.spec)) for a in (W, PARTS)
    )
    with jax.set_mesh(tpus):
        with pytest.raises(tr.PendingSumError, match="settled in a loop must stay settled"):
            step.lower(w, parts)
        tr.named_jit(lambda w, parts: accumulated(w, parts, settled=False)).lower(w, parts)


def test_a_sum_that_stays_pending_is_settled_once():
    with jax.set_mesh(MESH):
        rows = ledger(lambda w, parts: accumulated(w, parts, settled=False), W, PARTS)
    assert [(row.kind, row.what, row.times) for row in rows] == [("all-reduce", "8 16 +x -> 8 16", 1)]


def test_outside_of_a_loop_nothing_is_moved_past_the_cast():
    with jax.set_mesh(MESH):
        rows = ledger(lambda w, parts: accumulated(w, parts, settled=True, turns=False), W, PARTS)
    assert len([row for row in rows if row.what.startswith("8 16")]) == 2


def pending(w):
    return jax.reshard(w, P(None, None, unreduced={"x"}))


def from_before(x, *, settled: bool):
    """A sum from before the loop is made pending in each turn, and settled there or after the loop."""
    total = jax.reshard(jnp.sum(x, 0), P(None, None))
    zero = jnp.zeros_like(total) if settled else pending(jnp.zeros_like(total))
    finish = lambda part: jax.reshard(part, P(None, None))
    turn = lambda c, _: (c + (finish(pending(total)) if settled else pending(total)), None)
    made = jax.lax.scan(turn, zero, length=3)[0]
    return made if settled else finish(made)


def from_a_loop_before(x):
    total = jax.lax.scan(
        lambda c, part: (c + jax.reshard(jnp.sum(part, 0), P(None)), None), jnp.zeros(8), jnp.swapaxes(x, 0, 1)
    )[0]
    turn = lambda c, _: (c + jax.reshard(jax.reshard(total, P(None, unreduced={"x"})), P(None)), None)
    return jax.lax.scan(turn, jnp.zeros(8), length=3)[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: from_before(x, settled=True),
        lambda x: from_before(x, settled=False),
        from_a_loop_before,
    ],
)
def test_a_sum_from_before_the_loop_may_be_made_pending_in_it(function):
    x = jax.device_put(PARTS[0].repeat(2, 0).reshape(4, 4, 8), NamedSharding(MESH, P("x")))
    with jax.set_mesh(MESH):
        assert len(ledger(function, x))
        proof = tr.prove(function, x, on="v5e:2x2", explain=False)
    assert proof.proven, proof


def test_a_sum_of_a_loop_is_not_made_pending_in_a_loop_within():
    """Which may have one turn, and then is none to a compiler."""

    def accumulated(x):
        def turn(total, part):
            settled = jax.reshard(jnp.sum(part, 0), P(None))
            cast = lambda: jax.reshard(settled, P(None, unreduced={"x"}))
            return jax.lax.scan(lambda total, _: (total + cast(), None), total, length=1)[0], None

        zero = jax.reshard(jnp.zeros(8), P(None, unreduced={"x"}))
        return jax.reshard(jax.lax.scan(turn, zero, jnp.swapaxes(x, 0, 1))[0], P(None))

    x = jax.device_put(PARTS[0].repeat(2, 0).reshape(4, 4, 8), NamedSharding(MESH, P("x")))
    with jax.set_mesh(MESH), pytest.raises(tr.PendingSumError, match="settled in a loop"):
        ledger(accumulated, x)


def test_both_are_the_same_number_where_the_compiler_is_right():
    with jax.set_mesh(MESH):
        got = [jax.jit(accumulated, static_argnames="settled")(W, PARTS, settled=s) for s in (True, False)]
    w, rows = np.asarray(W), np.asarray(PARTS).reshape(24, 8)
    wanted = rows.T @ (1 - np.tanh(rows @ w) ** 2)
    for gradient in got:
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [1, 2])
def test_a_pipeline_settles_its_gradients_once_a_step(model):
    """The microbatches of the trainer around the pipeline's own: partial sums of all of them are added up."""
    options = {"mesh.stage": "2", "mesh.data": "2", "mesh.model": str(model), "layout.preset": "auto"}
    run = load_run("tiny", {**options, "model.layers": "4", "batch_size": "16", "microbatches": "2"})
    rows = ledger_of(step_program(assemble(run, jax.devices()[: 4 * model])))
    gradients = [r for r in rows if r.axis == "data" and r.what.startswith("layers") and r.direction == "backward"]
    assert gradients and {row.times for row in gradients} == {1}
    assert {row.kind for row in gradients} <= {"all-reduce", "reduce-scatter"}


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_microbatches_settle_gradients_over_slices_of_their_positions_once_a_step(stages):
    """Parts of a sequence have parts of a gradient as parts of a batch have: neither is summed in the loop."""
    options = {"mesh.stage": str(stages), "mesh.context": "2", "mesh.data": str(4 // stages), "microbatches": "4"}
    run = load_run("tiny", options | {"model.layers": "2", "layout.context": "ring", "batch_size": "16"})
    rows = ledger_of(step_program(assemble(run, jax.devices())))
    gradients = [row for row in rows if row.role == "gradients" and "context" in row.axes]
    assert gradients and {row.times for row in gradients} == {1}
    assert {row.kind for row in gradients} <= {"all-reduce", "reduce-scatter"}
