"""Arguments that are no arrays, of another kind than an operation takes: one clear error, with what to write."""

import jax.numpy as jnp
import pytest

import trellis as tr

X = tr.zeros({"batch": 4, "embed": 6})
WHOLE = tr.zeros({"batch": 4}, dtype=jnp.int32)

WRONG = {
    "a count that is an axis": (lambda: tr.top_k(X, "embed", tr.Axis("k", 2)), r"top_k takes a whole number, got .*k"),
    "a count with a fraction": (lambda: tr.split(X, "embed", 2.5), r"split takes a whole number, got 2\.5, .* split"),
    "sizes of parts": (lambda: X.split_axis("embed", {"a": "b", "c": 2}), r"split_axis takes a whole number, got 'b'"),
    "widths without names": (lambda: tr.pad(X, 2), r"pad takes a dict from names, got 2, in pad: .*\{'pos'"),
    "one width": (lambda: tr.pad(X, {"embed": 1}), r"pad takes names, got 1, in pad: write pad"),
    "the order in roll": (lambda: tr.roll(X, "embed", "embed"), r"roll takes a whole number, got 'embed'"),
    "names for rename": (lambda: X.rename("embed"), r"rename takes a dict from names, got 'embed', .*\{'old'"),
    "no names": (lambda: X.transpose(None), r"transpose takes names, got None, in transpose: write"),
    "names to merge": (lambda: tr.merge_axes(X, 3, "both"), r"merge_axes takes names, got 3"),
    "a text last": (lambda: tr.einsum(X, X, "batch embed"), r"einsum takes a text, got f32\[batch=4 embed=6\]"),
    "a pattern": (lambda: tr.rearrange(X, ("embed", "batch")), r"rearrange takes a text, got \('embed', 'batch'\)"),
    "an array first": (lambda: tr.reshard(X, "batch -> batch/d"), r"the notation is a text, got a NamedArray"),
    "an array is no shape": (lambda: tr.parse([1]), r"the notation is a text, got a list in its place: put the text"),
    "the order in outer": (lambda: tr.outer(X, X, jnp.equal), r"outer takes a function, got f32\[batch=4 embed=6\]"),
    "no loop": (lambda: tr.while_loop(X, X, X), r"while_loop takes a function, got f32\[batch=4 embed=6\]"),
    "no branches": (lambda: tr.cond(True, X, X), r"cond takes a function, got f32\[batch=4 embed=6\], in cond: write"),
    "a plain sum": (lambda: tr.settle(jnp.zeros(3)), r"settle takes a named array, got f32\[3\], in settle"),
    "no dtype": (lambda: X.astype("floaty"), r"astype takes a dtype, got 'floaty', in astype: write jnp\.bfloat16"),
    "a dtype of none": (lambda: X.astype(None), r"astype takes a dtype, got None"),
    "fractions as bits": (lambda: X & 1, r"takes the dtypes of JAX's, got f32\[batch=4 embed=6\] and 1 .*astype"),
    "whole numbers": (lambda: tr.sigmoid(WHOLE), r"takes the dtypes of JAX's, got i32\[batch=4\] .*cast"),
    "names and no array": (lambda: tr.named("batch", X), r"named takes an array, got 'batch', in named"),
    "an array without names": (lambda: tr.named(jnp.zeros(3), None), r"named takes names, got None, in named"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_of_another_kind_is_refused(case):
    call, message = WRONG[case]
    with pytest.raises((tr.NamesError, tr.NotationError), match=message):
        call()


def test_scalars_of_numpy_are_whole_numbers():
    assert tr.top_k(X, "embed", jnp.int32(2))[0].shape == {"batch": 4, "embed": 2}
    assert [x.shape["embed"] for x in tr.split(X, "embed", jnp.int32(3))] == [2, 2, 2]
