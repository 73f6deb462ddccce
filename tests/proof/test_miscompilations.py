"""Miscompilations that others published, as small programs: found where compilers still have them, else where a program
is altered to have them; and what Trellis writes in their place is right."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.hardware.chips import target
from trellis.mesh import make_mesh
from trellis.proof.runs import prove_run
from trellis.recipes import load_run

PASS = "while-loop-all-reduce-code-motion"
VOCAB, EMBED, PARTS, ROWS, LENGTH = 96, 128, 2, 8, 8


def numbers(mesh, *specs):
    """Two parts of a batch of tokens, and a gradient for each of these."""
    ids = jax.random.randint(jax.random.key(0), (PARTS, ROWS, LENGTH), 0, VOCAB)
    d_rows = jax.random.normal(jax.random.key(1), (PARTS, ROWS, LENGTH, EMBED))
    return [jax.device_put(x, NamedSharding(mesh, P(*spec))) for x, spec in zip((ids, d_rows), specs, strict=True)]


def alone(ids, d_rows):
    """The gradient of a table of which these rows were looked up, on one device."""
    return jnp.zeros((VOCAB, EMBED)).at[ids].add(d_rows)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_rows_that_are_accumulated_in_a_loop(on):
    """openxla/xla 49143: the loop's total is in the sum that is moved out of the loop, and so are the first parts'."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    ids, d_rows = numbers(mesh, (None, "data"), (None, "data"))

    def accumulated(ids, d_rows):
        add = lambda total, part: (total.at[part[0]].add(part[1]), None)
        total, _ = jax.lax.scan(add, jnp.zeros((VOCAB, EMBED)), (ids, d_rows))
        return jax.lax.with_sharding_constraint(total, P(None, None))

    proof = tr.prove(accumulated, ids, d_rows, on=on, reference=alone)
    assert not proof.proven and proof.error > 0.1 and PASS in proof.finding.culprit
    off = {"xla_disable_hlo_passes": PASS}
    assert tr.prove(accumulated, ids, d_rows, on=on, reference=alone, options=off).proven


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_a_step_that_accumulates_the_gradient_of_its_table(mode):
    """In explicit mode it is a pending sum until after the loop, in auto mode it is kept apart from the total."""
    given = {"layout.mode": mode, "layout.preset": "data", "mesh.data": "4", "microbatches": "2"}
    options = {**given, "model.tie_embeddings": "false"}
    proof = prove_run(load_run("tiny", options), target("v5e:2x2"), tuple(options))
    assert proof.proven and proof.error < 1e-5


@pytest.mark.slow
def test_a_table_in_trellis_whose_gradient_is_accumulated_in_a_loop():
    """In explicit mode the gradient of a lookup is summed over devices where the types say, apart from the total."""
    mesh = make_mesh(jax.devices()[:4], data=4)
    ids, d_rows = numbers(mesh, (None, "data"), (None, "data"))
    table = jax.device_put(jnp.ones((VOCAB, EMBED)), NamedSharding(mesh, P()))

    def accumulated(table, ids, d_rows):
        table = tr.named(table, "vocab embed")

        def gradient(part):
            tokens, d = tr.named(part[0], "batch pos"), tr.named(part[1], "batch pos embed")
            return jax.grad(lambda table: (tr.take(table, "vocab", tokens) * d).sum().array)(table).array

        add = lambda total, part: (total + gradient(part), None)
        return jax.lax.scan(add, jnp.zeros((VOCAB, EMBED)), (ids, d_rows))[0]

    reference = lambda table, ids, d_rows: alone(ids, d_rows)
    with tr.Layout(mesh, {}, {"batch": "data"}):
        assert tr.prove(accumulated, table, ids, d_rows, on="v5e:2x2", reference=reference).proven


@pytest.mark.slow
@pytest.mark.parametrize("altered", [False, True])
def test_rows_that_are_cut_before_they_are_summed(altered):
    """openxla/xla 42481: the gradient of a lookup, summed after each device has taken its slice of it."""
    mesh = make_mesh(jax.devices()[:4], model=4)
    ids, d_rows = numbers(mesh, (None, None, "model"), (None, None, "model"))

    def cut_first(ids, d_rows):
        def local(ids, d_rows):
            begin = jax.lax.axis_index("model") * (VOCAB // 4)
            return jax.lax.psum(jax.lax.dynamic_slice_in_dim(alone(ids, d_rows), begin, VOCAB // 4), "model")

        specs = P(None, None, "model")
        return jax.shard_map(local, in_specs=(specs, specs), out_specs=P("model"), check_vma=False)(ids, d_rows)

    def compiled(ids, d_rows):
        def loss(table):
            rows = jax.reshard(table, P(reduced={"model"})).at[ids].get(out_sharding=P(None, None, "model"))
            return jnp.sum(rows * d_rows)

        return jax.grad(loss)(jnp.zeros((VOCAB, EMBED), out_sharding=P("model")))

    proof = tr.prove(cut_first if altered else compiled, ids, d_rows, on="v5e:2x2", reference=alone, explain=False)
    assert proof.proven != altered


@pytest.mark.parametrize("altered", [False, True])
def test_a_pending_sum_over_two_axes_that_is_sliced_along_one(altered):
    """openxla/xla 40034: the sum over the other axis is not in the program."""
    mesh = make_mesh(jax.devices()[:4], data=2, model=2)
    x, w = (jax.random.normal(jax.random.key(i), (64, 64)) for i in range(2))
    x, w = (
        jax.device_put(a, NamedSharding(mesh, P(*spec)))
        for a, spec in ((x, (None, ("data", "model"))), (w, (("data", "model"),)))
    )

    def without_one(x, w):
        local = lambda x, w: jax.lax.psum_scatter(x @ w, "model", tiled=True)
        specs = P(None, ("data", "model")), P(("data", "model"))
        return jax.shard_map(local, in_specs=specs, out_specs=P("model"), check_vma=False)(x, w)

    def settled(x, w):
        pending = jnp.einsum("be,em->bm", x, w, out_sharding=P(None, None, unreduced={"data", "model"}))
        return tr.reshard("batch mlp +data +model -> batch/model mlp", pending)

    product = lambda x, w: x @ w
    proof = tr.prove(without_one if altered else settled, x, w, on="v5e:2x2", reference=product, explain=False)
    assert proof.proven != altered
