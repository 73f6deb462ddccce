"""Named operations against numpy, broadcasting by name, and errors with both arrays' full types."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import NamesError, named


@pytest.fixture(autouse=True)
def draws(monkeypatch):
    """The same numbers for a test, whichever ran before it."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


def rand(**sizes):
    return named(jnp.asarray(RNG.normal(size=tuple(sizes.values())), jnp.float32), tuple(sizes))


def test_what_a_named_array_knows():
    x = rand(batch=2, embed=3)
    assert x.names == ("batch", "embed")
    assert x.shape == {"batch": 2, "embed": 3}
    assert x.axes == (tr.Axis("batch", 2), tr.Axis("embed", 3))
    assert x.axis("embed") == tr.Axis("embed", 3)
    assert tr.typeof(x) == "f32[batch=2 embed=3]"
    assert (x.size, x.ndim, x.dtype) == (6, 2, jnp.float32)
    assert repr(x).startswith("f32[batch=2 embed=3]\n[[")


def test_it_is_a_tree():
    x = rand(batch=2)
    doubled = jax.tree.map(lambda a: a * 2, x)
    np.testing.assert_array_equal(doubled.array, x.array * 2)
    assert [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path({"w": x})] == ["['w'].array"]


@pytest.mark.parametrize("name", ["exp", "tanh", "silu", "gelu", "sqrt", "square", "logical_not", "sign", "rsqrt"])
def test_unary_tables(name):
    x = tr.abs(rand(a=2, b=3)) + 0.1
    reference = getattr(jnp, name, None) or getattr(jax.nn, name, None) or getattr(jax.lax, name)
    out = getattr(tr, name)(x)
    assert out.names == x.names
    np.testing.assert_allclose(out.array, reference(x.array), rtol=1e-6)


def test_operators_broadcast_by_name_in_any_order():
    x, y, s = rand(batch=2, pos=4, embed=3), rand(embed=3, batch=2), rand(pos=4)
    out = x * y + s - 1.0 / x
    expected = x.array * y.array.T[:, None, :] + s.array[None, :, None] - 1.0 / x.array
    assert out.names == ("batch", "pos", "embed")
    np.testing.assert_allclose(out.array, expected, rtol=1e-5)
    with tr.Layout(tr.make_mesh(jax.devices()[:6], x=2, y=3), compute={"b": "y"}):
        numbers = tr.arange(tr.Axis("a", 8))
        with pytest.raises(tr.NotationError, match="by the mesh axes that slice it, got b=8 over y=3"):
            tr.outer(tr.subtract, numbers, numbers.rename(a="b"))
    disjoint = tr.outer(tr.multiply, rand(a=2), rand(b=3))
    assert disjoint.shape == {"a": 2, "b": 3}
    with pytest.raises(NamesError, match=r"can broadcast only if one operand's names contain the other's.*in multiply"):
        rand(a=2) * rand(b=3)
    np.testing.assert_array_equal((2.0 - s).array, 2.0 - s.array)
    assert (x > 0).dtype == jnp.bool_
    assert ((x > 0) & (x < 1)).names == x.names


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "var", "std", "logsumexp"])
def test_reductions_over_one_several_and_all_names(name):
    x = rand(a=2, b=3, c=4)
    reference = getattr(jnp, name, None) or getattr(jax.nn, name)
    for over, axes in (("b", (1,)), (("a", "c"), (0, 2)), (None, (0, 1, 2))):
        out = getattr(x, name)(over)
        np.testing.assert_allclose(out.array, reference(x.array, axis=axes), rtol=1e-5)
    assert x.mean("b").names == ("a", "c")


@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
def test_the_largest_value_is_nan_where_one_is_on_any_device(axis_type):
    """XLA's all-reduce on CPUs gives the largest of the numbers."""
    x, counted = np.ones((8, 2), np.float32), np.ones((8, 2), bool)
    x[6, 0], x[5, 1], counted[5, 1] = np.nan, np.nan, False
    largest = lambda x, counted: (x.max("a"), x.min("a"), x.max("a", where=counted), abs(x).max())
    with tr.Layout(tr.make_mesh(d=8, axis_type=axis_type), compute={"a": "d"}):
        found = tr.named_jit(largest)(named(x, "a b"), named(counted, "a b"))
    for value, wanted in zip(found, ([np.nan, np.nan], [np.nan, np.nan], [np.nan, 1], np.nan), strict=True):
        np.testing.assert_array_equal(value, wanted)


