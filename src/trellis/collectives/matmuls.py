"""Matrix multiplications whose communication hides behind their own products, in manual mode."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.linear import linear
from trellis.mesh.manual.einsum import check_product, parse_einsum
from trellis.mesh.manual.ops import mark_pending, vary, varying_axes
from trellis.mesh.manual.reshard import check_slice, known_axes
from trellis.mesh.ring import Moved, Names, Ring, RingError, gather_products, scatter_products
from trellis.notation import Dim, Shape
from trellis.notation.binding import bind_shape, live, partly_manual, real_axes


def gather_matmul(text: str, x, *weights, ring: Ring):
    """A product with a gathered `x`, computed while its slices pass: all-gather and matmul in one.

    The ring's axis slices one name of `x`, and that name is whole in the weight or in the result. Along other mesh axes
    it is each device's own product, as in `einsum`: a sum over a name that `z` slices leaves `+z` in the result.

    | text | is |
    |---|---|
    | `batch/x in/y, in out/y -> batch/x out/y` | the first product of a feed-forward block |
    | `batch/x pos/y in, in out/y -> batch/x pos out/y` | the same, where activations are sliced over positions |

    Gradient: with respect to `x` a `matmul_scatter`, with respect to the weight another `gather_matmul`. For it,
    `x` is kept as it came, sliced.

    Args:
        text: the types, as in `einsum`.
        x: one device's slice, inside `shard_map`.
        *weights: one or several of the type that the text says; all use each passing slice.
        ring: how slices travel.

    Returns:
        one array, or a list of as many as there are weights.

    Raises:
        RingError: the text is no such product, the mesh has no such axis, or a size does not divide.
        NotationError: along other mesh axes than the ring's it is no product that each device can do on its own.
    """
    call = _Call("gather_matmul", text, ring, (x, *weights))
    if not weights:
        call.refuse("a product in a ring needs a weight", "none", "pass one or several after the gathered operand")
    name = call.sliced(call.x, "the ring's axis must slice a name of the first operand")
    if ring.axis in _axes_of(call.result, name) or (name in call.weight.names) == (name in call.result.names):
        call.refuse(f"'{name}' must be whole in either the second operand or the result", f"'{call.result}'", _GATHER)
    if ring.axis in _axes_of(call.weight, name):
        call.refuse("the gathered name must be whole in the second operand", f"'{call.weight}'", _GATHER)
    if ring.axis not in call.result.mesh_axes:
        call.refuse(
            "the ring's axis must slice the result, or all devices would compute the same",
            f"'{call.result}'",
            f"slice the second operand over '{ring.axis}', or gather the first with all_gather",
        )
    left = call.left(gathered=True)
    if call.size == 1:
        found = call.plain()
    else:
        moved = call.moved(name, call.arrays[0].shape[call.x.names.index(name)], call.x)
        found = _gather_matmul(call.spec(moved), *call.arrays)
    found = [mark_pending(each, left, call.result) for each in found]
    return found[0] if len(weights) == 1 else found


def matmul_scatter(text: str, x, weight, *, ring: Ring):
    """A product whose partial sums travel and are added on the way: matmul and reduce-scatter in one.

    The ring's axis slices the summed name, and in the result another name:

    | text | is |
    |---|---|
    | `batch/x in/y, in/y out -> batch/x out/y` | the second product of a feed-forward block |
    | `batch/x pos in/y, in/y out -> batch/x pos/y out` | the same, where activations are sliced over positions |

    Gradient: one ring, whose passing slices are used for both gradients. Arguments and errors are those of
    `gather_matmul`.
    """
    call = _Call("matmul_scatter", text, ring, (x, weight))
    name = call.sliced(call.result, "the ring's axis must slice a name of the result")
    call.summed(name)
    left = call.left()
    if call.size == 1:
        return mark_pending(call.plain()[0], left, call.result)
    owner, array = (call.x, call.arrays[0]) if name in call.x.names else (call.weight, call.arrays[1])
    size = array.shape[owner.names.index(name)]
    if size % call.size:
        call.refuse(
            f"'{name}' must be divisible by the number of devices in the ring",
            f"{name}={size} on {ring.axis}={call.size} devices",
            f"use a multiple of {call.size}",
        )
    moved = call.moved(name, size // call.size, call.result)
    return mark_pending(_matmul_scatter(call.spec(moved), *call.arrays), left, call.result)


def matmul_reduce(text: str, x, weight, *, ring: Ring):
    """A product whose sum all devices get: a `matmul_scatter` and an all-gather for each chunk in turn.

    `batch/x in/y, in/y out -> batch/x out`. The gather of one chunk runs while the next one is multiplied, so
    `ring.chunks` of 2 or more hide most of it. Gradient: each device's own products, nothing moves. Arguments and
    errors are those of `gather_matmul`.
    """
    call = _Call("matmul_reduce", text, ring, (x, weight))
    if ring.axis in call.result.mesh_axes:
        call.refuse(
            "the result cannot be sliced along the ring", f"'{call.result}'", "use matmul_scatter for a sliced result"
        )
    call.summed(None)
    left = call.left()
    if call.size == 1:
        return mark_pending(call.plain()[0], left, call.result)
    free = [n for n in call.weight.names if n in call.result.names]
    sizes = [call.arrays[1].shape[call.weight.names.index(n)] for n in free]
    name, size = next(((n, s) for n, s in zip(free, sizes, strict=True) if s % call.size == 0), (None, 0))
    if name is None:
        call.refuse(
            "a dimension of the result must be divisible by the number of devices in the ring",
            f"{', '.join(f'{n}={s}' for n, s in zip(free, sizes, strict=True))} on {ring.axis}={call.size} devices",
            f"use a multiple of {call.size}",
        )
    if ring.chunks > 1:
        rows = call.rows()
        call.check_chunks(rows, call.arrays[0].shape[call.x.names.index(rows)])
    moved = Moved(name, size // call.size, call.sliced_text(call.result, name))
    return mark_pending(_matmul_reduce(call.spec(moved), *call.arrays), left, call.result)


_GATHER = "write 'batch/x in/y, in out/y -> batch/x out/y' or 'batch/x pos/y in, in out/y -> batch/x pos out/y'"
_SUM = "write 'batch/x in/y, in/y out -> ...', so that each device has a partial sum"


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What the rings below need to know; hashable, for `custom_jvp`."""

    ring: Ring
    moved: Moved
    x: Names
    weight: Names
    result: Names


