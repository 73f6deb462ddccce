"""`scan`, `fold` and `map` over a name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from trellis._compat import derivatives_around
from trellis.mesh.layout import current_layout
from trellis.mesh.linear import gradients_together
from trellis.named.around import any_narrow, scan_of
from trellis.named.array import is_named
from trellis.named.axis import Name, name_of
from trellis.named.backend import fences_layers
from trellis.named.carry import Elsewhere, check_carry, pinned
from trellis.named.index import positions
from trellis.named.mapped import entered, front, inside, is_mapped, length_of, named_leaves, only_arrays, restore
from trellis.named.operand import refuse_cut, refuse_dealt, refuse_pending
from trellis.named.placing import whole
from trellis.named.saving import Keep, checkpoint, layer_written_out, nothing
from trellis.notation import spec_of
from trellis.notation.state import mode_of, sharding_on, state_of
from trellis.program.scopes import turn


def scan(
    fn: Callable, axis: Name, *, reverse: bool = False, unroll: int = 1, policy: Keep | Callable | None = None
) -> Callable:
    """A loop along a name that carries a value: `carry, ys = scan(f, "layers")(carry, xs)`.

    `fn(carry, x) -> (carry, y)` sees one position of every array in `xs` that
    has the name, and everything else whole. It is compiled once. A sliced name
    is gathered first.

    The gradient of what the body reads from around it is summed over the positions in float32, if the value has fewer
    bits. (`jax.lax.scan` sums in the value's type, and a sum of equal terms in bfloat16 stops growing after 256.)

    >>> steps, w = tr.ones({"pos": 1024, "embed": 2}, jnp.bfloat16), tr.ones({"embed": 2}, jnp.bfloat16)
    >>> total = lambda w: tr.scan(lambda c, x: (c, x * w), "pos")(0.0, steps)[1].astype(jnp.float32).sum()
    >>> tr.grad(total)(w).array.tolist()
    [1024.0, 1024.0]

    Args:
        fn: the body. It gives a carry of the names, dtypes and sharding that it takes.
        axis: the name. Given as an axis, no argument needs to have it.
        reverse: from the last position to the first.
        unroll: how many bodies one iteration of the compiled loop holds.
        policy: what each iteration keeps for the backward pass (`Keep`, or a policy of `jax.checkpoint`).

    Raises:
        NamesError: no argument has the name, or with different sizes.
        TypeMismatch: the body gives another carry than it takes.
    """
    return loop(fn, axis, reverse, unroll, policy, once=jax.jit)


def loop(
    fn: Callable,
    axis: Name,
    reverse: bool,
    unroll: int,
    policy,
    *,
    once: Callable,
    own: tuple = (),
    by_order: bool = True,
    wide: bool = True,
) -> Callable:
    """`scan`.

    Args:
        once: what is applied to the body if the loop is written out: `jax.jit`, so that it is traced once, or nothing.
        own: a tree for each position, which `fn` gets after the carry; the loop is written out.
        by_order: whether the result at a position depends on those before it.
        wide: whether the body may read values of few bits from around it, of which a gradient is taken, and which no
            argument of the loop has.
    """
    name = name_of(axis, "scan")
    ordered = (name,) if by_order else ()

    def scanned(carry, *xs):
        xs = entered(xs, "scan")
        length = length_of(xs, axis, "scan")
        written = bool(own) or 0 < length <= unroll
        carry = entered(only_arrays(carry, "scan"), "scan", numbers=not written)
        refuse_cut((name,), "scan")
        refuse_dealt(ordered, "scan")
        gathered = lambda x: whole(x, (name,), "scan", ordered) if is_named(x) and name in x.names else x
        tree = front(jax.tree.map(gathered, xs, is_leaf=is_named), name)
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_mapped)
        moving = [x.x if is_mapped(x) else None for x in leaves]
        still = [None if is_mapped(x) else x for x in leaves]

        def body(carry, moving, *mine):
            slots = [s if m is None else m for m, s in zip(moving, still, strict=True)]
            carry = pinned(carry)
            new, y = only_arrays(fn(carry, *mine, *inside(jax.tree.unflatten(structure, slots))), "scan")
            check_carry(carry, new, f"a loop over '{name}'", body)
            for each in named_leaves(y):
                refuse_pending(each, "stacking the results of a loop")
            return pinned(new), entered(y, "scan", copies=False)  # JAX cannot take a stack of partial sums apart

        reads = wide or any_narrow([x for x in still if x is not None])

        def run(carry):
            fenced = written and fences_layers((carry, moving, own))
            one = checkpoint(body, _without_copies(policy), fenced=fenced)
            if fenced:
                one = _in_turn(one)
            with layer_written_out(fenced):
                if written:
                    return _written_out(once(one), carry, moving, length, reverse, own)
                if unroll > 1:
                    return _in_groups(once(one), carry, moving, length, unroll, reverse, reads)
                return scan_of(one, carry, moving, wide=reads, length=length, reverse=reverse)

        try:
            carry, ys = run(carry)
        except Elsewhere as elsewhere:
            if elsewhere.body is not body:  # of another loop, inside this one
                raise
            carry, ys = run(elsewhere.moved(carry))
        return carry, restore(ys, name, "scan")

    return scanned


def _in_turn(body: Callable) -> Callable:
    """A body of a loop that is written out, whose backward pass ends before the next one's begins, as in a loop."""
    return lambda carry, *parts: body(*gradients_together((carry, *parts)))


def _without_copies(policy: Keep | Callable | None) -> Keep | Callable | None:
    """What a loop keeps: in a second derivative no copies (`~`), such as gathered weights, if it were to keep all.

    The gradient of a stack of copies is a stack of pending sums, which JAX (0.10.2 to 0.12.0) cannot take apart again.
    """
    keeps_all = policy is None or (isinstance(policy, Keep) and policy.everything)
    layout = current_layout()
    explicit = layout is not None and mode_of(layout.mesh) == "explicit"
    return nothing if keeps_all and explicit and derivatives_around() > 1 else policy


def _written_out(one, carry, moving, length: int, reverse: bool, own: tuple = ()):
    """What `jax.lax.scan` computes, without a loop. What the body keeps for the backward pass is kept as it is; an
    unrolled `lax.scan` stacks it and takes it apart again."""
    leaves, structure = jax.tree.flatten(moving)
    parts = [positions(x, 0) for x in leaves]
    ys = {}
    for i in reversed(range(length)) if reverse else range(length):
        with turn(i, length):
            carry, ys[i] = one(carry, jax.tree.unflatten(structure, [part[i] for part in parts]), *own[i : i + 1])
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *(ys[i] for i in range(length)))