@pytest.mark.slow
def test_the_largest_of_numbers_makes_no_nan():
    """`jax.debug_nans` ends a program where one is made, which no device does alone."""
    with tr.Layout(tr.make_mesh(data=8), compute={"b": "data"}), jax.debug_nans(True):
        x = tr.shard(rand(a=3, b=8), "compute")
        for reduced in (x.max("b"), x.min("b"), tr.nanmax(x, "b"), tr.grad(lambda x: x.max("b").sum())(x)):
            assert jnp.isfinite(reduced.array).all()


def test_the_largest_of_no_values():
    nothing = named(jnp.zeros((0, 2), jnp.int8), "a b")
    assert nothing.max("a").array.tolist() == [-128, -128] and nothing.min().array.tolist() == 127
    assert nothing.astype("float32").max("a", initial=3.0).array.tolist() == [3, 3]


def test_reduction_with_a_mask_by_name():
    x, mask = rand(a=2, b=3), named(jnp.array([True, False, True]), "b")
    np.testing.assert_allclose(x.sum("b", where=mask).array, x.array[:, [0, 2]].sum(1), rtol=1e-6)
    with pytest.raises(NamesError, match=r"got 'c' in bool_\[c=3\] for f32\[a=2 b=3\]"):
        x.sum("b", where=mask.rename(b="c"))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "uint8"])
def test_the_largest_of_what_a_mask_leaves_is_in_any_dtype(dtype):
    x = named(jnp.array([1, 0, 1], dtype), "b")
    assert tr.max(x, where=x == 0).item() == 0 and tr.min(x, where=x == 1).item() == 1


@pytest.mark.parametrize("spread", [tr.var, tr.std])
def test_what_a_mask_leaves_out_has_no_part_in_a_gradient(spread):
    mask, x = named(jnp.array([True, False, True]), "b"), named(jnp.array([1.0, jnp.inf, 3.0]), "b")
    found, wanted = tr.grad(lambda x: spread(x, "b", where=mask))(x), tr.grad(spread)(x["b", ::2])
    np.testing.assert_array_equal(found["b", ::2], wanted)
    assert found["b", 1].item() == 0


def test_functions_along_a_name():
    x = rand(a=2, b=5)
    np.testing.assert_allclose(tr.softmax(x, "a").array, jax.nn.softmax(x.array, axis=0), rtol=1e-6)
    np.testing.assert_allclose(x.cumsum("b").array, jnp.cumsum(x.array, axis=1), rtol=1e-6)
    np.testing.assert_array_equal(x.sort("b").array, jnp.sort(x.array, axis=1))
    np.testing.assert_array_equal(x.argmax("b").array, jnp.argmax(x.array, axis=1))
    values, places = tr.top_k(x, "a", 1, new_name="best")
    assert values.names == ("best", "b")
    np.testing.assert_array_equal(values.array[0], x.array.max(0))
    np.testing.assert_array_equal(places.array[0], x.array.argmax(0))
    with pytest.raises(NamesError, match=r"got k=9 for f32\[a=2 b=5\] along 'b'"):
        tr.top_k(x, "b", 9)


def test_dot_and_einsum():
    x, w, v = rand(batch=2, pos=3, embed=4), rand(embed=4, mlp=5), rand(mlp=5, out=2)
    expected = np.einsum("bpe,em->bpm", x.array, w.array)
    out = tr.einsum("batch pos embed, embed mlp -> batch pos mlp", x, w)
    np.testing.assert_allclose(out.array, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tr.dot(x, w, over="embed").array, expected, rtol=1e-5, atol=1e-6)
    chain = tr.einsum("batch pos embed, embed mlp, mlp out -> out batch pos", x, w, v)
    assert chain.names == ("out", "batch", "pos")
    np.testing.assert_allclose(chain.array, np.einsum("bpe,em,mo->obp", x.array, w.array, v.array), rtol=1e-4)
    np.testing.assert_allclose(tr.einsum("embed batch pos -> pos", x).array, x.array.sum((0, 2)), rtol=1e-5)
    many, one = tr.ones({"embed": 257, "mlp": 2}, jnp.bfloat16), tr.ones({"out": 1}, jnp.bfloat16)  # 256 in bfloat16
    for text, factors in (("embed mlp -> mlp", (many,)), ("embed mlp, out -> mlp", (many, one))):
        wide = tr.einsum(text, *factors, preferred_element_type=jnp.float32)
        assert wide.dtype == jnp.float32 and wide.tolist() == [257, 257]
    scores = tr.einsum("... embed, mlp embed -> ... mlp", x, w.transpose("mlp embed"))
    assert scores.names == ("batch", "pos", "mlp")


