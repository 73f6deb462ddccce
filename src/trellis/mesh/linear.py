"""Linear functions whose gradient is written by hand, in every mode of differentiation.

`jax.custom_vjp` has no forward mode. A function with a derivative of its own is written with `jax.custom_jvp` instead,
and the derivative, which is linear, with `linear`: forward mode runs it, reverse mode runs its transpose.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from trellis._compat import mapped_in_any_state
from trellis.program.trace import Untraced

mapped_in_any_state()  # before anything is mapped


def linear(fun: Callable, transpose: Callable, like: Any = None, mapped: Callable | None = None) -> Callable:
    """A linear function, with the transpose that reverse mode runs for it.

    >>> import jax.numpy as jnp
    >>> scale = linear(lambda by, x: by * x, lambda by, gradient: by * gradient)
    >>> jax.jvp(lambda x: scale(2.0, x), (3.0,), (1.0,))[1]
    Array(2., dtype=float32, weak_type=True)
    >>> jax.grad(lambda x: scale(2.0, x))(3.0)
    Array(2., dtype=float32, weak_type=True)

    Args:
        fun: `fun(fixed, moving)`, linear in `moving`; both are trees of arrays. Closes over no arrays.
        transpose: `transpose(fixed, gradient)`: from the gradient of the result to that of `moving`. Ordinary JAX,
            which may be mapped and differentiated like any other. Of several results, one that nothing depends on has
            None for its gradient.
        like: arrays of the types that `fun` returns, where they are at hand: then `fun` is not traced before something
            needs its program, and a gradient does not.
        mapped: what `jax.vmap` makes of it, `mapped(fixed, moving, dims)`, with the new dimension first; `dims` are the
            mapped dimensions of both, None for what is not mapped. Without it, a mapped function has JAX's gradient.
    """

    def call(fixed, moving):
        first, fixed_tree = jax.tree.flatten(fixed)
        second, moving_tree = jax.tree.flatten(moving)
        count, out_trees = len(first), []

        def flat(*arrays):
            arrays = list(arrays)
            fixed, moving = arrays[:count], arrays[count:]
            out, tree = jax.tree.flatten(fun(fixed_tree.unflatten(fixed), moving_tree.unflatten(moving)))
            out_trees.append(tree)
            return out

        def flat_transpose(fixed, gradients):
            given = transpose(fixed_tree.unflatten(fixed), out_trees[0].unflatten(gradients))
            return moving_tree.flatten_up_to(given)

        if like is None:
            jaxpr = jax.make_jaxpr(flat)(*first, *second)
        else:
            leaves, tree = jax.tree.flatten(like)
            out_trees.append(tree)
            jaxpr = Untraced(flat, [jax.typeof(leaf) for leaf in leaves])
        again = None
        if mapped is not None:
            parts = lambda flat: (fixed_tree.unflatten(flat[:count]), moving_tree.unflatten(flat[count:]))
            again = lambda arrays, dims: jax.tree.leaves(mapped(*parts(arrays), parts(dims)))
        out = _linear.bind(*first, *second, jaxpr=jaxpr, transpose=flat_transpose, count=count, mapped=again)
        return out_trees[0].unflatten(out)

    return call


def gradients_together(values: Any) -> Any:
    """Returns a tree of arrays unchanged; their gradients are all made before any of them is used.

    Left alone, compilers make the gradient of a parameter when it is needed, at the end of a step, and keep what it is
    made of until then.

    >>> jax.grad(lambda pair: sum(gradients_together(pair)))((1.0, 2.0))
    (Array(1., dtype=float32, weak_type=True), Array(1., dtype=float32, weak_type=True))
    """
    leaves, structure = jax.tree.flatten(values)
    return structure.unflatten(_unchanged(*leaves))


@jax.custom_jvp
def _unchanged(*arrays):
    return arrays


def _along(arrays, tangents):
    there = [not isinstance(t, SymbolicZero) for t in tangents]
    moved = iter(_fenced((), [t for t, moves in zip(tangents, there, strict=True) if moves]))
    return arrays, tuple(next(moved) if moves else t for t, moves in zip(tangents, there, strict=True))


_fenced = linear(lambda _, tangents: tangents, lambda _, gradients: jax.lax.optimization_barrier(gradients))
_unchanged.defjvp(_along, symbolic_zeros=True)


_linear = Primitive("linear")
_linear.multiple_results = True


def _run(*arrays, jaxpr: ClosedJaxpr | Untraced, **_):
    if isinstance(jaxpr, Untraced):
        return jaxpr.fun(*arrays)
    return eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *arrays)


def _jvp(primals, tangents, *, count: int, **how):
    out = _linear.bind(*primals, count=count, **how)
    terms = []
    fixed, moving = primals[:count], tangents[count:]
    if not all(type(t) is ad.Zero for t in moving):
        moving = [ad.instantiate_zeros(t) for t in moving]
        terms.append(_linear.bind(*fixed, *moving, count=count, **how))
    if not all(type(t) is ad.Zero for t in tangents[:count]):
        changed = [ad.instantiate_zeros(t) for t in tangents[:count]]
        run = lambda *fixed: _run(*fixed, *primals[count:], **how)
        terms.append(jax.jvp(run, tuple(fixed), tuple(changed))[1])
    return out, [ad.add_tangents(*each) if len(each) == 2 else each[0] for each in zip(*terms, strict=True)]


def _transpose(gradients, *arrays, transpose: Callable, count: int, **_):
    if all(type(g) is ad.Zero for g in gradients):  # a program within `jit` whose caller needs no result of this
        return [None] * len(arrays)
    found = transpose(arrays[:count], [None if type(g) is ad.Zero else g for g in gradients])
    wanted = [ad.is_undefined_primal(a) for a in arrays[count:]]
    return [None] * count + [g if w else None for g, w in zip(found, wanted, strict=True)]


def _batch(arrays, dims, *, jaxpr: ClosedJaxpr | Untraced, mapped: Callable | None, **_):
    if mapped is not None:
        out = mapped(arrays, dims)
    else:  # JAX sees the linear function itself, with JAX's own gradient
        out = jax.vmap(lambda *arrays: _run(*arrays, jaxpr=jaxpr), in_axes=dims)(*arrays)
    return out, [0] * len(out)


_linear.def_impl(_run)
_linear.def_abstract_eval(lambda *arrays, jaxpr, **_: jaxpr.out_avals)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=True))
