"""The loss by name: what accelerators get besides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import nn
from trellis.inspect import flops
from trellis.mesh.layout import Layout
from trellis.mesh.meshes import make_mesh
from trellis.mesh.topology import slice_devices
from trellis.named import NamesError, named, shard, vmap
from trellis.nn.loss import next_token
from trellis.nn.loss.next_token import next_token_loss, tied


def traced(loss, pos: int) -> str:
    """The gradient's program on four TPUs, of a sequence of 16 wide states each against a table of 32 sliced words."""
    layout = Layout(make_mesh(slice_devices("v5e:2x2"), data=4), params={"vocab": "data"}, compute={"batch": "data"})

    def array(shape, dtype, names, which):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(names, which))

    with layout:
        arrays = (
            array((4, pos, 16), jnp.float32, ("batch", "pos", "embed"), "compute"),
            array((32, 16), jnp.float32, ("vocab", "embed"), "params"),
            array((4, pos), jnp.int32, ("batch", "pos"), "compute"),
        )
        return str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arrays))


def total(x, w, targets):
    return next_token_loss(named(x, "batch pos embed"), named(w, "vocab embed"), named(targets, "batch pos")).total


@pytest.mark.parametrize("pos", [8, 32])
def test_the_sum_of_the_unembeddings_gradient_comes_before_the_layers(pos):
    """On a TPU slice the reduction's result and the hidden states' gradient go through one fence."""
    fences = [line for line in traced(total, pos).splitlines() if "optimization_barrier" in line]
    assert any(f"f32[4@data,{pos},16]" in fence and "f32[32@data,16]" in fence for fence in fences)


@pytest.mark.slow
def test_few_tokens_gather_the_table_in_chunks():
    """Up to as many tokens on a device as the table is wide; for more it is gathered whole."""
    assert "all_gather" in traced(total, 16) and "all_gather" not in traced(total, 17)
    assert "reduced={'data'}" in traced(total, 17) and "reduced={'data'}" not in traced(total, 16)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "pos", "times"), [(8, 3, 1), (2, 8, 1), (2, 3, 4)])
def test_no_logits_are_made_twice_where_channels_are_sliced(batch, pos, times):
    """The mesh axes of channels slice the sequences, or their positions, if they divide them."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (batch, pos, 16)), jax.random.normal(keys[1], (32, 16))
    targets = jax.random.randint(keys[2], (batch, pos), 0, 32)
    table = lambda w: tied(named(w, "vocab embed"), named(targets, "batch pos")).array
    both = jax.value_and_grad(lambda x, w: total(x, table(w), targets), (0, 1))
    alone = jax.jit(both).lower(x, w).compile()
    with Layout(make_mesh(data=2, model=4), params={"embed": "model"}, compute={"batch": "data", "embed": "model"}):
        there = shard(named(x, "batch pos embed"), "compute").array, shard(named(w, "vocab embed")).array
        sliced = jax.jit(both).lower(*there).compile()
    assert flops(sliced) * 8 == flops(alone) * times
    for found, wanted in zip(jax.tree.leaves(sliced(*there)), jax.tree.leaves(alone(x, w)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("params", [{"vocab": "data"}, {"embed": ("data", "replica")}], ids=["words", "columns"])
def test_what_accelerators_do_equals_one_device(params, monkeypatch):
    """As on an accelerator, on CPU devices: the table in chunks, copies of it over replicas, one fence."""
    monkeypatch.setattr(next_token, "on_accelerator", lambda x: True)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = (
        jax.random.normal(keys[0], (8, 8, 16)),
        jax.random.normal(keys[1], (32, 16)),
        jax.random.randint(keys[2], (8, 8), 0, 32),
    )
    run = jax.value_and_grad(total, (0, 1))
    wanted = jax.jit(run)(*arrays)
    layout = Layout(make_mesh(replica=2, data=4), params=params, compute={"batch": ("replica", "data")})
    names = ("batch", "pos", "embed"), ("vocab", "embed"), ("batch", "pos")
    with layout:
        placed = [
            jax.device_put(a, layout.sharding(n, "params" if "vocab" in n else "compute"))
            for a, n in zip(arrays, names, strict=True)
        ]
        assert "all_gather" in str(jax.make_jaxpr(run)(*placed))
        found = jax.jit(run)(*placed)
        assert found[1][1].sharding.spec == placed[1].sharding.spec
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "compute", [{"example": "data", "vocab": "model"}, {"batch": "data", "vocab": "model"}], ids=str
)
def test_a_loss_of_each_example_that_is_mapped(compute):
    rng = np.random.default_rng(0)
    hidden = named(rng.normal(size=(4, 2, 4, 8)).astype(np.float32), "example batch pos embed")
    table = named(rng.normal(size=(16, 8)).astype(np.float32), "vocab embed")
    targets = named(rng.integers(0, 13, (4, 2, 4)).astype(np.int32), "example batch pos")

    def losses(hidden, table, targets):
        one = lambda h, t: next_token_loss(h, table, t, z_loss=0.1, logit_softcap=3.0, vocab_size=13).total
        return jnp.sum(vmap(lambda h, t: named(one(h, t), ""), "example")(hidden, targets).array ** 2)

    run = jax.jit(jax.value_and_grad(losses, (0, 1)))
    wanted = run(hidden, table, targets)
    with Layout(make_mesh(jax.devices()[:4], data=2, model=2), params={"embed": "data"}, compute=compute):
        found = run(shard(hidden, "compute"), shard(table), shard(targets, "compute"))
        with pytest.raises(TypeError, match="unexpected keyword argument 'z_los'"):
            vmap(lambda h, t: next_token_loss(h, table, t, z_los=0.1), "example")(hidden, targets)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_weights_that_depend_on_the_model_and_arrays_that_are_on_no_mesh():
    """A focal loss, whose weights have a gradient; whatever is on no mesh is whole on it, biases too."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    given = named(draw(8, 4, 8), "batch pos embed"), named(draw(16, 8), "vocab embed"), named(draw(16), "vocab")
    targets = named(rng.integers(0, 16, (8, 4)).astype(np.int32), "batch pos")

    def focal(nats):
        return (1 - tr.exp(-nats)) ** 2.0

    def by_formula(hidden, table, bias):
        nats = nn.cross_entropy(tr.dot(hidden, table, over="embed") + bias, targets)
        return (focal(nats) * nats).sum().array / focal(nats).sum().array

    def by_loss(hidden, table, bias):
        nats = nn.cross_entropy(tr.dot(hidden, table, over="embed") + bias, targets)
        sums = next_token_loss(hidden, table, targets, focal(nats), bias=bias)
        return sums.total / sums.tokens

    run = lambda loss: jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*given)
    wanted = run(by_formula)
    found = [run(by_loss)]
    with Layout(make_mesh(data=2, model=4), params={"embed": "data"}, compute={"batch": "data", "vocab": "model"}):
        assert "all-reduce  model" in str(tr.ledger(by_loss, *given))
        found.append(run(by_loss))
    for each in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), each, wanted)