@pytest.mark.parametrize("text", ["a b, b c, c d, d -> a", "b q h, b k h, b k v -> b q v", "b i, i j, b j -> b"])
def test_several_factors_are_multiplied_in_the_order_of_the_fewest_operations(text):
    factors = [t.split() for t in text.partition("->")[0].split(",")]
    arrays = [rand(**dict.fromkeys(names, 16)) for names in factors]
    work = lambda f, args: jax.jit(f).lower(*args).cost_analysis()["flops"]
    plain = lambda *given: jnp.einsum(text.replace(" ", ""), *given)
    expected = plain(*(x.array for x in arrays))
    assert work(lambda *given: tr.einsum(text, *given), arrays) == work(plain, [x.array for x in arrays])
    out = text.partition("->")[2].split()
    over = {n for names in factors for n in names} - set(out)
    with tr.Layout(tr.make_mesh(d=4, m=2), params={"a": "d", "k": "m"}, compute={"b": "d", "c": "m", "j": "m"}):
        found = tr.named_jit(lambda *given: (tr.einsum(text, *given), tr.dot(*given, over=over)))(*arrays)
    for x in found:
        np.testing.assert_allclose(x.transpose(out).array, expected, rtol=1e-3, atol=1e-3)


names = st.sampled_from("abcde")


def test_a_transposition_names_some_dimensions_in_any_place():
    x = tr.zeros({"a": 2, "b": 3, "c": 4})
    assert [x.transpose(text).names for text in ("c ...", "... a", "c ... a", "b c a ...")] == [
        ("c", "a", "b"), ("b", "c", "a"), ("c", "b", "a"), ("b", "c", "a"),
    ]  # fmt: skip


@pytest.mark.slow
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.data())
def test_einsum_against_numpy(data):
    sizes = dict(zip("abcde", data.draw(st.lists(st.integers(1, 3), min_size=5, max_size=5)), strict=True))
    texts = [
        data.draw(st.lists(names, unique=True, min_size=1, max_size=4)) for _ in range(data.draw(st.integers(1, 3)))
    ]
    known = sorted({n for t in texts for n in t})
    out = data.draw(st.permutations(known))[: data.draw(st.integers(0, len(known)))]
    arrays = [rand(**{n: sizes[n] for n in t}) for t in texts]
    result = tr.einsum(", ".join(" ".join(t) for t in texts) + " -> " + " ".join(out), *arrays)
    expected = np.einsum(
        ",".join("".join(t) for t in texts) + "->" + "".join(out), *(np.asarray(a.array) for a in arrays)
    )
    assert result.names == tuple(out)
    np.testing.assert_allclose(result.array, expected, rtol=2e-4, atol=1e-5)


def test_rearrange():
    x = rand(batch=2, embed=12)
    y = x.rearrange("batch (heads head_dim) -> batch heads head_dim", heads=4)
    np.testing.assert_array_equal(y.array, x.array.reshape(2, 4, 3))
    back = y.rearrange("batch heads head_dim -> batch embed=(heads head_dim)")
    np.testing.assert_array_equal(back.array, x.array)
    assert back.names == ("batch", "embed")
    assert y.rearrange("... head_dim -> head_dim ...").names == ("head_dim", "batch", "heads")
    assert y.rearrange("batch heads head_dim -> (heads batch) head_dim").shape == {"heads_batch": 8, "head_dim": 3}
    assert x.rearrange("... embed=(a b) -> b ... a", a=3).shape == {"b": 4, "batch": 2, "a": 3}
    for pattern, sizes, message in (
        ("batch (a b) -> batch a b", {"a": 5}, r"got 'a=5 b' for embed=12 in f32\[batch=2 embed=12\]"),
        ("batch (a b) -> batch a", {"a": 3}, r"got none of 'b' on the right"),
        ("batch embed -> batch other", {}, r"names on the right must also be on the left, got 'other'"),
        ("batch -> batch", {}, r"must write every dimension, or '...', got 1 in 'batch -> batch'"),
    ):
        with pytest.raises(NamesError, match=message):
            x.rearrange(pattern, **sizes)


