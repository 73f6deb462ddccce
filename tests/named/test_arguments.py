"""Arguments that are no arrays, of another kind than an operation takes: one clear error, with what to write."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import nn

X = tr.zeros({"batch": 4, "embed": 6})
WHOLE = tr.zeros({"batch": 4}, dtype=jnp.int32)
KEYS = tr.named(jax.random.split(jax.random.key(0), 4), "batch")

WRONG = {
    "a count that is an axis": (lambda: tr.top_k(X, "embed", tr.Axis("k", 2)), r"top_k takes a whole number, got .*k"),
    "a count with a fraction": (lambda: tr.split(X, "embed", 2.5), r"split takes a whole number, got 2\.5, .* split"),
    "sizes of parts": (lambda: X.split_axis("embed", {"a": "b", "c": 2}), r"split_axis takes a whole number, got 'b'"),
    "parts of less than none": (
        lambda: X.split_axis("embed", {"a": -2, "b": -3}),
        r"must multiply to its size, got 'a=-2 b=-3' for embed=6",
    ),
    "tens of whole numbers": (
        lambda: tr.round(WHOLE, -1),
        r"got i32\[batch=4\] in round \(integer np\.round not implemented for decimals < 0\): cast",
    ),
    "widths without names": (lambda: tr.pad(X, 2), r"pad takes a dict with names as keys, got 2, in pad: .*\{'pos'"),
    "one width": (lambda: tr.pad(X, {"embed": 1}), r"pad takes names, got 1, in pad: write pad"),
    "the order in roll": (lambda: tr.roll(X, "embed", "embed"), r"roll takes a whole number, got 'embed'"),
    "a shift with a fraction": (lambda: tr.roll(X, X.max(), "embed"), r"roll takes a whole number, got f32\[\]"),
    "a value for each": (lambda: tr.pad(X, {"embed": (0, 1)}, value=X["embed", 0]), r"pad takes single numbers, got"),
    "a first value for each": (lambda: X.max("embed", initial=X["embed", 0]), r"max takes single numbers, got init"),
    "names for rename": (lambda: X.rename("embed"), r"rename takes a dict with names as keys, got 'embed', .*\{'old'"),
    "no names": (lambda: X.transpose(None), r"transpose takes names, got None, in transpose: write"),
    "names to merge": (lambda: tr.merge_axes(X, 3, "both"), r"merge_axes takes names, got 3"),
    "a text last": (lambda: tr.einsum(X, X, "batch embed"), r"einsum takes a string, got f32\[batch=4 embed=6\]"),
    "a pattern": (lambda: tr.rearrange(X, ("embed", "batch")), r"rearrange takes a string, got \('embed', 'batch'\)"),
    "an array first": (lambda: tr.reshard(X, "batch -> batch/d"), r"the notation must be a string, got a NamedArray"),
    "an array is no shape": (
        lambda: tr.parse([1]),
        r"the notation must be a string, got a list in its place: pass the string",
    ),
    "the order in outer": (lambda: tr.outer(X, X, jnp.equal), r"outer takes a function, got f32\[batch=4 embed=6\]"),
    "no loop": (lambda: tr.while_loop(X, X, X), r"while_loop takes a function, got f32\[batch=4 embed=6\]"),
    "no branches": (lambda: tr.cond(True, X, X), r"cond takes a function, got f32\[batch=4 embed=6\], in cond: write"),
    "a plain sum": (lambda: tr.settle(jnp.zeros(3)), r"settle takes a named array, got f32\[3\], in settle"),
    "no dtype": (lambda: X.astype("floaty"), r"astype takes a dtype, got 'floaty', in astype: write jnp\.bfloat16"),
    "a dtype of none": (lambda: X.astype(None), r"astype takes a dtype, got None"),
    "fractions as bits": (
        lambda: X & 1,
        r"must have operands of dtypes that JAX accepts, got f32\[batch=4 embed=6\] and 1 .*astype",
    ),
    "eight bits and more": (
        lambda: X + X.astype("float8_e4m3fn"),
        r"operands of dtypes that JAX accepts, got f32\[.*\] and f8_e4m3fn\[batch=4 embed=6\] in add .*: cast with",
    ),
    "keys as numbers": (
        lambda: tr.logsumexp(tr.random.split(jax.random.key(0), "batch", 4)),
        r"takes no random keys, got key\[batch=4\] in logsumexp: draw numbers",
    ),
    "one array to join": (
        lambda: tr.concatenate(jnp.ones((2, 2)), "batch"),
        r"concatenate takes a list of named arrays, got f32\[2 2\]: pass a list",
    ),
    "truths made probabilities": (
        lambda: tr.softmax(X > 0, "embed"),
        r"operands of dtypes that JAX accepts, got bool_\[batch=4 embed=6\] in softmax \(sub does not accept .*cast",
    ),
    "truths to round": (
        lambda: tr.round(X > 0),
        r"got bool_\[batch=4 embed=6\] in round .*(not inexact|not compatible with finfo)\): cast",
    ),
    "the largest of complex numbers": (
        lambda: tr.argmax(X.astype("complex64"), "embed"),
        r"complex numbers have no order, got c64\[batch=4 embed=6\], in argmax: use real\(x\)",
    ),
    "the largest of none": (
        lambda: tr.argmax(X["embed", :0], "embed"),
        r"can only be found among values, got none in f32\[batch=4 embed=0\] along 'embed', in argmax: skip",
    ),
    **{
        f"of complex numbers, {what}": (
            functools.partial(call, X.astype("complex64")),
            rf"complex numbers have no order, got c64\[batch=4 embed=6\], in {what}: use real",
        )
        for what, call in {
            "max": tr.max,
            "min": lambda x: x.min("embed", where=X > 0),
            "nanmax": tr.nanmax,
            "nanmin": tr.nanmin,
            "softmax": lambda x: tr.softmax(x, "embed"),
            "log_softmax": lambda x: tr.log_softmax(x, "embed"),
        }.items()
    },
    "the largest complex numbers": (
        lambda: tr.top_k(X.astype("complex64"), "embed", 2),
        r"in top_k \(top_k is not compatible with complex inputs\): cast",
    ),
    "bounds of complex numbers": (
        lambda: tr.clip(X.astype("complex64"), 0, 1),
        r"in clip \(Clip received a complex value .*: cast",
    ),
    "a sum of four bits": (lambda: X.astype("int4").sum(), r"got i4\[batch=4 embed=6\] in sum .*: cast"),
    "whole numbers": (
        lambda: tr.sigmoid(WHOLE),
        r"must have operands of dtypes that JAX accepts, got i32\[batch=4\] .*cast",
    ),
    "names and no array": (lambda: tr.named("batch", X), r"named takes an array, got 'batch', in named"),
    "a number and no array": (lambda: tr.einsum("a b -> a", 3), r"an einsum takes arrays, got int, in einsum"),
    "settled or not": (lambda: tr.einsum("batch embed -> batch", X, settle="x"), r"got settle='x', in einsum: write"),
    "no condition": (lambda: tr.cond(None, abs, abs, X), r"must be a single boolean, got None, in cond: compare it"),
    "a number for a condition": (lambda: tr.cond(1.5, abs, abs, X), r"must be a single boolean, got 1\.5, in cond"),
    "several conditions": (
        lambda: tr.cond(jnp.ones(3, bool), abs, abs, X),
        r"got bool_\[3\], in cond: reduce it with \.all",
    ),
    "no end": (
        lambda: tr.while_loop(lambda x: x.sum(), abs, X),
        r"a single boolean, got f32\[\], in while_loop: compare",
    ),
    "no program": (lambda: tr.ledger(3, X), r"only a function can be traced, got int, in trace: pass the function"),
    "no class": (lambda: tr.struct(3), r"a struct must be a class, got int, in struct: write @struct"),
    "no manual function": (lambda: tr.shard_map(3), r"shard_map takes a function, got int, in shard_map: write"),
    "nothing to keep": (lambda: tr.Keep(3), r"Keep takes a list of names, .* got names=3, in Keep: write"),
    "everything and some": (
        lambda: tr.Keep(everything=True, offload=("h",)),
        r"so nothing else can be chosen, got Keep\(names=\(\), offload=\('h',\), .* in Keep: leave everything out",
    ),
    "no map": (lambda: tr.named_jit(abs, inputs="compuet"), r"got 'compuet', in named_jit\(inputs=\.\.\.\): write"),
    "nothing to compile": (lambda: tr.named_jit(3), r"named_jit takes a function, got 3, in named_jit"),
    "nothing to draw": (lambda: tr.show(3), r"show can draw only arrays and layouts, got int, in show: pass an array"),
    "keys as factors": (lambda: tr.dot(KEYS, X, over="batch"), r"takes no random keys, got key\[batch=4\] in dot"),
    "keys as terms": (lambda: tr.tanh(KEYS), r"takes no random keys, got key\[batch=4\] in tanh: draw numbers"),
    "keys as another dtype": (lambda: KEYS.astype("float32"), r"got key\[batch=4\] in astype\(float32\): draw numbers"),
    "keys of the host": (lambda: tr.from_numpy(KEYS.array, "batch"), r"got key\[4\] in from_numpy: name them with"),
    "keys to put in order": (lambda: jax.jit(lambda k: tr.sort(k, "batch"))(KEYS), r"got key\[batch=4\] in sort: draw"),
    "keys to choose from": (lambda: tr.top_k(KEYS, "batch", 2), r"takes no random keys, got key\[batch=4\] in top_k"),
    "keys to find one": (lambda: jax.jit(lambda k: tr.argmax(k, "batch"))(KEYS), r"got key\[batch=4\] in argmax: draw"),
    "keys to fill up": (lambda: tr.pad(KEYS, {"batch": (1, 0)}), r"takes no random keys, got key\[batch=4\] in pad"),
    "keys to add up": (
        lambda: KEYS.at["batch", 0].add(1),
        r"takes no random keys, got key\[batch=4\] in at\[...\].add",
    ),
    "numbers among keys": (lambda: KEYS.at["batch", 0].set(3), r"no random keys, got key\[batch=4\] in at\[...\].set"),
    "mesh axes in a name": (lambda: tr.named(jnp.zeros(3), ("a/b",)), r"a name must be one word, got 'a/b', in named"),
    "a gate for a choice": (lambda: tr.gelu(X, X), r"True or False for approximate, got .*, in gelu: write .*geglu"),
    "an array for a map": (lambda: tr.shard(X, X), r"got f32\[.*\], in shard: write 'params'"),
    "a gate of two kinds": (lambda: nn.swiglu(X, X.array), r"both operands of a gate must have names, or neither"),
    "a number out of range": (
        lambda: WHOLE > 2**40,
        r"must be in the range of the dtype that it is given, got i32\[batch=4\] and 1099511627776 in greater: pass",
    ),
    "an update out of range": (
        lambda: WHOLE.at["batch", 0].set(2**40),
        r"got i32\[batch=4\] and 1099511627776 in at\[...\].set: pass one that is",
    ),
    "an update out of a small range": (
        lambda: WHOLE.astype("uint8").at["batch", 0].set(-1),
        r"got u8\[batch=4\] and -1 in at\[...\].set: pass one that is",
    ),
    "padding out of range": (
        lambda: tr.pad(WHOLE.astype("uint8"), {"batch": (1, 0)}, value=300),
        r"got u8\[batch=4\] and 300 in pad: pass one that is",
    ),
    "an array out of range": (lambda: tr.full({"k": 2}, 2**40), r"got 1099511627776 in full: pass one that is"),
    "a range out of range": (
        lambda: tr.arange(tr.Axis("k", 2), start=2**40),
        r"got 1099511627776 and 1 in arange: pass",
    ),
    "a range of truths": (
        lambda: tr.arange(tr.Axis("k", 2), dtype=bool),
        r"got <class 'bool'> in arange \(iota does not accept dtype bool.*pass dtype=jnp\.int32",
    ),
    "a power of whole numbers": (lambda: WHOLE**-1, r"in power \(Integers cannot be raised to negative .*astype"),
    "truths to add up": (
        lambda: (WHOLE > 0).at["batch", 0].add(True),
        r"got bool_\[batch=4\] and True in at\[...\].add .*cast",
    ),
    "numbers of no such dtype": (
        lambda: tr.random.normal(jax.random.key(0), {"k": 2}, jnp.int32),
        r"got dtype\('int32'\) in random.normal \(.*must be a float or complex dtype.*\): pass another dtype",
    ),
    "numbers of no dtype": (
        lambda: tr.random.normal(jax.random.key(0), {"k": 2}, "floaty"),
        r"random\.normal takes a dtype, got 'floaty'",
    ),
    "fewer keys than none": (
        lambda: tr.random.split(jax.random.key(0), "batch", -1),
        r"an axis needs a size of 0 or more, got -1, in Axis\('batch', -1\)",
    ),
    "a key for several": (
        lambda: tr.random.fold_in(jax.random.key(0), WHOLE),
        r"a key is made for a single whole number, got i32\[batch=4\], in random.fold_in: pass one",
    ),
    "a key for a fraction": (lambda: tr.random.fold_in(jax.random.key(0), 1.5), r"got 1\.5, in random.fold_in"),
    "a key for less than none": (
        lambda: tr.random.fold_in(jax.random.key(0), -1),
        r"range of the dtype that it is given, got -1 in random.fold_in",
    ),
    "an array without names": (lambda: tr.named(jnp.zeros(3), None), r"named takes names, got None, in named"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_of_another_kind_is_refused(case):
    call, message = WRONG[case]
    with pytest.raises((tr.NamesError, tr.NotationError), match=message):
        call()


FRACTIONS = {
    "pad": lambda x: tr.pad(x, {"batch": (1, 0)}, value=0.5),
    "max": lambda x: x.max(initial=0.5),
    "nanmin": lambda x: x.nanmin(initial=tr.named(jnp.float32(0.5), "")),
    "divide": lambda x: x.at["batch", 0].divide(2),
}


@pytest.mark.parametrize("what", FRACTIONS)
def test_a_fraction_among_whole_numbers_is_not_cut_off(what):
    with pytest.raises(tr.TypeMismatch, match=rf"must keep the dtype of its array, got .* for i32\[.*, in .*{what}: "):
        FRACTIONS[what](WHOLE)


def test_truths_and_whole_numbers_are_numbers():
    assert WHOLE.astype("uint8").at["batch", 0].set(9).at["batch", 0].subtract(2).tolist() == [7, 0, 0, 0]
    assert tr.pad(WHOLE == 0, {"batch": (1, 1)}).tolist() == [False, True, True, True, True, False]
    assert not (WHOLE > 0).max(initial=0).item()
    assert X.at["batch", 0].set(True).sum().item() == 6.0
    assert tr.random.bernoulli(jax.random.key(0), {"batch": 8}, 1).all().item()


def test_scalars_of_numpy_are_whole_numbers():
    assert tr.top_k(X, "embed", jnp.int32(2))[0].shape == {"batch": 4, "embed": 2}
    assert [x.shape["embed"] for x in tr.split(X, "embed", jnp.int32(3))] == [2, 2, 2]


def test_random_keys_are_no_sums():
    keys = jax.random.split(jax.random.key(0), 8)
    with jax.set_mesh(tr.make_mesh(jax.devices()[:2], x=2)):
        for state in "+~":
            with pytest.raises(
                tr.ReshardError,
                match=rf"numbers can be pending sums or copies, got key<fry> as '\{state}x', in reshard: leave out",
            ):
                tr.reshard(f"a -> a {state}x", keys)


def test_what_is_on_no_device_is_drawn():
    x, drawn = np.ones(3, np.float32), []
    jax.eval_shape(lambda x: drawn.append(tr.show(x)), jnp.asarray(x))
    for picture in (tr.show(x), *drawn):
        assert "| one device |" in str(picture) and "dim0 whole" in str(picture)


@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
@pytest.mark.parametrize("along", ["batch", "embed"])
def test_a_dtype_that_jax_has_no_running_maximum_of(axis_type, along):
    mesh = tr.make_mesh(jax.devices()[:2], axis_type=axis_type, data=2)
    layout = tr.Layout(mesh, compute={"batch": "data"})
    with (
        layout,
        pytest.raises(
            tr.NamesError, match=r"must have operands of dtypes that JAX accepts, got bool_\[.*\] in cummax .*cast"
        ),
    ):
        tr.cummax(tr.shard(X > 0, "compute"), along)


@pytest.mark.slow
def test_ranges_begin_and_end_at_numbers_of_the_program():
    axis, x = tr.Axis("embed", 8), np.linspace(-1.0, 2.0, 8, dtype=np.float32)
    steps = lambda x: tr.arange(axis, step=x.min(), dtype=jnp.float32)
    ours = lambda x: tr.linspace(axis, start=x.mean(), stop=x.max()) * steps(x) * x
    plain = lambda x: jnp.linspace(x.mean(), x.max(), 8) * jnp.arange(8.0) * x.min() * x
    expected = jax.jit(jax.grad(lambda x: jnp.sin(plain(x)).sum()))(x)
    np.testing.assert_allclose(tr.grad(lambda x: tr.sin(ours(x)).sum())(tr.named(x, axis)), expected, rtol=1e-5)
    with tr.Layout(tr.make_mesh(data=8), compute={"embed": "data"}):
        sliced = tr.shard(tr.named(x, axis), "compute")
        np.testing.assert_allclose(ours(sliced), plain(x), rtol=1e-5, atol=1e-6)
        found = tr.named_jit(tr.grad(lambda x: tr.sin(ours(x)).sum()))(sliced)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [[1, 2], np.ones(2), "1", None])
def test_what_takes_one_number_refuses_others(value):
    axis = tr.Axis("embed", 2)
    for make in (
        lambda: tr.full({"embed": 2}, value),
        lambda: tr.linspace(axis, stop=value),
        lambda: tr.arange(axis, start=value),
        lambda: tr.arange(axis, step=value),
    ):
        with pytest.raises(tr.NamesError, match=r"(full|linspace|arange) takes single numbers, got (value|st\w+)="):
            make()


NUMBERS = {
    "pad": lambda number, x: tr.pad(x, {"embed": (1, 1)}, value=number),
    "pad to a length that is not sliced": lambda number, x: tr.pad(x, {"batch": (1, 0)}, value=number).sum("batch"),
    "max": lambda number, x: x.max("batch", initial=number),
    "nanmin": lambda number, x: x.nanmin("embed", initial=number),
    "elu": lambda number, x: tr.elu(x, number),
    "celu": lambda number, x: tr.celu(x, number),
    "squareplus": lambda number, x: tr.squareplus(x, number),
    "leaky_relu": lambda number, x: tr.leaky_relu(x, number * tr.arange(x.axis("embed")).astype("float32")),
    "roll": lambda number, x: tr.roll(x, tr.rint(number).astype("int32"), "embed") * number,
}


@pytest.mark.parametrize("operation", NUMBERS.values(), ids=NUMBERS)
def test_a_number_beside_an_array_may_be_named_and_has_a_gradient(operation):
    number, x = tr.named(jnp.float32(0.7), ""), tr.named(jax.random.normal(jax.random.key(0), (8, 6)), "batch embed")
    value_of = lambda number: (operation(number, x) ** 2.0).sum()
    expected = jax.jit(jax.value_and_grad(lambda number: (operation(number, x).array ** 2).sum()))(number.array)
    with tr.Layout(tr.make_mesh(data=4, model=2), compute={"batch": "data", "embed": "model"}):
        found = tr.named_jit(tr.value_and_grad(value_of))(number)
    for sliced, plain in zip(found, expected, strict=True):
        np.testing.assert_allclose(sliced, plain, rtol=1e-5)
