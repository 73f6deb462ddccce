"""Loops over names, stacked layers, what is kept for the backward pass, and random numbers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.named import saving


def numbers(**sizes):
    return tr.random.normal(jax.random.key(sum(sizes.values())), sizes)


def test_vmap_maps_arrays_that_have_the_name():
    x, w = numbers(batch=3, embed=4), numbers(embed=4)
    out = tr.vmap(lambda row, w: (row * w).sum("embed"), "batch")(x, w)
    assert out.names == ("batch",)
    np.testing.assert_allclose(out.array, x.array @ w.array, rtol=1e-5)
    moved = tr.vmap(lambda column: column.sum("batch"), "embed")(x)
    np.testing.assert_allclose(moved.array, x.array.sum(0), rtol=1e-5)


def test_vmap_refuses_two_sizes():
    with pytest.raises(tr.NamesError, match=r"got sizes \[2, 3\] for 'a'"):
        tr.vmap(lambda x, y: x, "a")(numbers(a=2), numbers(a=3))


@pytest.mark.slow
def test_scan_fold_and_map():
    x = numbers(layers=4, embed=3)
    carry, sums = tr.scan(lambda c, row: (c + row, (c * row).sum()), "layers")(tr.zeros({"embed": 3}), x)
    np.testing.assert_allclose(carry.array, x.array.sum(0), rtol=1e-5)
    assert sums.names == ("layers",)
    last = tr.fold(lambda c, row: c * 0.5 + row, "layers", reverse=True)(tr.zeros({"embed": 3}), x)
    expected = 0
    for row in x.array[::-1]:
        expected = expected * 0.5 + row
    np.testing.assert_allclose(last.array, expected, rtol=1e-5)
    np.testing.assert_allclose(tr.map(lambda row: row * 2.0, "layers")(x).array, x.array * 2, rtol=1e-6)
    carry, sums = tr.scan(lambda c, row: (c + row, row.sum()), "layers")(x["layers", 0], tr.zeros({"layers": 0}))
    assert sums.shape == {"layers": 0}


class Block(eqx.Module):
    w: tr.NamedArray

    def __call__(self, x, scale):
        h = tr.save(tr.einsum("batch embed, embed out -> batch out", x, self.w), "hidden")
        return x + tr.tanh(h).rename(out="embed") * scale


@pytest.fixture
def layers():
    make = lambda key: Block(tr.random.normal(key, {"embed": 4, "out": 4}))
    stacked = tr.Stacked.init(make, tr.Axis("layers", 3), key=jax.random.key(0))
    unrolled = tr.Stacked.init(make, tr.Axis("layers", 3), key=jax.random.key(0), unrolled=True)
    return stacked, unrolled


@pytest.mark.slow
def test_stacked_layers_equal_their_unrolled_twin(layers):
    x = numbers(batch=2, embed=4)
    assert layers[0].block.w.names == ("layers", "embed", "out")

    def loss(layers, x):
        return (layers.fold(x, 0.5) ** 2.0).sum().array

    results = [jax.value_and_grad(loss)(one, x) for one in layers]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *(jax.tree.leaves(r[1]) for r in results)
    )
    scales = tr.arange(layers[0].axis, dtype=jnp.float32)
    for one in layers:
        out, ys = one.scan(x, each=(scales,), call=lambda layer, x, s: (layer(x, s), x.sum()))
        assert ys.shape == {"layers": 3}
        assert out.names == x.names


@pytest.mark.slow
def test_layers_taken_apart_equal_their_stack(layers):
    """Cut out of the stack outside of a loop that uses them more than once; their gradients are stacked there."""
    stack, x, scales = layers[0], numbers(batch=2, embed=4), tr.arange(layers[0].axis, dtype=jnp.float32)

    def loss(layers, x):
        x, squares = layers.scan(x, each=(scales,), call=lambda layer, x, s: (layer(x, s), (x * x).sum()))
        return (x * x).sum().array + (squares * scales).sum().array

    def twice(layers, take):
        used, pull = jax.vjp(take, layers)
        add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(used, x)), None)
        return pull(
            jax.lax.scan(add, jax.tree.map(jnp.zeros_like, used), jax.tree.map(lambda a: jnp.stack([a, a]), x))[0]
        )

    seen, wanted = twice(stack, lambda s: s.apart()), twice(stack, lambda s: s)
    np.testing.assert_allclose(*(jax.tree.leaves(found)[0] for found in (seen, wanted)), rtol=1e-5, atol=1e-5)
    inside = jax.make_jaxpr(lambda s: twice(s, lambda s: s.apart()))(stack).jaxpr
    (body,) = [equation.params["jaxpr"] for equation in inside.eqns if equation.primitive.name == "scan"]
    assert inside.invars[0].aval.shape == (3, 4, 4)
    assert "f32[3,4,4]" not in str(body)
    assert layers[1].apart() is layers[1]
    np.testing.assert_array_equal(stack.apart().layer(1).w.array, stack.layer(1).w.array)


def test_stacked_layers_are_traced_once():
    calls = []

    class Counting(eqx.Module):
        w: tr.NamedArray

        def __call__(self, x):
            calls.append(1)
            return x * self.w

    stacked = tr.Stacked(Counting(tr.ones({"layers": 8, "embed": 2})), tr.Axis("layers", 8))
    jax.jit(lambda x: stacked.fold(x))(tr.ones({"embed": 2}))
    assert len(calls) == 1


@pytest.mark.slow
def test_a_loop_written_out_stacks_nothing_but_the_gradients_of_its_parameters():
    """`lax.scan` unrolled would also stack what each layer keeps, and take it apart again."""
    block = Block(numbers(layers=3, embed=4, out=4))
    written, looped = (tr.Stacked(block, tr.Axis("layers", 3), unroll=n) for n in (3, 1))
    scales = tr.arange(tr.Axis("layers", 3), dtype=jnp.float32)

    def loss(one, x):
        x, squares = one.scan(x, each=(scales,), call=lambda layer, x, s: (layer(x, s), (x * x).sum()))
        return (x * x).sum().array + (squares * scales).sum().array

    x = numbers(batch=2, embed=4)
    results = [jax.value_and_grad(loss, (0, 1))(one, x) for one in (written, looped)]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # of what tanh saturates, little is left
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(written, x))
    assert "scan[" not in text and "pad[" not in text and "scatter" not in text
    stacks = [line for line in text.splitlines() if "= concatenate[" in line]
    assert len([line for line in stacks if "f32[3,4,4]" in line]) == 1
    assert not [line for line in stacks if "f32[3,2,4]" in line]  # the layers' inputs
    backwards = [
        tr.fold(lambda c, row: c * 0.5 + row, "layers", reverse=True, unroll=n)(tr.zeros({"embed": 4}), x)
        for n in (1, 3)
        for x in [numbers(layers=3, embed=4)]
    ]
    np.testing.assert_allclose(*(b.array for b in backwards), rtol=1e-6)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("policy", "kept"),
    [(saving.nothing, 0), (saving.saved, 1), (saving.only("hidden"), 1), (saving.only("other"), 0)],
)
def test_policies_keep_what_they_name(layers, policy, kept, capsys):
    x = numbers(batch=2, embed=4)
    plain = jax.jit(jax.grad(lambda one: (one.fold(x, 0.5) ** 2.0).sum().array))(layers[1])

    def loss(one):
        return (one.fold(x, 0.5, policy=policy) ** 2.0).sum().array

    again = jax.grad(loss)(layers[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), plain, again)
    jax.ad_checkpoint.print_saved_residuals(loss, layers[1])
    named = [line for line in capsys.readouterr().out.splitlines() if "named 'hidden'" in line]
    assert len(named) == kept * 3


@pytest.mark.parametrize(
    ("policy", "kept"),
    [(saving.saved, 0), (saving.only("large"), 1), (saving.only("other"), 0), (saving.Keep(offload=None), 0)],
)
def test_what_is_kept_if_named_is_not_kept_with_all_that_is_marked(policy, kept, capsys):
    marked = lambda x: tr.save(tr.save(x * x, "large", if_named=True) * x, "other").sum().array
    jax.ad_checkpoint.print_saved_residuals(saving.checkpoint(marked, policy), numbers(batch=2))
    assert capsys.readouterr().out.count("named 'large if named'") == kept


@pytest.mark.slow
def test_products_are_kept_as_what_their_partial_sums_settle_to():
    """A loop over layers cannot stack partial sums. What they settle to is kept, so nothing is sent again."""

    def loss(weights, x, policy=None):
        def layer(x, w):
            hidden = tr.tanh(tr.einsum("batch embed, embed mlp -> batch mlp", x, w["up"]))
            return tr.tanh(tr.einsum("batch mlp, mlp embed -> batch embed", hidden, w["down"]))

        return tr.fold(layer, "layers", policy=policy)(x, weights).sum().array

    x = numbers(batch=4, embed=8)
    weights = {"up": numbers(layers=2, embed=8, mlp=16), "down": numbers(layers=2, mlp=16, embed=8)}
    alone = jax.grad(loss)(weights, x)
    with tr.Layout(tr.make_mesh(jax.devices()[:2], model=2), {"mlp": "model"}, {"mlp": "model"}):
        args = tr.shard(weights, "params"), tr.shard(x, "compute")
        policies = (None, saving.products, saving.nothing)
        programs = [lambda w, x, policy=policy: jax.grad(loss)(w, x, policy) for policy in policies]
        found = [tr.named_jit(program)(*args) for program in programs]
        moved = [sum(row.times * row.payload for row in tr.ledger(program, *args)) for program in programs]
    for gradients in found:
        for name in weights:
            np.testing.assert_allclose(jax.device_get(gradients[name].array), alone[name].array, rtol=1e-4, atol=1e-6)
    assert moved[0] == moved[1] < moved[2]


@pytest.mark.slow
def test_marked_values_may_wait_in_the_hosts_memory(layers):
    """All of them where no names are given."""
    x = numbers(batch=2, embed=4)

    def loss(one, policy):
        return (one.fold(x, 0.5, policy=policy) ** 2.0).sum().array

    plain = jax.grad(loss)(layers[1], saving.nothing)
    for policy, there in [
        (saving.Keep(offload=None), True),
        (saving.only(offload=("hidden",)), True),
        (saving.only("hidden", offload=("other",)), False),
    ]:
        again = jax.jit(jax.grad(loss), static_argnums=1)(layers[1], policy)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, again)
        program = jax.make_jaxpr(lambda one, policy=policy: jax.grad(loss)(one, policy))(layers[1])
        assert ("MemorySpace.Host" in str(program)) == there


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}])
def test_random_numbers_are_the_same_on_every_mesh(sizes):
    axes = {"embed": 16, "mlp": 32}
    key = jax.random.key(7)
    draws = {
        "normal": lambda: tr.random.normal(key, axes),
        "truncated": lambda: tr.random.truncated_normal(key, axes, -2.0, 2.0),
        "bernoulli": lambda: tr.random.bernoulli(key, axes, 0.3),
        "randint": lambda: tr.random.randint(key, axes, minval=0, maxval=9),
    }
    alone = {name: jax.jit(draw)().array for name, draw in draws.items()}
    layout = tr.Layout(
        tr.make_mesh(**sizes), compute={"embed": "data", "mlp": "model"} if len(sizes) > 1 else {"embed": "data"}
    )
    with layout:
        for name, draw in draws.items():
            drawn = tr.named_jit(draw)()
            assert drawn.array.sharding.spec[0] == "data"
            np.testing.assert_array_equal(drawn.array, alone[name])


def test_dropout_keeps_the_mean():
    x = tr.ones({"a": 100, "b": 100})
    dropped = tr.random.dropout(jax.random.key(0), x, 0.25)
    assert set(np.unique(dropped.array)) == {np.float32(0), np.float32(1 / 0.75)}
    np.testing.assert_allclose(dropped.mean().array, 1.0, atol=0.02)
    assert tr.random.dropout(jax.random.key(0), x, 0.0) is x


def test_categorical_follows_the_logits():
    logits = tr.named(jnp.log(jnp.array([0.2, 0.8])), "vocab").broadcast_to({"draw": 4000, "vocab": 2})
    ones = tr.random.categorical(jax.random.key(0), logits, "vocab")
    np.testing.assert_allclose(ones.astype(jnp.float32).mean().array, 0.8, atol=0.03)
    alike = tr.random.categorical(jax.random.key(0), tr.zeros({"draw": 4000, "vocab": 2}, jnp.int32), "vocab")
    np.testing.assert_allclose(alike.astype(jnp.float32).mean().array, 0.5, atol=0.03)