def test_splitting_and_joining():
    x = rand(qkv=3, embed=4)
    q, k, v = x.unbind("qkv")
    assert q.names == ("embed",)
    np.testing.assert_array_equal(tr.stack([q, k, v], "qkv").array, x.array)
    gradient = str(jax.make_jaxpr(jax.grad(lambda x: sum((p * p).sum().array for p in x.unbind("qkv"))))(x))
    assert "concatenate" in gradient and "pad[" not in gradient  # one stack, not a sum of padded parts
    a, b = x.split("embed", [1, 3])
    np.testing.assert_array_equal(tr.concatenate([a, b], "embed").array, x.array)
    assert [p.shape["embed"] for p in x.split("embed", 2)] == [2, 2]
    with pytest.raises(NamesError, match=r"got \[1, 2\] for embed=4"):
        x.split("embed", [1, 2])
    with pytest.raises(NamesError, match=r"stack must make a new dimension, got 'embed'"):
        tr.stack([q, k], "embed")


@pytest.mark.slow
def test_indexing_and_updates():
    x = rand(batch=3, pos=5, embed=2)
    np.testing.assert_array_equal(x["pos", 2].array, x.array[:, 2])
    np.testing.assert_array_equal(x["pos", 1:4, "batch", -1].array, x.array[-1, 1:4])
    ids = named(jnp.array([4, 0]), "picked")
    assert x["pos", ids].names == ("batch", "picked", "embed")
    np.testing.assert_array_equal(x["pos", ids].array, x.array[:, [4, 0]])
    both = x[{"batch": named(jnp.array([0, 2]), "picked"), "pos": ids}]
    np.testing.assert_array_equal(both.array, x.array[jnp.array([0, 2]), jnp.array([4, 0])])
    np.testing.assert_array_equal(x.at["pos", 1].set(0.0).array, x.array.at[:, 1].set(0.0))
    row = rand(embed=2)
    np.testing.assert_array_equal(x.at["pos", 1:3].add(row).array, x.array.at[:, 1:3].add(row.array[None, None]))
    ids, none = named(jnp.zeros(0, jnp.int32), "picked"), named(jnp.zeros((0, 2)), "picked embed")
    np.testing.assert_array_equal(x.at["pos", ids].add(none).array, x.array)
    np.testing.assert_array_equal(x.at["pos", 2:2].set(none.rename(picked="pos")).array, x.array)
    with pytest.raises(NamesError, match=r"a position must be inside its dimension, got pos\[7\].*use -5 to 4"):
        x["pos", 7]
    with pytest.raises(NamesError, match="must be indexed by name"):
        x[0]


def test_take_is_an_embedding_lookup():
    table, ids = rand(vocab=7, embed=3), named(jnp.array([[1, 2], [6, 0]]), "batch pos")
    out = tr.take(table, "vocab", ids)
    assert out.names == ("batch", "pos", "embed")
    np.testing.assert_array_equal(out.array, table.array[ids.array])
    none = tr.zeros({"vocab": 0, "embed": 2})
    assert tr.take(none, "vocab", ids).shape == {**ids.shape, "embed": 2} and not tr.take(none, "vocab", ids).any()
    assert none["vocab", ids, "embed", ids].shape == ids.shape
    with pytest.raises(NamesError, match="positions cannot share other names with the table, got 'embed'"):
        tr.take(table, "vocab", ids.rename(pos="embed"))


