"""Which dimension a mesh axis slices, and which of two is the major one: JAX's types do not say, the texts do."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import trellis as tr
from tests.mesh.told import told
from trellis import f32
from trellis.mesh.manual.reshard import TransitionError
from trellis.notation import TypeMismatch
from trellis.program.slices import _regrouped


@pytest.fixture(scope="module", autouse=True)
def mesh():
    mesh = tr.make_mesh(x=2, y=2, z=2)
    with jax.set_mesh(mesh):
        yield mesh


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def program(fn, argument, result, other=None, axes=None):
    """A manual function of one array, or of two, with these types."""

    def of_one(a):
        return fn(a)

    def of_two(a, b):
        return fn(a, b)

    chosen = of_one if other is None else of_two
    chosen.__annotations__ = {"a": f32[argument], "return": f32[result]} | ({"b": f32[other]} if other else {})
    chosen.__qualname__ = "program"
    return tr.shard_map(chosen, axes=axes)


def moved(text):
    return lambda a: tr.reshard(text, a)


def in_scan(turns, body):
    return lambda a: jax.lax.scan(lambda c, _: (body(c), None), a, length=turns)[0]


RESHARDED = moved("a/x b -> a/x/y b")
UNARY = {
    "elementwise": lambda a: a * a + 1.0,
    "with a constant": lambda a: jnp.where(a > 0, a, jnp.zeros_like(a)),
    "a jitted function": jax.jit(jnp.tanh),
    "a checkpoint": jax.checkpoint(lambda a: a * 2.0),
    "a loop": in_scan(3, lambda a: a * 2.0),
    "a while loop": lambda a: jax.lax.fori_loop(0, a.shape[1], lambda i, c: c + a, jnp.zeros_like(a)),
    "branches": lambda a: jax.lax.cond(a.sum() > 0, lambda a: a, lambda a: -a, a),
    "along the other dimension": lambda a: jnp.cumsum(a, axis=1),
    "there and back": lambda a: jnp.transpose(jnp.transpose(a)),
    "another dimension": lambda a: jnp.stack([a, a], axis=1).sum(1),
    "a cut": lambda a: jnp.concatenate([a[:, 1:], a[:, :1]], axis=1),
    "split and joined": lambda a: a.reshape(a.shape[0], 2, -1).reshape(a.shape),
    "rows": lambda a: a[:, jnp.arange(a.shape[1])],
    "a product": lambda a: a @ jnp.eye(a.shape[1]),
    "a ring": lambda a: jax.lax.ppermute(a, "x", [(0, 1), (1, 0)]),
    "a map": lambda a: jax.lax.map(jnp.sin, a),
    "rows that are set": lambda a: jnp.zeros_like(a).at[:, 1:].set(a[:, 1:]),
    "columns that are added": lambda a: jax.lax.fori_loop(0, 2, lambda i, c: c.at[:, i].add(1.0), a),
    "an order": lambda a: jnp.take_along_axis(a, jnp.argsort(a, 1), 1),
    "one of each row": lambda a: jax.nn.one_hot(a.argmax(1), a.shape[1]),
    "tiles": lambda a: jnp.tile(a, (1, 2))[:, : a.shape[1]],
    "a gradient": lambda a: jax.grad(lambda a: (a * a).sum())(a),
    "rows of a row": lambda a: a * a[:, :1],
    "rows cut and joined": lambda a: jnp.concatenate([a[:1], a[1:]]),
    "a filter of each channel": lambda a: jax.lax.conv_general_dilated(
        a[None], jnp.ones((a.shape[0], 1, 2)), (1,), [(1, 0)], feature_group_count=a.shape[0]
    )[0],
    "a filter": lambda a: jax.lax.conv_general_dilated(a[:, None], jnp.ones((1, 1, 2)), (1,), [(1, 0)])[:, 0],
    "taken apart and stacked": lambda a: jnp.stack(jnp.unstack(a, axis=1), axis=1),
}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("kind", UNARY)
def test_slices_are_followed_through(kind):
    """What leaves as it lies is right, and what is annotated otherwise is refused."""
    a, fn = numbers(8, 4), UNARY[kind]
    fits = jax.jit(program(lambda a: fn(RESHARDED(a)), "a/x b", "a/x/y b"))(a)
    assert fits.shape == (8, 4)
    for wrong, held in (("a/y/x b", "a/x/y b"), ("c/x d/y", "c/x/y d"), ("c/y d/x", "c/x/y d")):
        with pytest.raises(TypeMismatch) as caught:
            jax.jit(program(lambda a: fn(RESHARDED(a)), "a/x b", wrong))(a)
        assert told(caught) == (
            f"a result must match its annotation, got a slice '{held}' for f32[{wrong}], in result of `program`: "
            "reshard it, or correct the annotation"
        )


@pytest.mark.parametrize("kind", ["a product", "rows", "taken apart and stacked", "tiles"])
def test_what_is_known_of_one_mesh_axis_is_held_against_texts(kind):
    """After a product over the slices of `y`, or a lookup among them, `x` still slices what it did."""
    a, fn = numbers(8, 8), UNARY[kind]
    jax.eval_shape(program(fn, "a/x b/y", "a/x c/y"), a)
    with pytest.raises(TypeMismatch) as caught:
        jax.eval_shape(program(fn, "a/x b/y", "c/y d/x"), a)
    assert told(caught) == (
        "a result must match its annotation, got a slice 'c/x d' for f32[c/y d/x], in result of `program`: "
        "reshard it, or correct the annotation"
    )
    turned = program(lambda a: moved("a/y b/x -> a/y b")(fn(a)), "a/x b/y", "a/y b")
    with pytest.raises(TransitionError, match="got a slice 'a/x b' for 'a/y b/x'"):
        jax.eval_shape(turned, a)


@pytest.mark.parametrize("axes", [None, {"x", "y"}])
def test_the_left_side_of_a_text_is_what_an_operation_made(axes):
    a = numbers(8, 4)
    there = program(lambda a: moved("a/x/y b -> a/y/x b")(a * 2.0), "a/x/y b", "a/y/x b", axes=axes)
    np.testing.assert_array_equal(jax.jit(there)(a), 2 * a)
    with pytest.raises(TransitionError) as caught:
        program(lambda a: moved("a/y/x b -> a/x b")(a * 2.0), "a/x/y b", "a/x b", axes=axes)(a)
    assert told(caught, by_line=True) == (
        "the left side of a text must describe the array, got a slice 'a/x/y b' for 'a/y/x b', in `program`: write "
        "'a/x/y b', or reshard it from there"
    )


@pytest.mark.parametrize(
    ("other", "seen"), [("a/y/x b", "one over 'x/y' and one over 'y/x'"), ("a/z b", "one over 'x/y' and one over 'z'")]
)
@pytest.mark.parametrize(
    "meet", [lambda a, b: a * b, lambda a, b: jnp.stack([a, b]).sum(0), lambda a, b: jnp.einsum("ab,ab->b", a, b)]
)
def test_slices_that_lie_otherwise_do_not_meet(meet, other, seen):
    rows = 8 if "y" in other else 4
    with pytest.raises(TypeMismatch) as caught:
        program(meet, "a/x/y b", "a/x/y b", f"{other}".replace("a/z", "c/z"))(numbers(8, 4), numbers(rows, 4))
    assert told(caught, by_line=True).startswith(f"slices that are combined must be cut the same way, got {seen}")


def test_a_lookup_of_as_many_positions_as_a_device_has_rows():
    """Rows and positions are of one number on each device; they meet where they are aligned, and nowhere else."""
    rows, positions = numbers(8, 4), np.array([0.0, 7.0, 3.0, 3.0], np.float32)

    def looked_up(rows, positions):
        found = tr.take("a/x/y b, n/z -> n/z b +x +y", rows, positions.astype(jnp.int32))
        return tr.reshard("n/z b +x +y -> n/z b", found)

    found = jax.jit(program(looked_up, "a/x/y b", "n/z b", "n/z"))(rows, positions)
    np.testing.assert_array_equal(found, rows[positions.astype(int)])

    aligned = lambda a, b: jnp.take_along_axis(a, b.astype(jnp.int32), 1)
    with pytest.raises(TypeMismatch) as caught:
        program(aligned, "a/x/y b", "a/x/y b", "a/y/x b")(rows, rows)
    refused = "slices that are combined must be cut the same way, got one over 'x/y' and one over 'y/x'"
    assert told(caught, by_line=True).startswith(refused)


BROADCAST = {
    "rows by a column": ("a/x/y", lambda a, b: a * b[:, None]),
    "rows by what is made of rows": ("a/x/y b", lambda a, b: a / jnp.linalg.norm(b, axis=1, keepdims=True)),
    "a column and a row of each": ("a/x/y b", lambda a, b: (a[:, :, None] + b[:, None, :]).sum(2)),
    "chosen by a column": ("a/x/y", lambda a, b: jnp.where(b[:, None] > 3, a, 0.0)),
    "one row of each": ("a/x/y b", lambda a, b: a + b[:1] * b[1:]),
}


@pytest.mark.parametrize("way", BROADCAST)
def test_slices_meet_through_dimensions_of_one(way):
    """An elementwise operation takes operands of which a dimension of size 1 is repeated."""
    other, meet = BROADCAST[way]
    a, b = numbers(8, 4) + 1, numbers(8, 4)[:, 0] + 1 if " " not in other else numbers(8, 4) + 1
    made = program(meet, "a/x/y b", "a/x/y b", other)(a, b)
    if "one row" not in way:
        np.testing.assert_allclose(made, meet(a, b), rtol=1e-6)
    with pytest.raises(TypeMismatch) as caught:
        program(meet, "a/x/y b", "a/x/y b", other.replace("x/y", "y/x"))(a, b)
    seen = " and ".join(f"one over '{axes}'" for axes in (("y/x", "x/y") if "chosen" in way else ("x/y", "y/x")))
    assert told(caught, by_line=True) == (
        f"slices that are combined must be cut the same way, got {seen}, in `program`: reshard one of them"
    )
    with pytest.raises(TypeMismatch, match="got a slice 'a/x/y b' for f32.a/y/x b."):
        program(meet, "a/x/y b", "a/y/x b", other)(a, b)


@pytest.mark.parametrize(
    "update",
    [
        lambda whole, row: whole.at[1].set(row),
        lambda whole, row: whole.at[1].add(row),
        lambda whole, row: jax.lax.dynamic_update_index_in_dim(whole, row, 1, 0),
    ],
)
def test_what_is_put_into_an_array_lies_as_it_does(update):
    whole, row = numbers(3, 8), numbers(8)
    assert program(update, "s b/x/y", "s b/x/y", "b/x/y")(whole, row).shape == (3, 8)
    with pytest.raises(TypeMismatch) as caught:
        program(update, "s b/x/y", "s b/x/y", "b/y/x")(whole, row)
    assert told(caught, by_line=True) == (
        "slices that are combined must be cut the same way, got one over 'x/y' and one over 'y/x', in `program`: "
        "reshard one of them"
    )


def test_an_array_and_its_transpose_do_not_meet():
    with pytest.raises(TypeMismatch) as caught:
        program(lambda a, b: a + b, "m/x n", "m/x n", "n m/x")(numbers(4, 2), numbers(2, 4))
    assert told(caught, by_line=True) == (
        "slices that are combined must be slices of the same dimension, got dimension 0 of one and dimension 1 of "
        "another sliced over 'x', in `program`: transpose one of them, or reshard it"
    )
    turned = program(lambda a, b: a + b.T, "m/x n", "m/x n", "n m/x")(numbers(4, 2), numbers(2, 4))
    np.testing.assert_array_equal(turned, numbers(4, 2) + numbers(2, 4).T)


@pytest.mark.slow
def test_dimensions_that_were_joined_are_no_slice():
    """Unless the first alone is sliced; joined alike, two may meet, and they may be cut again."""
    a, w = numbers(2, 4, 2), numbers(8, 3)
    why = "('n' joins dimensions of which not only the first is sliced, so this is not a slice of it)"
    with pytest.raises(TypeMismatch) as caught:
        program(lambda a: a.reshape(-1, 2), "t b/x d", "n/x d")(a)
    assert told(caught) == (
        f"a result must match its annotation, got a slice 'n/x d' for f32[n/x d] {why}, in result of `program`: "
        "reshard it before they are joined, or correct the annotation"
    )
    with pytest.raises(TransitionError) as caught:
        program(lambda a: moved("n/x d -> n d")(a.reshape(-1, 2)), "t b/x d", "n d")(a)
    assert told(caught, by_line=True) == (
        f"the left side of a text must describe the array, got a slice 'n/x d' for 'n/x d' {why}, in `program`: "
        "reshard it before they are joined"
    )
    product = lambda a, w: moved("o +x -> o")(tr.einsum("n/x, n/x o -> o +x", a.reshape(-1), w))
    with pytest.raises(TypeMismatch) as caught:
        program(product, "t b/x", "o", "n/x o")(numbers(2, 4), w)
    assert told(caught, by_line=True) == (
        "slices that are combined must be cut the same way, got one over 'x' (made by joining dimensions) and one "
        "over 'x', in `program`: reshard one of them"
    )
    both = lambda a, w: moved("o +x -> o")(tr.einsum("n/x, n/x o -> o +x", a.reshape(-1), w.reshape(-1, 3)))
    found = program(both, "t b/x", "o", "t b/x o")(numbers(2, 4), w.reshape(2, 4, 3))
    np.testing.assert_array_equal(found, numbers(8) @ w)
    again = program(lambda a: (a.reshape(-1, 2) * 2).reshape(a.shape), "t b/x d", "t b/x d")(a)
    np.testing.assert_array_equal(again, 2 * a)


@pytest.mark.slow
def test_a_block_of_what_was_joined_is_its_slice_again():
    """As in a feed-forward layer whose gate and up-projection are one weight."""
    a, w = numbers(3, 2, 4), numbers(4, 5)
    flat = lambda a: a.reshape(3, -1)
    both = {
        "split": lambda a: jnp.split(flat(a), 2, 1),
        "sliced": lambda a: (flat(a)[:, : a.shape[2]], flat(a)[:, a.shape[2] :]),
    }
    for way in both.values():
        product = lambda a, w: moved("n o +x -> n o")(tr.einsum("n m/x, m/x o -> n o +x", way(a)[0] * way(a)[1], w))  # noqa: B023
        found = program(product, "n two m/x", "n o", "m/x o")(a, w)
        np.testing.assert_array_equal(found, (a[:, 0] * a[:, 1]) @ w)
    across = {
        "shifted": lambda a: flat(a)[:, 1:3],
        "shifted and cut": lambda a: flat(a)[:, 1:][:, :2],
        "every other": lambda a: flat(a)[:, ::2],
        "rolled": lambda a: jnp.roll(flat(a), 1, 1)[:, :2],
        "cut and taken apart": lambda a: flat(a)[:, 1:3].reshape(3, 2, 1)[:, :, 0],
    }
    for way in across.values():
        with pytest.raises(TypeMismatch, match="'m' joins dimensions of which not only the first is sliced"):
            program(way, "n two m/x", "n m/x")(a)


def test_dimensions_that_are_joined_and_cut_at_once_are_no_slices():
    a = numbers(8, 4)
    cut = lambda rows: lambda a: a.reshape(rows, -1)
    why = "('d' joins dimensions of which not only the first is sliced, so this is not a slice of it)"
    for way in (cut(4), lambda a: cut(4)(a.reshape(-1))):
        with pytest.raises(TypeMismatch) as caught:
            program(way, "t b/x", "t/x d")(a)
        assert told(caught) == (
            f"a result must match its annotation, got a slice 't d/x' for f32[t/x d] {why}, in result of `program`: "
            "reshard it before they are joined, or correct the annotation"
        )
    with pytest.raises(TypeMismatch, match="got dimension 1 of one and dimension 0 of another sliced over 'x'"):
        program(lambda a, b: a.reshape(b.shape) + b, "t b/x", "t/x d", "t/x d")(a, numbers(8, 4))
    again = program(lambda a: cut(8)(cut(4)(a)), "t b/x", "t b/x")(a)
    np.testing.assert_array_equal(again, a)


@pytest.mark.parametrize("says", ["t kv/x g", "t one h/x"])
def test_a_dimension_of_one_may_be_what_is_sliced(says):
    """Of four heads on two devices, either one group of two heads a device, or one dimension more."""
    made = program(lambda a: a.reshape(a.shape[0], 1, -1), "t h/x", says)(numbers(3, 4))
    assert made.shape == ((3, 2, 2) if "kv" in says else (3, 1, 4))


CHOSEN = {
    "a branch": lambda a, w: jax.lax.cond(a[0, 0] > 5, lambda: jnp.ones(3), lambda: jnp.zeros(3)),
    "one of several": lambda a, w: jax.lax.switch(jnp.argmax(a[0]), [lambda i=i: jnp.full(3, 1.0 * i) for i in (0, 1)]),
    "turns": lambda a, w: jax.lax.while_loop(lambda c: c[0] < a[0, 0], lambda c: c + 1, jnp.zeros(3)),
    "turns of a body": lambda a, w: jax.lax.fori_loop(0, jnp.argmax(a[0]), lambda i, c: c * 2, w),
    "in a loop": lambda a, w: jax.lax.scan(
        lambda c, _: ((jax.lax.cond(a[0, 0] > 5, lambda: jnp.ones(3), lambda: jnp.zeros(3)), c[0]), None),
        (w, w),
        length=3,
    )[0][1],
}


@pytest.mark.parametrize("what", CHOSEN)
def test_what_each_device_chooses_for_itself_is_not_the_same(what):
    """JAX types what a branch or a loop gives as the same on all devices, also where their choice is not."""
    a, w = numbers(4, 2), numbers(3)
    with pytest.raises(
        TypeMismatch, match="got one that differs along x for f32.d., in result of `program`: gather it"
    ):
        program(CHOSEN[what], "a/x b", "d", "d")(a, w)
    alike = lambda a, w: CHOSEN[what](jax.lax.pmax(a, "x"), w)
    assert program(alike, "a/x b", "d", "d")(a, w).shape == (3,)


CALLS = {
    "of its slice": lambda a: jax.pure_callback(np.sum, jax.ShapeDtypeStruct((), a.dtype), a),
    "of nothing": lambda a: io_callback(lambda: np.float32(next(COUNT)), jax.ShapeDtypeStruct((), a.dtype)),
}
COUNT = itertools.count()


@pytest.mark.parametrize("call", CALLS)
def test_what_each_device_calls_for_is_not_the_same(call):
    """JAX types what a callback gives as the same on all devices."""
    a = numbers(4, 2)
    with pytest.raises(TypeMismatch, match="got one that differs along x(, y, z)? for f32.., in result of `program`"):
        program(CALLS[call], "a/x b", "")(a)
    alike = lambda a: jax.pure_callback(np.sum, jax.ShapeDtypeStruct((), a.dtype), jax.lax.psum(a, "x"))
    assert program(alike, "a/x b", "")(a) == a.sum()


@pytest.mark.slow
def test_a_branch_that_each_device_chooses_takes_what_differs_as_its_choice():
    a, w = numbers(4, 2), numbers(2, 2)
    chosen = lambda a, w: jax.lax.cond(a[0, 0] > 3, lambda a: a @ w, lambda a: a, a)
    with pytest.raises(TypeMismatch) as caught:
        program(chosen, "a/x b", "a/x c", "b c")(a, w)
    assert told(caught, by_line=True) == (
        "a branch that each device chooses for itself must take numbers that differ as the choice does, got some that "
        "are the same along x, in `program`: write jax.lax.pcast(values, ('x',), to='varying') first"
    )
    cast = program(lambda a, w: chosen(a, jax.lax.pcast(w, ("x",), to="varying")), "a/x b", "a/x c", "b c")
    expected = lambda a, w: jnp.concatenate([a[:2], a[2:] @ w])
    np.testing.assert_allclose(cast(a, w), expected(a, w))
    found = jax.jit(jax.grad(lambda a, w: (cast(a, w) ** 2).sum(), argnums=(0, 1)))(a, w)
    for one, other in zip(found, jax.grad(lambda a, w: (expected(a, w) ** 2).sum(), argnums=(0, 1))(a, w)):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_collective_is_not_in_a_branch_or_a_loop_that_each_device_chooses():
    """Some devices would wait for others for ever."""
    a, ring = numbers(4, 2), [(0, 1), (1, 0)]
    branch = lambda a: jax.lax.cond(a[0, 0] > 3, lambda a: a + jax.lax.psum(a, "x"), lambda a: a, a)
    turns = lambda a: jax.lax.while_loop(lambda c: c[0, 0] < a[0, 0], lambda c: jax.lax.ppermute(c, "x", ring), a)
    for way in (branch, turns):
        with pytest.raises(TypeMismatch) as caught:
            program(way, "a/x b", "a/x b")(a)
        assert told(caught, by_line=True) == (
            "a collective must run on all devices along its mesh axes or on none, got one over x in a branch or a "
            "loop that each device chooses for itself, in `program`: share the choice first, as with jax.lax.pmax, or "
            "move the collective out"
        )
    shared = lambda a: jax.lax.pmax(a[0, 0], "y") > 3
    along_y = lambda a: jax.lax.cond(shared(a), lambda a: a + jax.lax.pmax(a, "y"), lambda a: a, a)
    assert program(along_y, "a/x b/y", "a/x b/y")(numbers(4, 4)).shape == (4, 4)


@pytest.mark.slow
def test_an_order_that_devices_have_of_their_own_is_not_the_same():
    """JAX types what `argsort` gives as if it were."""
    a = numbers(8, 4)[::-1].copy()
    some = lambda a: jnp.argsort(a, axis=1)[0].astype(jnp.float32)
    with pytest.raises(TypeMismatch) as caught:
        program(some, "a/x b", "b")(a)
    assert told(caught) == (
        "a result must match its annotation, got one that differs along x for f32[b], in result of `program`: gather "
        "it before the function ends, or correct the annotation (JAX's types count the result of argsort, or of a "
        "branch or a loop that each device chooses for itself, as the same on all devices)"
    )
    carried = lambda a: jax.lax.scan(lambda c, _: (c + some(a), None), jnp.zeros(4), length=2)[0]
    with pytest.raises(TypeMismatch, match="got one that differs along x"):
        program(carried, "a/x b", "b")(a)
    np.testing.assert_array_equal(program(lambda a: jax.lax.pmax(some(a), "x"), "a/x b", "b")(a), range(4))


def test_numbers_are_sorted_by_keys_that_differ_as_they_do():
    by_keys = lambda a, b: jax.lax.sort_key_val(a, b)[1]
    with pytest.raises(TypeMismatch) as caught:
        program(by_keys, "a/x", "b/x", "c")(numbers(4), numbers(2))
    assert told(caught, by_line=True) == (
        "operands that are sorted together must differ along the same mesh axes, got some that are the same along x, "
        "in `program`: write jax.lax.pcast(values, ('x',), to='varying') first"
    )
    cast = lambda a, b: by_keys(a, jax.lax.pcast(b, ("x",), to="varying"))
    assert program(cast, "a/x", "b/x", "c")(numbers(4), numbers(2)).shape == (4,)


def test_an_operation_without_a_result(capfd):
    def show(a):
        jax.debug.print("{} {}", a.sum(), a.max())
        return a

    program(show, "a/x b", "a/x b")(numbers(2, 2))
    jax.effects_barrier()
    assert set(capfd.readouterr().out.splitlines()) == {"1.0 1.0", "5.0 3.0"}


def test_turns_and_branches_give_slices_that_lie_alike():
    a = numbers(8, 8)
    turned = lambda a: jnp.transpose(a)
    assert program(in_scan(2, lambda a: turned(turned(a))), "a/x b/y", "a/x b/y")(a).shape == (8, 8)
    with pytest.raises(
        TypeMismatch,
        match="a loop must carry slices that are cut the same way in every iteration, got _/x _/y and _/y _",
    ):
        program(in_scan(2, turned), "a/x b/y", "a/x b/y")(a)
    with pytest.raises(
        TypeMismatch, match="branches must return slices that are cut the same way, got _/x _/y and _/y _/x"
    ):
        program(lambda a: jax.lax.cond(a.sum() > 0, turned, lambda a: a, a), "a/x b/y", "a/x b/y")(a)


@pytest.mark.slow
def test_pairs_of_blocks_may_be_made_by_hand():
    """In a ring queries and keys of one sequence are sliced over one mesh axis, and so a score is, twice."""

    def scores(a, b):
        products = jnp.einsum("ac,bc->ab", a, b)
        seen = jnp.arange(a.shape[0])[:, None] >= jnp.arange(b.shape[0])[None, :]
        return jax.nn.softmax(jnp.where(seen, products, -1e9), axis=1) @ b

    made = program(scores, "pos/x/y c", "pos/x/y c", "key_pos/x/y c")(numbers(8, 4), numbers(8, 4))
    assert made.shape == (8, 4)


def test_what_jax_moves_is_what_the_next_text_says():
    a = numbers(8, 8)
    there = program(lambda a: jax.lax.all_to_all(a, "y", 0, 1, tiled=True), "a b/y", "a/y b")
    assert there(a).shape == (8, 8)
    exchanged = program(
        lambda a: jax.lax.ppermute(a, ("x", "y"), [(0, 0), (1, 2), (2, 1), (3, 3)]), "a/x/y b", "a/y/x b"
    )
    np.testing.assert_array_equal(exchanged(a), a)


@pytest.mark.parametrize(
    ("before", "after", "dims", "kept"),
    [
        ((4,), (1, 4), "x", ["", ""]),
        ((1, 4), (1, 2, 2), "-x", ["", "", ""]),
        ((3, 4), (3, 1, 4), "x-", ["x", "", ""]),
        ((4, 6), (24,), "x-", ["x"]),
        ((4, 6), (24,), "-x", ["*6.1.x"]),
        ((4, 6), (24,), "xy", ["*4.6.x*6.1.y"]),
        ((2, 12), (4, 6), "-x", ["*2.1.x", ""]),
        ((24,), (4, 6), "x", ["x", ""]),
        ((1, 4), (4, 1), "xy", ["y", ""]),
        ((2, 3, 4), (2, 12), "xy-", ["x", "y"]),
        ((2, 6), (3, 4), "x-", ["x", ""]),
        ((0, 3), (3, 0), "xy", ["", ""]),
        ((8, 2), (2, 8), "-x", ["", "*2.1.x"]),
        ((3, 4), (2, 6), "-x", ["", "*4.1.x"]),
        ((3, 4), (2, 6), "x-", ["x", ""]),
        ((2, 3, 4), (6, 2, 2), "-x-", ["*3.1.x", "", ""]),
    ],
)
def test_reshapes_keep_what_they_do_not_cut(before, after, dims, kept):
    given = tuple((axis,) if axis != "-" else () for axis in dims)
    assert ["".join(axes) for axes in _regrouped(before, after, given)] == kept
