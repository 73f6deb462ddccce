"""What goes wrong is told in the notation, in four parts, and what can go right does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import nn
from trellis.mesh import MeshError
from trellis.named import NamesError
from trellis.notation import NotationError, PendingSumError, TypeMismatch

KEY = jax.random.key(0)


def _x():
    return tr.named(jnp.arange(6.0).reshape(2, 3), "h w")


@pytest.mark.parametrize(
    "use, said",
    [
        (lambda: tr.zeros("a b"), "new axes must have names and sizes, got 'a b', in zeros"),
        (lambda: tr.Stacked.init(lambda k: k, "layers", key=KEY), "got 'layers'"),
        (lambda: _x().sum(0), "a dimension must be given by its name, got 0"),
        (lambda: _x().sum(axis=0), None),
        (lambda: tr.softmax(_x(), 1), "a dimension must be given by its name, got 1"),
        (lambda: tr.dot(_x(), _x(), over="k"), "k"),
        (lambda: tr.vmap(lambda x: x, "k")(_x()), "no array with it"),
        (lambda: tr.random.split(KEY, "k"), "pass a name and a count"),
        (lambda: tr.Layout(tr.make_mesh(data=8), compute={"b": "nosuch"}), "nosuch"),
        (lambda: tr.Layout(tr.make_mesh(data=8), compute={"b": "data/data"}), "over a mesh axis twice"),
        (lambda: tr.checkpoint(lambda x: x, "hidden"), "a policy must be a Keep"),
        (lambda: tr.arange(tr.Axis("a", 3), step=0.5), "a whole start and step, got start=0 and step=0.5 for int32"),
        (lambda: tr.scan(lambda c, x: (c + x.sum(), None), "h")(0.0, _x()), "got f32[] (a named array) for f32[]"),
        (lambda: tr.cond(True, lambda: _x().sum(), lambda: 1.0), "got f32[] (a named array) and f32[], in cond"),
        (lambda: tr.cond(True, lambda x, s: x, lambda x, s: x, _x(), "s"), "cond can only take and return arrays"),
        (lambda: tr.while_loop(lambda c: c[0], lambda c: c, (True, "s")), "while_loop can only take and return arrays"),
        (lambda: tr.while_loop(lambda c: c[0], lambda c: ("s", 1), (True, 1)), "got 's', in while_loop: let the"),
        (
            lambda: tr.scan(lambda c, x: (c, "s"), "h")(0.0, _x()),
            "got 's', in scan: let the function",
        ),
        (lambda: tr.scan(lambda c, x: (c, x), "h")(jnp.tanh, _x()), "arrays and numbers, got <"),
        (lambda: tr.vmap(lambda x: (x, "s"), "h")(_x()), "arrays and numbers, got 's', in vmap"),
        (
            lambda: tr.grad(lambda x: x[0].sum())((_x(), "s")),
            "floats can be differentiated, got 's' in argument 0",
        ),
        (lambda: tr.grad(3), "grad takes a function, got 3"),
        (lambda: tr.grad(lambda x: x.sum(), (0, -1))(_x()), "argnums must have each argument once, got (0, -1)"),
        (lambda: nn.cross_entropy(_x(), tr.zeros({"h": 2}, "int32")), "no dimension 'vocab', got f32[h=2 w=3]"),
        (lambda: iter(_x()), "cannot be iterated by position"),
        (lambda: _x()[0], "must be indexed by name"),
        (lambda: _x() @ _x(), None),
    ],
)
def test_mistakes_are_told(use, said):
    with pytest.raises((NamesError, TypeMismatch, NotationError, MeshError, TypeError)) as error:
        use()
    if said is not None:
        assert said in str(error.value)
        assert isinstance(error.value, tr.TrellisError)


@pytest.mark.slow
def test_what_stood_in_the_way_works():
    x, mask = _x(), tr.named(jnp.array([True, False, True]), "w")
    whole = tr.softmax(x, ("h", "w"))
    np.testing.assert_allclose(whole.sum(), 1.0, rtol=1e-6)
    masked = tr.softmax(x, "w", where=mask)
    np.testing.assert_allclose(masked, jax.nn.softmax(x.array, axis=1, where=mask.array))
    drawn = tr.random.randint(KEY, {"a": 100}, 0, 3)
    assert set(drawn.tolist()) == {0, 1, 2}
    assert tr.Keep("hid").names == ("hid",)
    order = tr.random.permutation(KEY, tr.Axis("w", 3))
    assert sorted(x["w", order]["h", 0].tolist()) == [0, 1, 2]
    mesh = tr.make_mesh(a=4, b=2)
    for entry, axes in ((None, ()), ("a/b", ("a", "b")), (("b", "a"), ("b", "a")), ("a", ("a",))):
        assert tr.Layout(mesh, compute={"w": entry}).assign(("w",)) == (axes,)
    layers = tr.ones({"layers": 3})
    folded = tr.fold(lambda x, _: tr.sin(x), "layers", policy=jax.checkpoint_policies.nothing_saveable)
    assert jax.grad(lambda x: folded(x, layers).sum().array)(x).names == ("h", "w")
    named = jax.jacfwd(lambda a: x * a)(jnp.ones(()))
    np.testing.assert_allclose(named.array, x.array)


@pytest.mark.slow
@pytest.mark.parametrize("compute", [{"w": "m"}, {"h": "m"}, {"w": "m", "h": "d"}])
@pytest.mark.parametrize("name", ["prod", "sort", "cumsum", "max", "argsort_values", "top_k", "median_like", "cumprod"])
def test_gradients_on_sliced_names(name, compute):
    functions = {
        "prod": lambda x: tr.prod(x + 1, "w"),
        "sort": lambda x: tr.sort(x, "w") ** 2,
        "cumsum": lambda x: tr.cumsum(x, "w") ** 2,
        "cumprod": lambda x: tr.cumprod(x + 1, "w"),
        "max": lambda x: x.max("w") ** 2,
        "argsort_values": lambda x: tr.take_along(x, "w", tr.argsort(x, "w")["w", 0:2]) ** 2,
        "top_k": lambda x: tr.top_k(x, "w", 2)[0] ** 2,
        "median_like": lambda x: tr.sort(x, "w")["w", 2] ** 2,
    }
    f = lambda x: functions[name](x).sum().array
    plain = tr.named(jnp.asarray(np.random.default_rng(0).random((4, 4), np.float32)), "h w")
    gradient = jax.grad(f) if compute == {"w": "m"} else jax.jit(jax.grad(f))
    expected = jax.jit(jax.grad(f))(plain)
    with tr.Layout(tr.make_mesh(d=4, m=2), compute=compute):
        np.testing.assert_allclose(gradient(tr.shard(plain, "compute")), expected, rtol=1e-4)


def test_pending_scalars_say_what_to_write():
    with tr.Layout(tr.make_mesh(m=8), compute={"e": "m"}):
        x = tr.shard(tr.ones({"e": 16}), "compute")
        y = tr.dot(x, x, over="e", settle=False)
        with pytest.raises(PendingSumError, match=r'float\(\).*reshard\("\+m -> "'):
            float(y)


def test_manual_functions_take_numpy_leading_dimensions_and_numbers():
    @tr.shard_map
    def scaled(x: tr.f32["... i"], by: tr.f32[""] = 2.0) -> tr.f32["b/data i"]:
        return x * by

    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}):
        x = tr.shard(tr.ones({"b": 8, "i": 4}), "compute").array
        np.testing.assert_array_equal(scaled(x), np.full((8, 4), 2.0))
        np.testing.assert_array_equal(scaled(x, np.float32(3)), np.full((8, 4), 3.0))


def test_manual_sums_by_name_become_pending():
    @tr.shard_map
    def total(x: tr.f32["b/data i"]) -> tr.f32["i"]:
        local = tr.named(x, "b/data i").sum("b")
        assert tr.typeof(local) == "f32[i=4 +data]"
        return tr.reshard("i +data -> i", local).array

    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}):
        np.testing.assert_array_equal(total(np.ones((8, 4), np.float32)), np.full(4, 8.0))


USES = {
    "call": lambda fn, *args: tr.named_jit(fn)(*args),
    "lower": lambda fn, *args: tr.named_jit(fn).lower(*args),
    "ledger": tr.ledger,
    "memory": tr.memory,
}


@pytest.mark.parametrize("use", USES)
def test_what_jax_refuses_of_plain_arrays_in_slices_is_told_wherever_a_program_is_read(use):
    ones, axes = jnp.ones((1, 1, 4, 4)), ("NHWC", "HWIO", "NHWC")
    convolved = lambda x: jax.lax.conv_general_dilated(x.array, ones, (1, 1), "SAME", dimension_numbers=axes)
    summed = lambda x: jax.ops.segment_sum(x.array, jnp.arange(2), num_segments=3)
    chosen = lambda x: jax.lax.switch(x.array.size, [lambda x: x, lambda x: tr.shard(x, {}), lambda x: -x], x)
    mapped = lambda x: jax.lax.map(lambda row: row + 1, x)
    with tr.Layout(tr.make_mesh(data=2, model=4), compute={"batch": "data", "chan": "model"}):
        x = tr.shard(tr.ones({"batch": 2, "h": 2, "w": 2, "chan": 4}), "compute")
        for fn in (convolved, summed, chosen, mapped):
            with pytest.raises(
                MeshError, match=r"knows how the result is sliced.*in test_errors_tell.py:\d+: use named"
            ):
                USES[use](fn, x)


@pytest.mark.parametrize("use", USES)
def test_what_jax_refuses_of_a_backward_rule_is_told_wherever_a_program_is_read(use):
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    @tr.shard_map
    def unsummed(x: tr.f32["batch/data in"], w: tr.f32["in out"]) -> tr.f32["batch/data out"]:
        return product(x, w)

    mesh = tr.make_mesh(data=8)
    with jax.set_mesh(mesh):
        x, w = jnp.ones((8, 2), out_sharding=jax.P("data")), jnp.ones((2, 2), out_sharding=jax.P())
        with pytest.raises(TypeMismatch, match=r"return jax.lax.psum\(gradient, \('data',\)\)"):
            USES[use](jax.grad(lambda w, x: unsummed(x, w).sum()), w, x)


def test_a_rule_of_ones_own_whose_gradient_has_other_names_is_told():
    w, x = tr.ones({"embed": 4, "mlp": 2}), tr.ones({"batch": 2, "embed": 4})
    dot = lambda w, x: tr.dot(x, w, over="embed")

    def grad(backward):
        product = jax.custom_vjp(dot)
        product.defvjp(lambda w, x: (dot(w, x), (w, x)), lambda kept, gradient: backward(*kept))
        return tr.grad(lambda w: product(w, x).sum())(w)

    message = "a gradient for each argument, of its names in their order, got {} for 'embed mlp' and 'batch embed', in"
    with pytest.raises(TypeMismatch, match=message.format("'mlp embed' and 'batch embed'")):
        grad(lambda w, x: (w.rearrange("embed mlp -> mlp embed"), x))
    with pytest.raises(TypeMismatch, match=message.format("'embed mlp'")):
        grad(lambda w, x: (w,))

    square = jax.custom_jvp(lambda w: w * w)
    square.defjvp(lambda at, to: (square(*at), (2 * at[0] * to[0]).rename(mlp="heads")))
    with pytest.raises(TypeMismatch, match="a tangent for each result.*, got 'embed heads' for 'embed mlp', in"):
        tr.grad(lambda w: square(w).sum())(w)


@pytest.mark.slow
def test_a_map_in_manual_mode_may_settle_a_sum():
    @tr.shard_map
    def sums(x: tr.f32["batch in/data"]) -> tr.f32["batch"]:
        row = lambda row: tr.settle(tr.einsum("in, in -> ", row, row))
        return tr.vmap(row, "batch")(tr.named(x, "batch in/data")).array

    x = np.arange(16.0, dtype=np.float32).reshape(2, 8)
    with jax.set_mesh(mesh := tr.make_mesh(data=8)):
        there = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "data")))
        np.testing.assert_array_equal(sums(there), (x * x).sum(1))
        gradient = jax.grad(lambda x: (sums(x) ** 2).sum())(there)
    np.testing.assert_array_equal(gradient, 4 * x * (x * x).sum(1, keepdims=True))


def test_a_compiled_function_holds_no_partial_sums_from_around_it():
    with tr.Layout(tr.make_mesh(model=8)):
        x = tr.reshard("a b -> a b/model", jnp.ones((2, 8)))
        sums = tr.einsum("a b/model, c b/model -> a c +model", x, x)

        def settled(y):
            return tr.reshard("a c +model -> a c", sums) + y

        with pytest.raises(PendingSumError, match="settled reads from around it, in named_jit: pass it as an argument"):
            tr.named_jit(settled)(jnp.ones((2, 2)))
        given = tr.named_jit(lambda sums, y: tr.reshard("a c +model -> a c", sums) + y)
        np.testing.assert_array_equal(given(sums, jnp.ones((2, 2))), settled(jnp.ones((2, 2))))