@pytest.mark.slow
def test_creation():
    assert tr.zeros({"a": 2}).dtype == jnp.float32
    np.testing.assert_array_equal(tr.arange(tr.Axis("a", 4), start=1, step=2).array, [1, 3, 5, 7])
    hot = tr.one_hot(named(jnp.array([2, 0]), "batch"), tr.Axis("vocab", 3))
    np.testing.assert_array_equal(hot.array, [[0, 0, 1], [1, 0, 0]])
    small = tr.one_hot(named(jnp.array([5, -1], jnp.int8), "batch"), tr.Axis("vocab", 300))
    np.testing.assert_array_equal(np.argwhere(np.asarray(small)), [[0, 5]])
    mask = tr.tril(tr.ones({"pos": 3, "key_pos": 3}), "pos", "key_pos")
    np.testing.assert_array_equal(mask.array, np.tril(np.ones((3, 3))))
    np.testing.assert_array_equal(tr.triu(tr.ones({"a": 2, "b": 3}), "a", "b", 1).array, np.triu(np.ones((2, 3)), 1))
    assert tr.pad(rand(pos=3), {"pos": (1, 0)}).shape == {"pos": 4}
    np.testing.assert_array_equal(tr.roll(tr.arange(tr.Axis("a", 3)), 1, "a").array, [2, 0, 1])
    x = tr.where(rand(a=2) > 100.0, 1.0, rand(a=2, b=2))
    assert x.names == ("a", "b")
    assert rand(b=2).broadcast_to({"a": 3, "b": 2}).shape == {"a": 3, "b": 2}


def test_lifting_is_one_line():
    smooth = tr.lift(lambda x, y: jnp.sqrt(x * x + y * y), name="smooth")
    assert smooth(rand(a=2, b=3), rand(b=3)).names == ("a", "b")
    center = tr.lift_along(lambda x, axis: x - x.mean(axis, keepdims=True), name="center")
    np.testing.assert_allclose(center(rand(a=4), "a").array.sum(), 0, atol=1e-6)
    median = tr.lift_reduction(jnp.median)
    assert median(rand(a=3, b=2), "a").names == ("b",)


@pytest.mark.parametrize("jit", [False, True])
def test_what_is_lifted_keeps_its_dimensions(jit):
    """Names would stand for other sizes: rows and columns of a transposed array, one difference less than numbers."""
    wrong = {
        r"got f32\[5 4\] of \(4, 5\), in turned": lambda x: tr.lift(jnp.transpose, name="turned")(x),
        r"got f32\[\] of \(4, 5\), in <lambda>": lambda x: tr.lift(lambda a: a.sum())(x),
        r"got f32\[4 4\] of \(4, 5\), in <lambda>": lambda x: tr.lift_along(lambda a, axis: jnp.diff(a, axis=axis))(
            x, "b"
        ),
    }
    for message, use in wrong.items():
        with pytest.raises(tr.NamesError, match=f"must keep the dimensions of its operands, {message}"):
            (jax.jit(use) if jit else use)(tr.ones({"a": 4, "b": 5}))


def test_dimensions_may_have_the_names_of_parameters():
    x = tr.ones({"x": 4, "names": 6, "pattern": 2})
    assert x.rename(x="self", names="x").shape == {"self": 4, "x": 6, "pattern": 2}
    assert tr.rename(x, x="names", names="x").shape == {"names": 4, "x": 6, "pattern": 2}
    parts = "(x y) names (pattern x2) -> x y names pattern x2"
    assert tr.rearrange(x, parts, x=2, pattern=1).shape == {"x": 2, "y": 2, "names": 6, "pattern": 1, "x2": 2}


@pytest.mark.parametrize(
    "lifted",
    [
        lambda x: tr.lift(lambda a: jnp.interp(a, jnp.arange(3.0), jnp.arange(3.0)), name="it")(x),
        lambda x: tr.lift_along(lambda a, axis: jnp.nanmedian(a, axis, keepdims=True) + a, name="it")(x, "b"),
        lambda x: tr.lift_reduction(jnp.nanmedian, name="it")(x, "b"),
    ],
)
def test_what_jax_does_not_lift_over_slices(lifted):
    with tr.Layout(tr.make_mesh(data=8), compute={"a": "data"}):
        x = tr.shard(rand(a=8, b=2), "compute")
        with pytest.raises(NamesError, match=r"got f32\[a/data=8 b=2\] in it \(.*\): gather them first, with shard"):
            lifted(x)


def test_a_polynomial_over_slices_is_right_or_refused():
    """JAX 0.12 knows how it lies, and earlier versions do not."""
    x, fn = rand(a=8, b=2), lambda a: jnp.polyval(jnp.ones(3), a)
    with tr.Layout(tr.make_mesh(data=8), compute={"a": "data"}):
        try:
            found = tr.lift(fn, name="it")(tr.shard(x, "compute"))
        except NamesError as error:
            assert "gather them first, with shard" in str(error)
        else:
            np.testing.assert_allclose(found.array, fn(x.array), rtol=1e-6)