@pytest.mark.parametrize("option", ["z_loss", "logit_softcap"])
def test_numbers_that_would_lose_their_gradient_are_refused(option):
    arrays = named(jnp.ones((1, 4, 8)), "batch pos embed"), named(jnp.ones((16, 8)), "vocab embed")
    targets = named(jnp.zeros((1, 4), jnp.int32), "batch pos")
    loss = lambda number: next_token_loss(*arrays, targets, **{option: number}).total
    assert loss(jnp.float32(0.5)) == loss(0.5)
    with pytest.raises(
        NamesError, match=f"{option} must be a number that is known while the program is traced, got f32"
    ):
        jax.grad(loss)(jnp.float32(0.5))
    q, k = named(jnp.ones((1, 4, 2, 8)), "batch pos heads head_dim"), jnp.ones((1, 4, 2, 8))
    k = named(k, "batch key_pos kv_heads head_dim")
    with pytest.raises(
        NamesError, match="logit_softcap must be a number that is known .*, in attention: pass a Python number"
    ):
        jax.grad(lambda cap: nn.attend(q, k, k, logit_softcap=cap).sum().array)(jnp.float32(0.5))
    angles = lambda theta: nn.rotary_tables(tr.arange(tr.Axis("pos", 4)), tr.Axis("head_dim", 8), theta)
    with pytest.raises(
        NamesError, match="theta must be a number that is known .*, in rotary_tables: pass a Python number"
    ):
        jax.grad(lambda theta: nn.rotate(q, angles(theta)).sum().array)(jnp.float32(1e4))


@pytest.mark.parametrize("name", ["vocab", "embed"])
def test_words_and_channels_in_slices_are_refused_in_a_manual_program(name):
    """Where each device would sum over its own only, and nothing would tell."""
    of = lambda names: " ".join(f"{n}/model" if n == name else n for n in names.split())

    @tr.shard_map
    def program(x: tr.f32[of("batch pos embed")], w: tr.f32[of("vocab embed")], y: tr.i32["batch pos"]) -> tr.f32[""]:
        return next_token_loss(x, w, y).total

    mesh = make_mesh(jax.devices()[:2], model=2)
    sizes = {"batch": 2, "pos": 4, "embed": 8, "vocab": 16}
    put = lambda names, dtype: named(
        jax.device_put(
            jnp.zeros([sizes[n] for n in names.split()], dtype),
            jax.NamedSharding(mesh, jax.P(*("model" if n == name else None for n in names.split()))),
        ),
        names,
    )
    with jax.set_mesh(mesh), pytest.raises(NamesError, match=f"needs the whole of '{name}'"):
        program(put("batch pos embed", jnp.float32), put("vocab embed", jnp.float32), put("batch pos", jnp.int32))


def test_tokens_and_targets_in_other_slices_are_refused_in_a_manual_program():
    """Of the same size on each device, so that no shape tells."""

    @tr.shard_map
    def program(
        x: tr.f32["batch/data pos embed"], w: tr.f32["vocab embed"], y: tr.i32["batch/model pos"]
    ) -> tr.f32[""]:
        return next_token_loss(x, w, y).total

    x, w, y = np.zeros((4, 3, 8), np.float32), np.zeros((16, 8), np.float32), np.zeros((4, 3), np.int32)
    with (
        jax.set_mesh(make_mesh(jax.devices()[:4], data=2, model=2)),
        pytest.raises(NamesError, match="sliced the same way in all operands, got batch over data and over model"),
    ):
        program(named(x, "batch pos embed"), named(w, "vocab embed"), named(y, "batch pos"))
