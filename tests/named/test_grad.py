"""What `tr.grad` refuses, in words of ours; rules of one's own on weights at rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.notation import TypeMismatch

X = tr.ones({"embed": 8})
REFUSED = {
    "only a real number can be differentiated, got None": lambda: tr.grad(lambda x: None)(X),
    "only a real number can be differentiated, got 3,": lambda: tr.grad(lambda x: 3)(X),
    "only a real number can be differentiated, got c64..,": lambda: tr.grad(lambda x: x.astype(jnp.complex64).sum())(X),
    "only a scalar can be differentiated, got f32.embed=8.": lambda: tr.grad(lambda x: x)(X),
    "only floats can be differentiated, got i32.embed=8. in argument 0": lambda: tr.grad(lambda x: x.sum())(
        X.astype(jnp.int32)
    ),
    "only floats can be differentiated, got 3 in argument 1": lambda: tr.value_and_grad(lambda x, n: x.sum(), (0, 1))(
        X, {"n": 3}
    ),
    "argnums must be the number of a positional argument, from 0, got 2 for 1": lambda: tr.grad(lambda x: x.sum(), 2)(
        X
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_gradient_is_told(words):
    with pytest.raises(tr.TrellisError, match=words):
        REFUSED[words]()
    assert tr.grad(lambda x, key: (x * tr.random.normal(key, X.axes)).sum())(X, jax.random.key(0)).names == ("embed",)


def doubled(x):
    return tr.while_loop(lambda x: x.sum() < 20.0, lambda x: 2 * x, x)


def test_a_loop_that_ends_by_a_condition_has_no_gradient():
    words = "a loop that ends by a condition has no gradient, got a while_loop .* in the gradient of"
    with pytest.raises(TypeMismatch, match=words):
        tr.grad(lambda x: doubled(x).sum())(X)
    with pytest.raises(TypeMismatch, match=words):
        tr.ledger(jax.grad(lambda x: doubled(x).sum().array), X)
    assert tr.grad(lambda x: (x * doubled(tr.stop_gradient(x))).sum())(X).tolist() == [4.0] * 8


def test_plain_arrays_in_slices_of_a_gradient_are_told():
    with tr.Layout(tr.make_mesh(data=8), params={"embed": "data"}):
        x = tr.shard(X)
        product = lambda x: jax.lax.associative_scan(jnp.multiply, x.array).sum()
        with pytest.raises(tr.MeshError, match="plain arrays in slices only if it knows .* in test_grad.py"):
            tr.grad(product)(x)


def clipped(ended):
    """A clip with a slope of its own, whose rule ends with `ended`."""

    @jax.custom_jvp
    def clip(w):
        return tr.clip(w, -1.0, 1.0)

    clip.defjvp(lambda at, by: (clip(*at), ended(by[0] * tr.sigmoid(at[0]))))
    return clip


def straight(ended):
    """Rounded, with a gradient where the number was small, whose rule ends with `ended`."""

    @jax.custom_vjp
    def rounded(w):
        return tr.rint(w)

    rounded.defvjp(lambda w: (tr.rint(w), w), lambda w, d: (ended(d * (abs(w) < 1.0).astype(d.dtype)),))
    return rounded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "what"), [(clipped, "tangent sharded like its result"), (straight, "gradient sharded like its argument")]
)
def test_a_rule_of_ones_own_ends_where_its_weight_rests(rule, what):
    def gradient(ended):
        w = tr.shard(tr.random.normal(jax.random.key(0), {"embed": 8, "mlp": 4}))
        x = tr.random.normal(jax.random.key(1), {"batch": 8, "embed": 8})
        return tr.grad(lambda w: (tr.dot(x, rule(ended)(w), over="embed") ** 2.0).mean())(w)

    wanted = gradient(tr.shard)
    with tr.Layout(tr.make_mesh(data=8), params={"embed": "data"}, compute={"batch": "data"}):
        np.testing.assert_allclose(np.asarray(gradient(tr.shard)), np.asarray(wanted), rtol=1e-5, atol=1e-6)
        with pytest.raises(TypeMismatch, match=f"must return each {what}, got .*, or with a reshard"):
            gradient(lambda d: d)


@pytest.mark.slow
def test_a_rule_of_ones_own_in_a_mapped_function_takes_its_weight_as_an_argument():
    @jax.custom_vjp
    def scaled(x, s):
        return x * s

    def backward(kept, d):
        x, s = kept
        return tr.shard(d * s, "compute"), tr.shard((d * x).sum([n for n in d.names if n not in s.names]))

    scaled.defvjp(lambda x, s: (x * s, (x, s)), backward)
    values = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    with tr.Layout(tr.make_mesh(a=4, b=2), params={"mlp": "a"}, compute={"batch": "a"}):
        s, x = tr.shard(tr.ones({"mlp": 8})), tr.shard(tr.named(values, "batch mlp"), "compute")
        with pytest.raises(TypeMismatch, match="what a function for vmap reads from around it, make an argument of"):
            tr.grad(lambda s: tr.vmap(lambda x: scaled(x, s), "batch")(x).sum())(s)
        found = tr.named_jit(tr.grad(lambda s: tr.vmap(scaled, "batch")(x, s).sum()))(s)
        np.testing.assert_allclose(np.asarray(found), values.sum(0), rtol=1e-5)


@pytest.mark.slow
def test_the_gradient_given_to_jaxs_vjp_lies_where_the_functions_result_does():
    """As in the rule of a reversible layer, which makes its input again and differentiates its parts by itself."""

    def gradient(ended):
        def part(w, x):
            return ended(tr.tanh(tr.dot(x, w, over="half").rename(other="half")))

        mixed = jax.custom_vjp(part)
        mixed.defvjp(lambda *kept: (part(*kept), kept), lambda kept, d: jax.vjp(part, *kept)[1](tr.shard(d, "compute")))
        w, x = (tr.random.normal(jax.random.key(0), dims) for dims in ({"half": 8, "other": 8}, {"pos": 8, "half": 8}))
        return tr.named_jit(tr.grad(lambda w: (mixed(w, tr.shard(x, "compute")) ** 2.0).sum()))(tr.shard(w, "compute"))

    wanted = gradient(tr.shard)
    with tr.Layout(tr.make_mesh(a=8), compute={"other": "a", "pos": "a"}):
        with pytest.raises(TypeMismatch, match="gradient sharded like the function's result, got .*end the"):
            gradient(lambda y: y)
        found = gradient(lambda y: tr.shard(y, "compute"))
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5, atol=1e-6)