X = "f32[batch=2 embed=3]"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.sum("pos"), rf"no dimension 'pos', got {X}: its names are batch, embed"),
        (lambda x: x + rand(embed=4), rf"got embed=3 and embed=4 in add of {X} and f32\[embed=4\]"),
        (lambda x: x.rename(batch="embed"), rf"got 'embed embed' after renaming {X}"),
        (lambda x: x * jnp.ones(3), r"named arrays and scalars, got f32\[batch=2 embed=3\] and f32\[3\] in multiply"),
        (lambda x: x.transpose("embed"), rf"got 'embed' for {X}: name each once"),
        (lambda x: tr.einsum("batch pos -> pos", x), rf"got 'pos', which is absent, in 'batch pos -> pos' for {X}"),
        (
            lambda x: tr.einsum("batch -> batch", x),
            rf"got no 'embed', which the array has, in 'batch -> batch' for {X}",
        ),
        (lambda x: tr.einsum("batch embed -> mlp", x), rf"got 'mlp' in 'batch embed -> mlp' for {X}"),
        (lambda x: tr.einsum("a, b -> a", x), "needs one array for each operand in its text, got 1 for 'a, b -> a'"),
        (
            lambda x: tr.einsum("batch/data embed -> embed", x),
            "an einsum of named arrays takes names only, got mesh axes",
        ),
        (lambda x: tr.dot(x, x, over="mlp"), "dot can only sum over names that its operands share, got 'mlp'"),
        (
            lambda x: tr.vmap(lambda y: y, "pos")(x),
            "vmap needs one size for its dimension, got no array with it for 'pos'",
        ),
        (lambda x: x.broadcast_to({"batch": 2}), r"got none of 'embed' in 'batch'"),
        (lambda x: list(x), "cannot be iterated by position"),
        (lambda x: x @ x, f"says what it sums, got {X} @ {X}: write tr.dot"),
        (lambda x: np.ones((3, 2), np.float32) @ x, rf"says what it sums, got f32\[3 2\] @ {X}: write tr.dot"),
        (lambda x: named(x.array, "batch"), r"got 1 names 'batch' for shape \(2, 3\)"),
        (lambda x: named(x.array, ("a", "a")), "got 'a a': rename the second 'a'"),
    ],
)
def test_errors_show_full_types(call, message):
    message = message.replace(X, r"f32\[batch=2 embed=3\]")
    with pytest.raises((NamesError, TypeError, tr.NotationError), match=message):
        call(rand(batch=2, embed=3))


@pytest.mark.parametrize("sliced", [{}, {"batch": "data", "embed": "model"}])
@pytest.mark.parametrize("over", ["embed", "batch"])
def test_the_largest_of_what_is_computed_has_a_gradient(over, sliced):
    """XLA's CPU compiler computes the values twice and rounds them in two ways: plain JAX finds the largest nowhere
    among them then, and its gradient is no number."""

    def values(x, y):
        apart = x - x.mean("batch")
        return 2 - apart * tr.rsqrt(tr.square(apart).mean("batch") + 1e-5) * y

    x, y = np.random.default_rng(0).standard_normal((2, 16, 32), np.float32)
    with tr.Layout(tr.make_mesh(data=4, model=2), compute=sliced):
        x, y = (tr.shard(named(a, "batch embed"), "compute") for a in (x, y))
        found = tr.named_jit(tr.grad(lambda y: values(x, y).max(over).mean()))(y)
    of, slope = (np.asarray(a.array) for a in (values(x, y), values(x, named(jnp.ones((16, 32)), "batch embed")) - 2))
    hit = of == of.max(of.ndim - 1 if over == "embed" else 0, keepdims=True)
    np.testing.assert_allclose(found.array, hit / hit.sum() * slope, rtol=1e-4, atol=1e-7)


def test_the_largest_starts_from_what_has_a_gradient_too():
    x = named(jnp.array([1.0, 2.0, 3.0]), "n")
    gradient = jax.grad(lambda first: tr.max(x, "n", initial=first).array)
    assert (float(gradient(5.0)), float(gradient(1.0))) == (1.0, 0.0)
