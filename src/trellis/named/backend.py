"""What each platform's compiler wants, behind one small interface; the algebra is the same everywhere.

`contract`, `elementwise`, gates and loops call `product`, `broadcast`, `rounded_once`, `by_itself`, `loop_over` and
`written_out`. On accelerators these are plain JAX. On a CPU they are written so that XLA's CPU compiler makes fast
programs; each one says why. Layers ask `on_accelerator`, `fences_gradients`, `made_again`, `swaps_by_product` and
`multiplies_blocks`; reductions ask `loses_nan`. Which kernel a platform has is decided where kernels are chosen.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata

from trellis._compat import refuses_copies, sums_of_own_slices
from trellis.mesh.layout import current_layout
from trellis.mesh.linear import linear
from trellis.mesh.manual.take import is_narrow
from trellis.mesh.platform import device_kind_of, longest_written_out, platform_of
from trellis.named.fourier import transform_own_rows
from trellis.named.tuned import tuned
from trellis.notation import spec_of
from trellis.notation.state import mesh_of, sharding_on, state_of

# Parts of the names of NVIDIA's GPUs with units for products of blocks.
_BLOCK_UNITS = ("B200", "B300", "Blackwell")

Dims = tuple[tuple[int, ...], tuple[int, ...]]

sums_of_own_slices()  # before anything is lowered
transform_own_rows()


def written_out(length: int, carried, weights: Callable[[], float] | None = None) -> bool:
    """Whether a loop of this length is written out.

    On CPUs and GPUs a loop copies every value that it keeps into and out of a stack; on TPUs, what kernels make.

    Args:
        carried: the tree of arrays that the loop carries.
        weights: tells how many numbers the parameters of all turns are; None: many.
    """
    return length <= _longest_written_out(carried, weights)


def _longest_written_out(carried, weights: Callable[[], float] | None = None) -> float:
    """How many turns at most a loop may have to be written out: as the program was told, or what is faster."""
    if (scanned := tuned().scan_layers) is None:
        return longest_written_out(carried, weights)
    return 0 if scanned else math.inf


def loop_over(body: Callable, start, parts):
    """`jax.lax.scan`; on a CPU each part is sliced out while the one before it is worked on.

    XLA's CPU compiler slices a part anew inside every loop that reads it, and such a loop is not vectorized: one over
    attention's scores that reads a part's documents takes twelve times as long.

    Args:
        body: `body(carry, part) -> (carry, made)`.
        start: the first carry.
        parts: arrays, whose first dimension is looped over.
    """
    if on_accelerator(jax.tree.leaves(parts)[0]):
        return lax.scan(body, start, parts)

    def ahead(carry, following):
        carry, made = body(*carry)
        return (carry, following), made

    first = jax.tree.map(lambda x: x[0], parts)
    others = jax.tree.map(lambda x: jnp.concatenate((x[1:], x[:1])), parts)
    (end, _), made = lax.scan(ahead, (start, first), others)
    return end, made


def on_accelerator(a: jax.Array) -> bool:
    """Whether a value will live on an accelerator: products outrun memory there, and communication runs beside them."""
    return platform_of(a) != "cpu"


def fences_gradients(a: jax.Array) -> bool:
    """Whether elementwise gradients that several products read are to be computed once, before them.

    The compilers for TPUs and CPUs would compute them anew inside each product. The one for GPUs reads the operands
    once for each of two gradients and, for a GELU's, writes what it makes on the way. Made together, and with
    `pairs_at_once`, they took 1.6 to 3.5 % less of a step on an H200 (benchmarks/results/accelerator_h200.txt).
    """
    return platform_of(a) in ("tpu", "cpu", "cuda")


def pairs_at_once(a: jax.Array) -> bool:
    """Whether a reduction of pairs, the largest number and a sum that depends on it, reads its operand once and is as
    fast as one of numbers: by XLA for GPUs."""
    return platform_of(a) == "cuda"


def fences_layers(values) -> bool:
    """Whether a layer that is written out hides from the compiler what its backward pass makes again.

    Those for accelerators would keep it from the forward pass, whatever the policy says. XLA's CPU compiler sees to it
    in `made_again`.

    Args:
        values: a tree of what goes into a layer.
    """
    leaves = jax.tree.leaves(values)
    return bool(leaves) and on_accelerator(leaves[0])


def fences_sums(a: jax.Array) -> bool:
    """Whether sums of gathered rows are to be computed before what reads them.

    libtpu would put the additions into a product or a reduction that reads the sum, but not the conversions to float32
    before them: each would write all rows, and some would be copied to another layout.
    """
    return platform_of(a) == "tpu"


def made_again(kept):
    """Values from which a backward pass computes others again.

    Where layers are written out, XLA would take those from the forward pass, and so keep them; a fence hides that they
    are the same. On a CPU it does so anywhere.
    """
    fenced = platform_of(jax.tree.leaves(kept)[0]) == "cpu" or _longest_written_out(kept) > 0
    return lax.optimization_barrier(kept) if fenced else kept


def rounded_together(*forms):
    """The forms in which one array is rounded, made together on GPUs.

    XLA would make the one that only a gradient's product reads just before that, and keep the array, four times as
    large, until then.
    """
    fenced = platform_of(jax.tree.leaves(forms)[0]) == "cuda"
    return lax.optimization_barrier(forms) if fenced else forms


def swaps_by_product(a: jax.Array) -> bool:
    """Whether to swap elements of a short dimension by a product with a permutation, exact in every dtype.

    Slicing a dimension of 64 or 128 lanes is slow on TPUs.
    """
    return platform_of(a) == "tpu"


RAGGED = ("tpu", "cuda")  # platforms whose devices can send each other slices of different lengths


def loses_nan(a: jax.Array, dims: tuple[int, ...]) -> bool:
    """Whether the largest of these floats over dimensions may miss a NaN: over devices, XLA's all-reduce on CPUs and
    NCCL's give the largest that is a number. A TPU's does not."""
    state = state_of(a)
    over_devices = state.mode == "auto" or any(state.axes[d] for d in dims)
    return over_devices and jnp.issubdtype(a.dtype, jnp.floating) and platform_of(a) != "tpu"


def multiplies_blocks(a: jax.Array) -> bool:
    """Whether a value will live on a GPU with units for products of numbers in blocks with their scales."""
    return platform_of(a) == "cuda" and has_block_units(device_kind_of(a))


def has_block_units(device_kind: str) -> bool:
    """Whether a GPU has units for products of numbers in blocks with their scales.

    >>> has_block_units("NVIDIA B200"), has_block_units("NVIDIA H100 80GB HBM3")
    (True, False)
    """
    return any(part in device_kind for part in _BLOCK_UNITS)


def rounded_once(fn: Callable) -> Callable:
    """A function that, for bfloat16 arrays on a CPU, computes in float32 and rounds its result, or results.

    XLA's CPU compiler rounds after every operation inside a GELU, say. That takes a fifth of a small GPT-2's step, and
    is less exact.
    """

    @functools.wraps(fn)
    def rounded(*args, **kwargs):
        if any(getattr(a, "dtype", None) != jnp.bfloat16 or platform_of(a) != "cpu" for a in args):
            return fn(*args, **kwargs)
        results = fn(*(a.astype(jnp.float32) for a in args), **kwargs)
        return jax.tree.map(lambda result: result.astype(jnp.bfloat16), results)

    return rounded


def keeps_operand(fn: Callable) -> Callable:
    """A function of which a GPU's program keeps the operand for the backward pass, and nothing made on the way.

    XLA for GPUs writes what a GELU or a Mish makes on the way, in some programs in float32, and reads it in the
    backward pass: as much again as is kept of a GPT-2's feed-forward block, or twice that. It makes what other
    activations need again by itself.
    """
    again = jax.checkpoint(fn)
    return functools.wraps(fn)(lambda a: (again if platform_of(a) == "cuda" else fn)(a))


def sums_wide(a, shape: tuple[int, ...]) -> bool:
    """Whether the gradient of `a`, broadcast to this shape, is better summed in float32: 16 bits on a CPU.

    XLA's CPU compiler sums in the type of the array, in blocks of 32: of the sum of 768,512 equal numbers a fifth is
    left in bfloat16. It also takes ten times as long as in float32.
    """
    return isinstance(a, jax.Array) and a.shape != shape and is_narrow(a) and platform_of(a) == "cpu"


def broadcast(a: jax.Array, shape: tuple[int, ...], sharding=None, *, dims: Sequence[int] | None = None) -> jax.Array:
    """The array broadcast to a shape; where `sums_wide` says so, by way of float32, only for its gradient's sake.

    Args:
        sharding: of the result, where the operand does not say it.
        dims: where its dimensions stand; the first ones if not given.
    """
    wide = a.astype(jnp.float32) if sums_wide(a, shape) else a
    return to_type(lax.broadcast_in_dim(wide, shape, dims or range(a.ndim), out_sharding=sharding), a.dtype)


def to_type(a: jax.Array, dtype) -> jax.Array:
    """The array in a type; one that has it stays as it is, since random keys have no cast."""
    return a if a.dtype == dtype else a.astype(dtype)


def summed_in_range(fn: Callable) -> Callable:
    """A function with a sum of exponentials, computed in float32 for float16 arrays: more than 65,504 ones overflow."""

    @functools.wraps(fn)
    def summed(array: jax.Array, **kwargs) -> jax.Array:
        if array.dtype != jnp.float16:
            return fn(array, **kwargs)
        return fn(array.astype(jnp.float32), **kwargs).astype(array.dtype)

    return summed


def product(a: jax.Array, b: jax.Array, numbers, *, preferred_element_type=None, spec=None) -> jax.Array:
    """`jax.lax.dot_general`; on a CPU, products without batch dimensions are `cpu_dot` and get another gradient.

    The gradient of `x @ w` with respect to `w` sums over the long dimension. As JAX writes it, it is `(d^T x)^T`, which
    XLA's CPU compiler turns into a transposed copy of `d`, made by running whatever elementwise program computes `d` (a
    GELU's derivative, say) once per element in strided order: as slow as the product itself. Here `d` is computed
    first, `x` or `d` is copied transposed, whichever costs less, and the product is an ordinary one.

    Args:
        a, b: plain arrays.
        numbers: dimension numbers as `dot_general` takes them.
        preferred_element_type: likewise.
        spec: how the result is sharded, where the operands do not say it.
    """
    summed, batch = numbers
    one_type = a.dtype == b.dtype and preferred_element_type in (None, a.dtype)
    floats = jnp.issubdtype(a.dtype, jnp.floating)
    # JAX 0.10.2 to 0.12.0 cannot map over the copies (`~`) that a derivative of our own would take.
    mapped = bool((layout := current_layout()) and layout.mapped)
    here = state_of(a).mode in ("none", "explicit") and platform_of(a) == "cpu"
    if any(batch) or not one_type or not floats or mapped or not here:
        return plain_product(a, b, numbers, preferred_element_type, spec)
    summed = tuple(tuple(int(i) for i in dims) for dims in summed)
    try:
        return _cpu_product(a, b, summed, spec)
    except ValueError as error:  # mapped over a name that is whole, where `layout.mapped` is empty
        if not refuses_copies(error):
            raise
        return plain_product(a, b, numbers, None, spec)


def plain_product(a: jax.Array, b: jax.Array, numbers, dtype, spec) -> jax.Array:
    """`jax.lax.dot_general`, with a result of this type, sharded so where the operands do not say it."""
    sharding = None if spec is None else sharding_on(a, spec)
    if dtype is None and a.dtype != b.dtype:
        # Of bfloat16 and float16, or int8 and uint8, `dot_general` takes one, which cannot hold the other's numbers.
        with contextlib.suppress(jax.dtypes.TypePromotionError):
            dtype = type_of_all(a.dtype, b.dtype)
    return lax.dot_general(a, b, numbers, preferred_element_type=dtype, out_sharding=sharding)


def type_of_all(*dtypes):
    """The type in which JAX adds or multiplies numbers of these types: of bfloat16 and float16 float32, and of int8 and
    uint8 int16.

    Raises:
        jax.dtypes.TypePromotionError: it does neither.
    """
    if len({*dtypes}) == 1:  # as nearly always
        return dtypes[0]
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def cpu_dot(a: jax.Array, b: jax.Array, numbers, *, spec=None) -> jax.Array:
    """A product in the type of its operands that sums in float32.

    For a bfloat16 result XLA's CPU compiler converts the operands and makes a float32 product; only a float32 result
    reaches the processor's bfloat16 instructions, at twice the speed. So the result is made in float32 and rounded
    afterwards, which gives the same number.

    Args:
        a, b: plain arrays of one type.
        numbers: as `dot_general` takes them.
        spec: how the result is sharded, where the operands do not say it.
    """
    wide = jnp.float32 if a.dtype == jnp.bfloat16 else None
    return plain_product(a, b, numbers, wide, spec).astype(a.dtype)


def copied_turned(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """The array with its dimensions in another order, computed and copied by itself.

    A copy alone takes XLA's CPU compiler a cycle an element. Inside the operation that makes the array it copies one
    element after the other, 4 KiB apart, in five to nine cycles each, even if the array exists already, since XLA makes
    it again. A barrier is gone before operations are fused; a call that is not inlined remains. If the array is one
    device's, the layout is stated inside the call: else XLA leaves the array as it is there and copies it outside, at
    half the speed. With that, XLA would first gather an array that it slices (JAX 0.10.2). Partial sums get the
    barrier.
    """
    if not _can_be_called(x):
        return lax.optimization_barrier(jnp.transpose(lax.optimization_barrier(x), order))
    with set_xla_metadata(inlineable="false"):
        return (_turned if _is_one_devices(x) else _turned_slice)(x, order)


def by_itself(fn: Callable) -> Callable:
    """A function that a CPU computes apart from everything else, from arrays in memory.

    If two results share something as costly as an exponential, XLA's CPU compiler writes it to memory and reads it for
    each of them, which takes longer than computing it twice. Accelerators get the function as it is.
    """
    called = jax.jit(fn)

    @functools.wraps(fn)
    def alone(*args: jax.Array):
        if not all(map(_can_be_called, args)):
            return fn(*args)
        with set_xla_metadata(inlineable="false"):
            return called(*args)

    return alone


def _can_be_called(x: jax.Array) -> bool:
    """Whether an array may go through a call that is not inlined: partial sums are summed again there (JAX 0.10.2)."""
    state = state_of(x)
    return not (on_accelerator(x) or state.pending or state.copied)


def _is_one_devices(x: jax.Array) -> bool:
    """Whether XLA's partitioner leaves an array as it is: the compiler may slice it along no mesh axis."""
    mesh = mesh_of(x)
    if mesh is None:  # shardings may be given only to `jax.jit`
        return jax.device_count() == 1
    manual = jax.sharding.AxisType.Manual
    return all(kind == manual or size == 1 for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True))


