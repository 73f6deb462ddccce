"""Named arrays beside NumPy, Python, Equinox, Optax and JAX's own tools."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trellis as tr
from trellis.named import NamesError
from trellis.notation import PendingSumError


@pytest.fixture(params=["none", "explicit", "auto"])
def x(request):
    made = lambda: tr.named(jnp.arange(32.0).reshape(8, 4), "b e")
    if request.param == "none":
        yield made()
        return
    with tr.Layout(tr.make_mesh(data=4, model=2, axis_type=request.param), compute={"b": "data", "e": "model"}):
        yield tr.shard(made(), "compute")


def test_numpy(x):
    plain = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    for seen in (np.asarray(x), np.array(x), np.array(x, copy=True), np.asarray(x, dtype=np.float64)):
        assert isinstance(seen, np.ndarray) and seen.shape == (8, 4)
        np.testing.assert_array_equal(seen, plain)
    np.testing.assert_allclose(x, plain)
    np.testing.assert_allclose(plain, x)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(x, plain + 1)
    assert x.tolist() == plain.tolist() and x["b", 1, "e", 2].item() == 6.0
    assert float(np.mean(np.asarray(x))) == plain.mean()
    assert isinstance(np.float32(2) * x, tr.NamedArray) and (np.float32(2) * x).names == x.names


def test_python(x):
    one = x["b", 1, "e", 1]
    assert f"{one:.3f}" == "5.000" and f"{one:>8.1f}" == "     5.0" and float(one) == 5.0 and int(one) == 5
    assert bool(one == 5) and round(float(one)) == 5
    with pytest.raises(NamesError, match="only a scalar can be formatted"):
        f"{x:.3f}"
    assert x.block_until_ready() is x and jax.block_until_ready(x).names == x.names
    for other in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert other.names == x.names and other is not x
        np.testing.assert_array_equal(other, x)
    with pytest.raises(TypeError):
        hash(x)


@pytest.mark.slow
def test_equinox_and_optax(x):
    class Model(eqx.Module):
        weight: tr.NamedArray
        name: str = eqx.field(static=True, default="model")

        def __call__(self, x):
            return (tr.dot(x, self.weight, over="e") ** 2).sum().array

    model = Model(tr.ones({"e": 4, "o": 2}))
    loss = eqx.filter_jit(lambda model, x: model(x))
    assert loss(model, x) == pytest.approx(float((np.asarray(x).sum(1) ** 2).sum() * 2))
    value, gradient = eqx.filter_value_and_grad(lambda model, x: model(x))(model, x)
    assert gradient.weight.names == ("e", "o") and value > 0
    assert eqx.filter_jit(eqx.filter_grad(lambda m, x: m(x)))(model, x).weight.shape == {"e": 4, "o": 2}
    optimizer = optax.adamw(1e-1)
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        updates, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_array))
    stepped = eqx.apply_updates(model, updates)
    assert stepped.weight.names == ("e", "o") and stepped(x) < value
    assert float(optax.tree.norm(gradient)) > 0
    assert eqx.tree_equal(model, copy.deepcopy(model))


def test_debug_print(x, capfd):
    @jax.jit
    def f(x):
        jax.debug.print("the sum is {s}, of {x}", s=x.sum(), x=x["b", 0])
        return x

    f(x)
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert "the sum is f32[]" in out and "496" in out and "[0. 1. 2. 3.]" in out


@pytest.mark.slow(but=1)
def test_printing_never_fails(x):
    seen = []
    note = lambda y: seen.append((repr(y), str(y), f"{y}")) or y
    note(x)
    jax.jit(note)(x)
    jax.grad(lambda x: note(x).sum().array)(x)
    jax.vmap(note)(x)
    jax.lax.map(note, tr.shard(x, {}) if tr.typeof(x).count("/") else x)
    tr.vmap(note, "b")(x)
    jax.eval_shape(note, x)
    note(tr.abstract(x))
    note(jax.eval_shape(lambda x: x, x))
    note(jax.tree.map(jnp.sum, x))
    note(jax.tree.map(lambda _: None, x))
    note(jax.tree.map(lambda _: object(), x))
    note(jax.tree.map(np.asarray, x))
    note(jax.jacfwd(lambda a: x * a)(jnp.ones(())))
    note(tr.zeros({"none": 0}))
    note(tr.named(np.float32(1), ""))
    deleted = tr.named(jnp.ones(3) + 1, "a")
    deleted.array.delete()
    note(deleted)
    assert len(seen) >= 15 and all(all(each) for each in seen)


def test_gradients_of_named_scalars():
    """`trellis.grad` takes them as they are; `jax.grad` of one says what it is."""
    x = tr.ones({"a": 2})
    assert tr.grad(lambda x: (x * x).sum())(x).tolist() == [2.0, 2.0]
    value, gradient = tr.value_and_grad(lambda x: (x * x).sum())(x)
    assert float(value) == 2.0 and gradient.names == ("a",)
    with pytest.raises(NamesError, match=r"only a scalar can be differentiated, got f32\[a=2\]"):
        tr.grad(lambda x: x * x)(x)
    with pytest.raises(TypeError, match="a named array: its `.array` is JAX's scalar"):
        jax.jit(jax.grad(lambda x: x.sum()))(x)


def test_pending_sums_are_not_seen():
    with tr.Layout(tr.make_mesh(m=8), compute={"e": "m"}):
        x, w = tr.shard((tr.ones({"b": 2, "e": 16}), tr.ones({"e": 16})), "compute")
        y = tr.dot(x, w, over="e", settle=False)
        for see in (np.asarray, lambda y: float(y["b", 0]), lambda y: y.tolist(), lambda y: bool(y["b", 0])):
            with pytest.raises(PendingSumError, match=r"b \+m -> b"):
                see(y)
        assert "+m" in repr(y)


def test_star_import_leaves_pythons_names():
    space = {}
    exec("from trellis import *", space)
    import builtins

    assert not {n for n in space if hasattr(builtins, n) and not n.startswith("__")}
    assert "NamedArray" in space