class _Call:
    """One product: its text, checked against the mesh and the arrays."""

    def __init__(self, verb: str, text: str, ring: Ring, arrays: tuple):
        self.ring, self.where = ring, f"{verb}('{text}', ring=Ring('{ring.axis}'))"
        lefts, result = parse_einsum(text)
        if len(lefts) != 2:
            self.refuse("a product in a ring needs two operands", f"{len(lefts)}", "write 'x, weight -> result'")
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.manual_axes or partly_manual():
            seen, fix = "another mode", "call it inside shard_map"
            if mesh.manual_axes:
                seen = f"a shard_map with axes={{{', '.join(map(repr, mesh.manual_axes))}}}"
                fix = "leave out its axes"
            self.refuse("a ring must run in manual mode over all mesh axes", seen, fix)
        if ring.axis not in mesh.shape:
            self.refuse(
                "a ring must run along an axis of the mesh",
                f"'{ring.axis}' where the mesh has {', '.join(mesh.axis_names)}",
                f"use one of these, or add '{ring.axis}' to the mesh (size 1 will do)",
            )
        known_axes((*lefts, result), mesh, self.where)
        self.size = mesh.shape[ring.axis]
        for shape in (*lefts, result):
            if shape.ellipsis or (shape.pending and shape is not result):
                self.refuse(
                    "a product in a ring needs settled operands with every dimension named",
                    f"'{shape}'",
                    "settle it, or name it",
                )
        for shape, array in zip((lefts[0], *[lefts[1]] * (len(arrays) - 1)), arrays, strict=True):
            bind_shape(shape, array, self.where, live())
        self.x, self.weight, self.result = lefts[0], lefts[1], result
        shapes = [real_axes(s, mesh) for s in (lefts[0], *[lefts[1]] * (len(arrays) - 1))]
        mentioned = {a for s in (*shapes, real_axes(result, mesh)) for a in (*s.mesh_axes, *s.copied)}
        slices = [check_slice(a, s, self.where, mentioned=mentioned) for a, s in zip(arrays, shapes, strict=True)]
        # Copies and replicated operands meet slices: from here on all differ, and their gradients are sums.
        varying = {*varying_axes(*slices), *(a for s in shapes for a in s.copied)}
        over = tuple(a for a in mesh.axis_names if a in varying)
        self.arrays = [vary(array, over) for array in slices]

    def refuse(self, rule: str, seen: str, fix: str) -> NoReturn:
        raise RingError(f"{rule}, got {seen}, in {self.where}: {fix}")

    def sliced(self, shape: Shape, rule: str) -> str | int:
        for dim in shape.dims:
            if self.ring.axis in dim.axes:
                if len(dim.axes) > 1:
                    self.refuse(
                        "a name that travels in a ring must be sliced by the ring's axis alone",
                        f"'{dim}'",
                        "gather the other axes first",
                    )
                return dim.name
        self.refuse(rule, f"'{shape}', which '{self.ring.axis}' does not slice", "write which name it slices")

    def summed(self, scattered: str | int | None) -> None:
        """The summed name is sliced over the ring in both operands; the scattered one is not."""
        summed = [d for d in self.x.dims if d.name not in self.result.names]
        if not any(self.ring.axis in dim.axes and dim in self.weight.dims for dim in summed):
            self.refuse(
                f"'{self.ring.axis}' must slice the summed name in the same way in both operands",
                f"'{self.x}' and '{self.weight}'",
                _SUM,
            )
        for shape in (self.x, self.weight):
            if scattered in shape.names and self.ring.axis in _axes_of(shape, scattered):
                self.refuse(f"the operands must be whole in '{scattered}' along the ring", f"'{shape}'", _SUM)

    def left(self, *, gathered: bool = False) -> tuple[str, ...]:
        """The mesh axes along which the result is pending: beside the ring's own, it is each device's own product.

        Args:
            gathered: whether the ring gathers the first operand; else it sums over a name of both.

        Raises:
            NotationError: as for an einsum.
        """
        mesh = jax.sharding.get_abstract_mesh()
        written = [real_axes(shape, mesh) for shape in (self.x, self.weight, self.result)]
        x, weight, result = map(self.without_ring, written)
        if gathered:  # the axis may slice other names of these
            weight, result = written[1:]
        return check_product([x, weight], result, self.where, written)

    def without_ring(self, shape: Shape) -> Shape:
        others = lambda axes: tuple(axis for axis in axes if axis != self.ring.axis)
        dims = tuple(Dim(dim.name, others(dim.axes)) for dim in shape.dims)
        return Shape(dims, shape.pending, others(shape.copied), shape.ellipsis)

    def spec(self, moved: Moved) -> "_Spec":
        return _Spec(self.ring, moved, self.x.names, self.weight.names, self.result.names)

    def rows(self) -> str | int:
        """The name that chunks are cut along: the weight, which has none of it, is whole for each."""
        return next(_rows(self.x.names, self.weight.names, self.result.names), None) or self.refuse(
            "chunks are rows of a name that only the first operand and the result have",
            f"'{self.x}', '{self.weight}' and '{self.result}' with chunks={self.ring.chunks}",
            "use 1 chunk, or write 'batch in, in out -> batch out'",
        )

    def moved(self, name: str, size: int, shape: Shape) -> Moved:
        self.check_chunks(name, size)
        return Moved(name, size, self.sliced_text(shape, name))

    def check_chunks(self, name: str, size: int) -> None:
        chunks = self.ring.chunks
        if chunks > size:
            self.refuse(
                "a slice needs at least one row for each chunk",
                f"{name}={size} on a device and chunks={chunks}",
                f"use {size} chunks or fewer",
            )
        if size % chunks:
            self.refuse(
                "a slice must split into equal chunks",
                f"{name}={size} on a device and chunks={chunks}",
                f"use {_nearest(size, chunks)} chunks, or a multiple of {chunks} rows",
            )

    def sliced_text(self, shape: Shape, name: str) -> str:
        """A shape without its states, `name` sliced over the ring."""
        axis = self.ring.axis
        return " ".join(f"{d}/{axis}" if d.name == name and axis not in d.axes else str(d) for d in shape.dims)

    def plain(self) -> tuple:
        """A ring of one device: the product."""
        x, *weights = self.arrays
        return tuple(_local(self.x.names, x, self.weight.names, w, self.result.names) for w in weights)


