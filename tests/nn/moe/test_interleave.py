"""Parts of a batch side by side: what waits for what, forward and backward, and what moves once."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import trellis as tr
from tests.equivalence.test_models import batch
from tests.nn.moe.emulated import ragged_all_to_all
from trellis.data.batch import Batch
from trellis.errors import UserError
from trellis.inspect import ledger
from trellis.mesh import make_mesh
from trellis.models import MixtralConfig, Routing
from trellis.named import shard
from trellis.named.saving import Keep, only, saved
from trellis.nn.moe import cut, exchange_experts, hierarchical_experts, joined, parts_of
from trellis.nn.moe.exchange import exchange_each
from trellis.nn.moe.hierarchical import hierarchical_each
from trellis.nn.moe.interleave import begun_after, in_turn
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.step import StepOptions, batch_loss


def needed(function, output: int, *given) -> list[bool]:
    """Which arguments a result cannot be made without, in the program that a compiler gets."""
    jaxpr = jax.make_jaxpr(function)(*given).jaxpr
    wanted = {jaxpr.outvars[output]}
    for equation in reversed(jaxpr.eqns):
        if wanted.intersection(equation.outvars):
            wanted.update(v for v in equation.invars if isinstance(v, jax.extend.core.Var))
    return [v in wanted for v in jaxpr.invars]


def stage(x, scale):
    return x * jnp.sin(x) * scale.astype(jnp.float32), ()


def both(x, y):
    (first, _), (second, _) = in_turn(stage, [(x, jnp.int32(2)), (y, jnp.int32(3))])
    return first, second


def test_a_part_begins_when_the_one_before_has_ended():
    x, y, d = jnp.float32(0.5), jnp.float32(0.7), jnp.float32(1.0)
    forward = lambda x, y: jax.vjp(both, x, y)[0]
    assert needed(forward, 0, x, y) == [True, False]
    assert needed(forward, 1, x, y) == [True, True]
    backward = lambda x, y, d, e: jax.vjp(both, x, y)[1]((d, e))
    assert needed(backward, 0, x, y, d, d) == [True, False, True, False]  # the gradient of the first waits for nobody
    assert needed(backward, 1, x, y, d, d) == [True, True, True, True]
    plain = lambda x, y: (stage(x, jnp.int32(2))[0], stage(y, jnp.int32(3))[0])
    for found, wanted in zip(jax.tree.leaves(jax.vjp(both, x, y)[1]((d, d))), jax.vjp(plain, x, y)[1]((d, d))):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_what_begins_later_has_its_gradient_at_once():
    x, y = jnp.float32(0.5), jnp.float32(0.7)
    after = lambda x, y: begun_after(x * 2, y) * 3
    assert needed(after, 0, x, y) == [True, True]
    assert needed(lambda x, y, d: jax.vjp(after, x, y)[1](d)[1], 0, x, y, x) == [False, False, True]
    assert jax.grad(after, (0, 1))(x, y) == (0.0, 3.0)


TOKENS, EMBED, COUNT, CHOICES = 8, 3, 2, 2


def compute(rows, sizes, weights):
    """Expert e of a device scales by e + 1; rows of nobody become what is no number."""
    expert = (jnp.arange(rows.shape[0])[:, None] >= jnp.cumsum(sizes)[None]).sum(1, dtype=jnp.float32)
    return rows * (jnp.where(expert < COUNT, expert + 1.0, jnp.nan) * weights)[:, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "ragged", "slack"),
    [*itertools.product(["exchange", "hierarchical"], [True, False], [0.3]), ("exchange", True, 1.5)],
)
def test_parts_are_exchanged_as_all_tokens_are(way, ragged, slack, monkeypatch):
    """Also where one part takes more rounds than the other."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    how, each = {
        "exchange": (exchange_experts, exchange_each),
        "hierarchical": (hierarchical_experts, hierarchical_each),
    }[way]
    mesh, axes = make_mesh(jax.devices()[:4], x=2, y=2), ("x", "y")
    options = dict(axes=axes, count=COUNT, ragged=ragged, slack=slack)
    specs = dict(mesh=mesh, in_specs=(P(axes),) * 3, out_specs=P(axes))
    random = np.random.default_rng(0)
    count = 4 * TOKENS
    x = jnp.asarray(random.normal(size=(count, EMBED)), jnp.float32)
    ids = random.permuted(np.tile(np.arange(4 * COUNT), (count, 1)), axis=1)[:, :CHOICES]
    ids[(np.arange(count) % TOKENS) < TOKENS // 2] = [0, 1]  # all of the first part to one device
    weights = jnp.asarray(random.random((count, CHOICES)), jnp.float32)
    put = lambda a: jax.device_put(a, P(axes))

    def in_parts(*arrays):
        parts = zip(*(jnp.split(a, 2) for a in arrays), strict=True)
        return jnp.concatenate(each(list(parts), compute, **options))

    at_once = lambda *arrays: how(*arrays, compute, **options)
    made = []
    for function in (at_once, in_parts):
        program = jax.shard_map(function, **specs)
        loss = lambda x, weights, program=program: (program(x, put(ids), weights) ** 2).sum()
        with jax.set_mesh(mesh):
            made.append(jax.jit(jax.value_and_grad(loss, (0, 1)))(put(x), put(weights)))
    for found, wanted in zip(jax.tree.leaves(made[1]), jax.tree.leaves(made[0]), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_batch_is_cut_where_it_is_and_together_again():
    with make_layout(MeshSizes(data=2), LayoutChoice(preset="data"), jax.devices()[:2]):
        x = shard(tr.named(jnp.arange(16.0).reshape(8, 2), "batch pos"), "compute")
        assert [parts_of(x, n) for n in (1, 2, 3, 8)] == [1, 2, 1, 4]
        parts = cut({"x": x, "whole": tr.named(jnp.ones(2), "pos"), "none": None}, 2)
        assert [tr.typeof(part["x"]) for part in parts] == ["f32[batch/data=4 pos=2]"] * 2
        back = lambda x: joined(cut(x, 2))
        assert ledger(back, x).rows == () and (back(x).array == x.array).all()


CONFIG = MixtralConfig(
    vocab=64, embed=16, layers=1, heads=2, kv_heads=2, head_dim=8, mlp=8, experts=4, experts_per_token=2,
    rope_theta=1e4, tie_embeddings=False, routing=Routing(way="slots"), shared_mlp=8,
)  # fmt: skip


@functools.cache
def moved(interleave: int, keep: Keep | None = None):
    config = dataclasses.replace(CONFIG, routing=dataclasses.replace(CONFIG.routing, interleave=interleave))
    with make_layout(MeshSizes(data=2, expert=2), LayoutChoice(preset="fsdp"), jax.devices()[:4]):
        model = jax.eval_shape(lambda: shard(config.init(key=jax.random.key(0), vocab_multiple=8), "params"))
        given = shard(Batch(**batch()).named(), "compute")
        loss = lambda model: batch_loss(model, given, StepOptions(policy=keep))[0].total
        return ledger(jax.grad(loss), model)


@pytest.mark.slow
def test_weights_move_once_for_all_parts():
    once, twice = moved(1), moved(2)
    of = lambda found: sorted((r.parameter, r.kind, r.what, r.wire, r.direction) for r in found if r.parameter)
    assert of(twice) == of(once) and len(of(once)) > 20
    exchanged = lambda found: [r for r in found if r.kind == "all-to-all" and r.times == 1 and not r.note]
    assert {r.parts for r in exchanged(once)} == {1} and {r.parts for r in exchanged(twice)} == {2}
    assert sum(r.wire for r in exchanged(twice)) == sum(r.wire for r in exchanged(once))


@pytest.mark.slow
def test_weights_of_experts_are_kept_where_they_are_named():
    """Then they are gathered once a step; not with all that is marked, which would fill the memory."""
    weights = ("mlp.gate", "mlp.up", "mlp.down")

    def again(keep):
        rows = [r for r in moved(1, keep) if r.kind == "all-gather" and r.direction == "recomputed"]
        return sorted(r.parameter for r in rows if r.parameter.endswith(weights))

    assert [name.rpartition(".")[2] for name in again(saved)] == ["down", "gate", "up"]
    assert again(only("mlp_gate", "mlp_up", "expert_weights")) == []


def test_refused():
    with pytest.raises(UserError) as error:
        Routing(interleave=0)
    assert str(error.value) == (
        "`interleave` must be 1 or more.\n  seen:  interleave=0\n  where: model.routing.interleave\n  fix:   use 1 "
        "for all sequences together, 2 to exchange one half while the other is computed"
    )