def _in_groups(one, carry, moving, length: int, size: int, reverse: bool, wide: bool):
    """What `jax.lax.scan` computes with `unroll`: a loop over groups of positions, and the rest written out.

    JAX 0.10.2 to 0.12.0 cannot unroll a loop that stacks copies (`~`) or pending sums, as its gradient does.
    """
    even = length // size * size
    groups = jax.tree.map(lambda x: _folded(jax.lax.slice_in_dim(x, 0, even), 1, (even // size, size)), moving)
    rest = jax.tree.map(lambda x: jax.lax.slice_in_dim(x, even, length), moving)
    group = lambda carry, part: _written_out(one, carry, part, size, reverse)
    if length > even and reverse:
        carry, last = _written_out(one, carry, rest, length - even, reverse)
    carry, ys = scan_of(group, carry, groups, wide=wide, length=even // size, reverse=reverse)
    ys = jax.tree.map(lambda y: _folded(y, 2, (even,)), ys)
    if length > even and not reverse:
        carry, last = _written_out(one, carry, rest, length - even, reverse)
    return carry, jax.tree.map(lambda *y: jnp.concatenate(y), ys, last) if length > even else ys


def _folded(x, count: int, sizes: tuple[int, ...]):
    """A plain array with dimensions of these sizes in place of its first `count`, which are not sliced."""
    state = state_of(x)
    spec = spec_of([*[()] * len(sizes), *state.axes[count:]], state.pending, state.copied)
    out = sharding_on(x, spec) if state.mode == "explicit" else None
    return jax.lax.reshape(x, (*sizes, *x.shape[count:]), out_sharding=out)


def fold(
    fn: Callable, axis: Name, *, reverse: bool = False, unroll: int = 1, policy: Keep | Callable | None = None
) -> Callable:
    """A `scan` that keeps only the last value: `x = fold(block, "layers")(x, params)`."""

    def folded(carry, *xs):
        return scan(lambda c, *x: (fn(c, *x), None), axis, reverse=reverse, unroll=unroll, policy=policy)(carry, *xs)[0]

    return folded


def map(fn: Callable, axis: Name, *, policy: Keep | Callable | None = None) -> Callable:
    """Maps one position after the other, without a carry (for when `vmap` would need too much memory)."""

    def mapped(*xs):
        one = lambda _, *x: (None, fn(*x))
        return loop(one, axis, False, 1, policy, once=jax.jit, by_order=False)(None, *xs)[1]

    return mapped