def _axes_of(shape: Shape, name: str) -> tuple[str, ...]:
    return next((dim.axes for dim in shape.dims if dim.name == name), ())


def _rows(x: Names, weight: Names, result: Names) -> Iterator:
    """The names that only the first operand and the result have."""
    return (name for name in x if name in result and name not in weight)


def _nearest(whole: int, parts: int) -> int:
    return next(n for n in range(parts, 0, -1) if whole % n == 0)


def _local(a_names: Names, a, b_names: Names, b, names: Names):
    letter = {name: chr(ord("a") + i) for i, name in enumerate(dict.fromkeys((*a_names, *b_names)))}
    spell = lambda side: "".join(letter[n] for n in side)
    return jnp.einsum(f"{spell(a_names)},{spell(b_names)}->{spell(names)}", a, b)


def _derived(gradients: Callable) -> Callable:
    """Gives a product `product(spec, x, *weights)` its derivative, of which reverse mode runs these gradients:
    `gradients(spec, operands, gradient)`, where the gradient of a result that nothing depends on is None."""

    def derive(product: Callable) -> Callable:
        made = jax.custom_jvp(product, nondiff_argnums=(0,))

        def change(spec: _Spec, operands, changes):
            (x, *weights), (d_x, *d_weights) = operands, changes
            return jax.tree.map(lax.add, made(spec, d_x, *weights), made(spec, x, *d_weights))

        @made.defjvp
        def _derivative(spec: _Spec, operands, changes):
            out = made(spec, *operands)
            along = linear(functools.partial(change, spec), functools.partial(gradients, spec), like=out)
            return out, along(operands, changes)

        return functools.wraps(product)(made)

    return derive


