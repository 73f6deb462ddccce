"""Names, sizes and rank are held against each other, also where JAX takes trees apart; a name stands once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.named import NamesError
from trellis.notation import NotationError, TypeMismatch

A, B = tr.Axis("a", 2), tr.Axis("b", 3)


@pytest.mark.parametrize(
    "loop", [lambda f: jax.vmap(f), lambda f: lambda x: jax.lax.scan(lambda c, r: (c, f(r)), 0, x)[1], jax.lax.map]
)
def test_jax_loops_know_no_names(loop):
    x = tr.named(jnp.arange(27.0).reshape(3, 3, 3), "b h w")
    run = loop(lambda r: r.sum("h")) if loop is not jax.lax.map else lambda x: loop(lambda r: r.sum("h"), x)
    with pytest.raises(NamesError, match=r"3 names 'b h w' for f32\[3 3\].*use trellis.vmap and trellis.scan"):
        run(x)


@pytest.mark.parametrize(
    "use",
    [
        lambda r: r + 1,
        lambda r: r.shape,
        lambda r: r["b", 0],
        lambda r: tr.dot(r, r, over="h"),
        lambda r: tr.sort(r, "h"),
        lambda r: r.at["h", 0].set(0),
        lambda r: r.rename(h="k"),
        lambda r: tr.vmap(lambda x: x, "b")(r),
        lambda r: tr.concatenate([r, r], "h"),
        lambda r: tr.where(r > 0, r, r),
        lambda r: tr.take(r, "h", [0]),
    ],
)
def test_every_operation_holds_them(use):
    with pytest.raises(NamesError, match="must have one name for each dimension"):
        jax.vmap(use)(tr.named(jnp.ones((3, 3, 3)), "b h w"))


def test_a_tree_put_together_may_hold_anything_until_it_is_used():
    x = tr.ones({"a": 2, "b": 3})
    for put in (None, object(), "text", jnp.zeros(()), x):
        half = jax.tree.map(lambda _, put=put: put, x)
        assert repr(half) and str(half) and f"{half}"
        with pytest.raises(NamesError):
            half + 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: tr.zeros([tr.Axis("a", 2), tr.Axis("a", 3)]),
        lambda: tr.random.normal(jax.random.key(0), [A, A]),
        lambda: tr.named(jnp.ones((2, 2)), "a a"),
        lambda: tr.named(jnp.ones((2, 2)), [A, A]),
        lambda: tr.vmap(lambda r: tr.ones({"batch": 2}), "batch")(tr.ones({"batch": 4})),
        lambda: tr.map(lambda r: tr.ones({"batch": 2}), "batch")(tr.ones({"batch": 4})),
        lambda: tr.stack([tr.ones(A), tr.ones(A)], "a"),
        lambda: tr.ones([A, B]).rename(a="b"),
        lambda: tr.ones([A, B]).sum(("a", "a")),
        lambda: tr.ones([A, B]).transpose(("a", "a")),
        lambda: tr.merge_axes(tr.ones([A, B, tr.Axis("c", 4)]), ("a", "b"), "c"),
        lambda: tr.split_axis(tr.ones([A, B]), "a", {"b": 2}),
        lambda: tr.broadcast_to(tr.ones(A), [A, A]),
        lambda: tr.NamedArray(jnp.ones((2, 2)), ("a", "a")),
    ],
)
def test_repeated_names_are_refused(make):
    with pytest.raises((NamesError, NotationError)) as error:
        make()
    assert len(str(error.value)) > 40


@pytest.mark.slow
def test_axes_serve_where_names_do():
    """And have their sizes checked."""
    x = tr.named(jnp.arange(6.0).reshape(2, 3), [A, B])
    wrong = tr.Axis("b", 99)
    uses = [
        lambda b: x.sum(b),
        lambda b: x.max((b,)),
        lambda b: tr.softmax(x, b),
        lambda b: tr.sort(x, b),
        lambda b: tr.cumsum(x, b),
        lambda b: tr.argmax(x, b),
        lambda b: x[b, 0],
        lambda b: x.at[b, 0].set(1.0),
        lambda b: tr.take(x, b, [0]),
        lambda b: tr.take_along(x, b, tr.zeros({"a": 2}, dtype=jnp.int32)),
        lambda b: tr.dot(x, x.rename(a="c"), over=b),
        lambda b: tr.concatenate([x, x], b) if b.size == 3 else x.index(b),
        lambda b: x.unbind(b)[0],
        lambda b: tr.vmap(lambda r: r, b)(x),
        lambda b: tr.scan(lambda c, r: (c + r, r), b)(tr.zeros(A), x)[0],
        lambda b: tr.map(lambda r: r, b)(x),
        lambda b: tr.split_axis(x, b, {"d": 3, "e": 1}),
        lambda b: tr.merge_axes(x, (A, b), "d"),
        lambda b: x.rename({b: "d"}),
        lambda b: x.transpose((b, A)),
        lambda b: tr.roll(x, 1, b),
        lambda b: tr.pad(x, {b: (1, 1)}),
        lambda b: tr.top_k(x, b, 2)[0],
        lambda b: x.mean(b),
        lambda b: tr.logsumexp(x, b),
        lambda b: x.axis(b) and x,
        lambda b: tr.random.shuffle(jax.random.key(0), x, b),
        lambda b: tr.flip(x, b),
    ]
    for use in uses:
        by_name, by_axis = use(B), use(x.axis("b"))
        np.testing.assert_array_equal(by_name, by_axis)
        with pytest.raises((NamesError, TypeMismatch), match="99"):
            use(wrong)
    with pytest.raises(NamesError, match="one size"):
        tr.named(jnp.ones(2), [tr.Axis("a", 9)])
    assert tr.stack([tr.ones(A), tr.ones(A)], tr.Axis("s", 2)).names == ("s", "a")
    with pytest.raises(NamesError, match="s=3"):
        tr.stack([tr.ones(A), tr.ones(A)], tr.Axis("s", 3))


def test_outer_products_are_asked_for():
    x, bias = tr.ones({"batch": 2, "embed": 3}), tr.ones({"embd": 3})
    with pytest.raises(NamesError, match=r"got f32\[batch=2 embed=3\] and f32\[embd=3\] in add.*outer\(add"):
        x + bias
    with pytest.raises(NamesError):
        tr.where(x > 0, x, bias)
    with pytest.raises(NamesError):
        tr.dot(x, bias, over="embed")
    assert tr.outer(tr.add, x, bias).names == ("batch", "embed", "embd")
    assert tr.einsum("batch embed, embd -> batch embed embd", x, bias).shape == {"batch": 2, "embed": 3, "embd": 3}
    assert (x + tr.ones({"embed": 3})).names == x.names == (tr.ones({"embed": 3}) + x).names


@pytest.mark.parametrize("unroll", [1, 4, None])
@pytest.mark.parametrize(
    "layer",
    [
        lambda x: x.astype(jnp.bfloat16),
        lambda x: x.rename(embed="out"),
        lambda x: tr.concatenate([x, x], "embed"),
        lambda x: (x, x),
    ],
)
def test_a_layer_that_a_loop_refuses_is_refused_written_out(layer, unroll):
    x, layers = tr.ones({"batch": 2, "embed": 4}), tr.ones({"layers": 4})
    how = {} if unroll is None else {"unroll": unroll}
    for run in (lambda: tr.fold(lambda x, _: layer(x), "layers", **how)(x, layers),):
        with pytest.raises(TypeMismatch, match="a loop's body must return a carry like the one it takes"):
            run()


@pytest.mark.parametrize("count", [3, 20])
def test_stacked_layers_refuse_alike_however_many(count):
    import equinox as eqx

    class Forgetful(eqx.Module):
        weight: tr.NamedArray

        def __call__(self, x):
            return tr.dot(x, self.weight, over="embed")  # forgets .rename(out="embed")

    make = lambda key: Forgetful(tr.random.normal(key, {"embed": 4, "out": 4}))
    stack = tr.Stacked.init(make, tr.Axis("layers", count), key=jax.random.key(0))
    with pytest.raises(TypeMismatch, match=r"got f32\[batch=2 out=4\] for f32\[batch=2 embed=4\]"):
        stack.fold(tr.ones({"batch": 2, "embed": 4}))