_turned_slice = jax.jit(jnp.transpose, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def _turned(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return with_layout_constraint(jnp.transpose(x, order), Layout(tuple(range(x.ndim))))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _cpu_product(a, b, summed: Dims, spec):
    return cpu_dot(a, b, (summed, ((), ())), spec=spec)


def _derivative(summed: Dims, spec, operands, changes):
    # Written out, so that checkpoint policies for products see it.
    out = cpu_dot(*operands, (summed, ((), ())), spec=spec)
    changes = [None if isinstance(change, SymbolicZero) else change for change in changes]
    wanted = [change is not None for change in changes]

    def change_of_product(operands, changes):
        (a, b), (d_a, d_b) = operands, changes
        terms = [(d_a, b)] * (d_a is not None) + [(a, d_b)] * (d_b is not None)
        return functools.reduce(jnp.add, [cpu_dot(*term, (summed, ((), ())), spec=spec) for term in terms])

    def gradients(operands, d):
        d = lax.optimization_barrier(d)
        return [fn(*operands, d, summed) if w else None for fn, w in zip((_gradient_a, _gradient_b), wanted)]

    return out, linear(change_of_product, gradients, like=out)(operands, changes)


_cpu_product.defjvp(_derivative, symbolic_zeros=True)


def _gradient_a(a, b, d, summed: Dims):
    b_free, rows = _free(b, summed[1]), len(_free(a, summed[0]))
    to_a = dict(zip(*summed[::-1], strict=True))
    made = _free(a, summed[0]) + tuple(to_a[i] for i in sorted(summed[1]))
    first, sliced = len(summed[1]), [state_of(x).axes for x in (a, b, d)]
    if (
        b.ndim == 2
        or sorted(summed[1]) != list(range(first))
        or any((*(sliced[0][i] for i in summed[0]), *sliced[1], *sliced[2][rows:]))
    ):
        return _dot(d, b, tuple(range(rows, d.ndim)), b_free, like=a, made=made)
    # XLA's CPU compiler makes a transposed copy of a weight with more than two dimensions before it multiplies.
    matrix = _reshaped(b, (math.prod(b.shape[:first]), math.prod(b.shape[first:])), kept=0)
    flat = _reshaped(d, (*d.shape[:rows], matrix.shape[1]), kept=rows)
    state, spec = state_of(a), None
    if state.mode == "explicit":
        spec = spec_of([*(state.axes[i] for i in made[:rows]), ()], state.copied, state.pending)
    product = cpu_dot(flat, matrix, (((rows,), (1,)), ((), ())), spec=spec)
    product = _reshaped(product, (*d.shape[:rows], *b.shape[:first]), kept=rows)
    return _ordered(product, [made.index(i) for i in range(a.ndim)])


def _gradient_b(a, b, d, summed: Dims):
    a_free, b_free = _free(a, summed[0]), _free(b, summed[1])
    rows, columns = tuple(range(len(a_free))), tuple(range(len(a_free), d.ndim))
    to_b = dict(zip(*summed, strict=True))
    if tuned().turned == "none":
        return _dot(a, d, a_free, rows, like=b, made=tuple(to_b[i] for i in sorted(summed[0])) + b_free)
    # If `d` is turned, the gradient comes out turned: it is copied, and read in strided order where it is added.
    if a.size <= d.size + 4 * _size(a, summed[0]) * _size(d, columns):
        turned = copied_turned(a, summed[0] + a_free)
        return _dot(turned, d, _last(turned, rows), rows, like=b, made=summed[1] + b_free)
    turned = copied_turned(d, columns + rows)
    made = b_free + tuple(to_b[i] for i in sorted(summed[0]))
    return _dot(turned, a, _last(turned, rows), a_free, like=b, made=made)


def _free(x, dims) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i not in dims)


def _last(x, dims) -> tuple[int, ...]:
    return tuple(range(x.ndim - len(dims), x.ndim))


def _reshaped(x, shape: tuple[int, ...], *, kept: int):
    """An array whose dimensions after the first `kept`, which nothing slices, are merged or split."""
    state = state_of(x)
    if state.mode != "explicit":
        return x.reshape(shape)
    # Stated, because JAX 0.10.2 does not infer it for copies and pending sums.
    axes = [*state.axes[:kept], *[()] * (len(shape) - kept)]
    return lax.reshape(x, shape, out_sharding=sharding_on(x, spec_of(axes, state.pending, state.copied)))


def _size(x, dims) -> int:
    return math.prod(x.shape[i] for i in dims)


def _dot(x, y, x_dims, y_dims, *, like, made: tuple[int, ...]):
    """A product in the type that the gradient of `like` has; `made` says which of its dimensions come out, in order."""
    numbers = ((tuple(x_dims), tuple(y_dims)), ((), ()))
    state = state_of(like)
    order = [made.index(i) for i in range(like.ndim)]
    if state.mode != "explicit":
        return _ordered(cpu_dot(x, y, numbers), order)
    # Copies (`~`) get their gradient as a pending sum, and the other way round.
    spec = spec_of([state.axes[i] for i in made], state.copied, state.pending)
    return _ordered(cpu_dot(x, y, numbers, spec=spec), order)


def _ordered(product, order: list[int]):
    """A product with its dimensions in another order, copied: else XLA would turn the operands again, and sum over the
    first dimension of the left one, at a third of the speed."""
    return product if order == sorted(order) else copied_turned(product, tuple(order))