def _gather_gradients(spec: _Spec, operands, gradients):
    x, *weights = operands
    used = [i for i, gradient in enumerate(gradients) if gradient is not None]
    pairs = [(spec.result, gradients[i], spec.weight, weights[i]) for i in used]
    by_x = scatter_products(spec.ring, spec.moved, spec.x, pairs, x.dtype)
    others, dtypes = [(spec.result, gradients[i]) for i in used], [weights[i].dtype for i in used]
    found = gather_products(spec.ring, spec.moved, spec.x, x, others, [spec.weight] * len(used), dtypes)
    by_place = dict(zip(used, found, strict=True))
    return by_x, *(by_place.get(i) for i in range(len(weights)))


@_derived(_gather_gradients)
def _gather_matmul(spec: _Spec, x, *weights):
    others = [(spec.weight, w) for w in weights]
    dtypes = [jnp.result_type(x, w) for w in weights]
    return tuple(gather_products(spec.ring, spec.moved, spec.x, x, others, [spec.result] * len(weights), dtypes))


def _scatter_gradients(spec: _Spec, operands, gradient):
    x, weight = operands
    others, results = [(spec.weight, weight), (spec.x, x)], [spec.x, spec.weight]
    dtypes = [x.dtype, weight.dtype]
    return tuple(gather_products(spec.ring, spec.moved, spec.result, gradient, others, results, dtypes))


@_derived(_scatter_gradients)
def _matmul_scatter(spec: _Spec, x, weight):
    pairs = [(spec.x, x, spec.weight, weight)]
    return scatter_products(spec.ring, spec.moved, spec.result, pairs, jnp.result_type(x, weight))


def _reduce_gradients(spec: _Spec, operands, gradient):
    x, weight = operands
    gradient = vary(gradient, varying_axes(x))
    by_x = _local(spec.result, gradient, spec.weight, weight, spec.x)
    return by_x.astype(x.dtype), _local(spec.x, x, spec.result, gradient, spec.weight).astype(weight.dtype)


@_derived(_reduce_gradients)
def _matmul_reduce(spec: _Spec, x, weight):
    ring, moved = spec.ring, spec.moved
    rows, one = next(_rows(spec.x, spec.weight, spec.result), None), dataclasses.replace(ring, chunks=1)
    chunks = []
    for part in [x] if ring.chunks == 1 else jnp.split(x, ring.chunks, spec.x.index(rows)):
        pairs = [(spec.x, part, spec.weight, weight)]
        mine = scatter_products(one, moved, spec.result, pairs, jnp.result_type(x, weight))
        whole = " ".join(dim.removesuffix(f"/{ring.axis}") for dim in moved.text.split())
        with jax.named_scope(f"ring[{moved.text} -> {whole}]"):
            chunks.append(
                lax.all_gather(mine, ring.axis, axis=spec.result.index(moved.name), tiled=True, to="invarying")
            )
    return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, spec.result.index(rows))
