"""Small programs in explicit and manual mode, each with the types of its arguments, to hold the ledger against.

Mesh axes: data 4, model 2. An argument is (shape, PartitionSpec, dtype).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

F, I = jnp.float32, jnp.int32


def arg(shape, *partitions, dtype=F):
    return shape, P(*partitions), dtype


def moved(*after, **states):
    """A program that is one reshard."""
    return lambda x: jax.reshard(x, P(*after, **states))


def settled(pending, *after):
    """A product that leaves pending sums, and a reshard that settles them."""

    def program(x, w):
        y = jnp.einsum("ab,bc->ac", x, w, out_sharding=P(None, None, unreduced=set(pending)))
        return jax.reshard(y, P(*after))

    return program


def gathered_once(x, w):
    """One gather: in two calls of a function, of what has no gradient, as copies and as a plain array."""
    product = jax.jit(lambda x, w: x @ jax.reshard(w, P(None, None, reduced={"data"})))
    return product(x, w), product(x, lax.stop_gradient(w)), jnp.sin(jax.reshard(w, P(None, None)))


def product(out=None):
    return lambda x, w: jnp.einsum("ab,bc->ac", x, w, out_sharding=out)


def lookup(out):
    return lambda table, ids: table.at[ids].get(out_sharding=out)


def gradient(program):
    """The gradient of a program's summed squares with respect to every float argument."""

    def loss(*args):
        return jnp.sum(program(*args).astype(F) ** 2)

    def run(*args):
        floats = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jax.grad(loss, argnums=floats)(*args)

    return run


def tensor_parallel(x, up, down):
    """Megatron's feed-forward block with FSDP weights: one all-reduce forward, one backward."""
    x = jax.reshard(x, P("data", None, None, reduced={"model"}))
    up = jax.reshard(up, P(None, "model", reduced={"data"}))
    down = jax.reshard(down, P("model", None, reduced={"data"}))
    hidden = jnp.tanh(jnp.einsum("bse,em->bsm", x, up))
    return jnp.einsum("bsm,me->bse", hidden, down, out_sharding=P("data", None, None))


def sequence_parallel(x, up, down):
    """The same with positions sliced over model outside the block: the all-reduces become gathers and scatters."""
    x = jax.reshard(x, P("data", None, None, reduced={"model"}))
    up = jax.reshard(up, P(None, "model", reduced={"data"}))
    down = jax.reshard(down, P("model", None, reduced={"data"}))
    hidden = jnp.tanh(jnp.einsum("bse,em->bsm", x, up))
    y = jnp.einsum("bsm,me->bse", hidden, down, out_sharding=P("data", None, None, unreduced={"model"}))
    return jax.reshard(y, P("data", "model", None))


def layers(block):
    """Blocks in a scan, each recomputed in the backward pass."""

    def program(x, up, down):
        def body(x, weights):
            return x + jax.checkpoint(block)(x, *weights), None

        return lax.scan(body, x, (up, down))[0]

    return program


def manual(x, w):
    """Every collective of shard_map once."""

    def body(x, w):
        w = lax.all_gather(w, "data", axis=0, tiled=True, to="reduced")
        y = lax.psum(jnp.tanh(x @ w) @ w.T, "model")
        y = y + lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)])
        y = y + lax.all_to_all(lax.all_to_all(y, "data", 1, 0, tiled=True), "data", 0, 1, tiled=True)
        s = lax.psum_scatter(y.T, "data", scatter_dimension=0, tiled=True)
        return y + jnp.sum(s) + lax.all_gather(s, "data", tiled=True).sum() + lax.pmean(y, "data")

    return jax.shard_map(body, in_specs=(P("data", None), P("data", "model")), out_specs=P("data", None))(x, w)


def per_shard_mean(x):
    """Communicates nothing."""
    return jax.shard_map(
        lambda x: jnp.mean(x, axis=0, keepdims=True), in_specs=P("data", None), out_specs=P("data", None)
    )(x)


def partly_manual(x, w):
    """One mesh axis by hand inside, the other in the types."""
    total = functools.partial(jax.shard_map, in_specs=P("data", None), out_specs=P(None, None), axis_names={"data"})
    return total(lambda y: lax.psum(jnp.sum(y, 0, keepdims=True), "data"))(x @ w)


def chosen(x):
    """Branches that differ in what they move: the ledger takes the larger."""

    def gathered(x):
        return jax.reshard(jnp.sin(jax.reshard(x, P(None, None))), P("data", None))

    return lax.cond(jnp.sum(x) > 0, gathered, lambda x: x, x)


X = arg((64, 128), "data", None)
BLOCK = (
    arg((8, 16, 32), "data", None, None),
    arg((32, 64), "data", "model"),
    arg((64, 32), "model", "data"),
)
SEQUENCE = (arg((8, 16, 32), "data", "model", None), *BLOCK[1:])
STACK = (BLOCK[0], arg((3, 32, 64), None, "data", "model"), arg((3, 64, 32), None, "model", "data"))
SEQUENCE_STACK = (SEQUENCE[0], *STACK[1:])
OVER_DATA = (arg((64, 128), None, "data"), arg((128, 64), "data", None))
OVER_BOTH = (arg((64, 128), None, ("data", "model")), arg((128, 64), ("data", "model"), None))
IDS = arg((8, 16), "data", None, dtype=I)

PROGRAMS = {
    "gather": (moved(None, None), X),
    "gather two dimensions": (moved(None, None), arg((64, 128), "data", "model")),
    "gather jointly": (moved(None, None), arg((64, 128), ("data", "model"), None)),
    "gather the major axis": (moved("model", None), arg((64, 128), ("data", "model"), None)),
    "gather the minor axis": (moved("data", None), arg((64, 128), ("data", "model"), None)),
    "other axis": (moved("model", None), X),
    "swapped axes": (moved(("model", "data"), None), arg((64, 128), ("data", "model"), None)),
    "all-to-all": (moved(None, "data"), X),
    "all-to-all to major": (moved(None, ("data", "model")), arg((64, 128), "data", "model")),
    "slice": (moved("data", None), arg((64, 128))),
    "gradient of a slice": (gradient(moved("data", None)), arg((64, 128))),
    "gathered once": (gathered_once, X, arg((128, 64), "data", None)),
    "reduce": (settled(["data"], None, None), *OVER_DATA),
    "reduce, then slice": (settled(["data"], "model", None), *OVER_DATA),
    "reduce jointly": (settled(["data", "model"], None, None), *OVER_BOTH),
    "scatter": (settled(["data"], "data", None), *OVER_DATA),
    "scatter jointly": (settled(["data", "model"], ("data", "model"), None), *OVER_BOTH),
    "scatter to two dimensions": (settled(["data", "model"], "data", "model"), *OVER_BOTH),
    "scatter one, reduce one": (settled(["data", "model"], "data", None), *OVER_BOTH),
    "contracted on the left only": (product(), arg((64, 128), None, "data"), arg((128, 64))),
    "contracted on the right only": (product(), arg((64, 128)), arg((128, 64), "data", None)),
    "two free dimensions": (product(P("data", None)), X, arg((128, 64), None, "data")),
    "result elsewhere": (product(P(None, "data")), X, arg((128, 64))),
    "argmax": (lambda x: jnp.argmax(x, 1), arg((64, 128), None, "data")),
    "max": (lambda x: jnp.max(x, 1), arg((64, 128), None, "data")),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, 1), arg((64, 128), "model", "data")),
    "softmax": (gradient(lambda x: jax.nn.softmax(x, 1)), arg((64, 128), "model", "data")),
    "lookup in sliced rows": (lookup(P("data", None, None)), arg((64, 128), "model", None), IDS),
    "lookup of sliced columns": (lookup(P("data", None, None)), arg((64, 128), None, "model"), IDS),
    "lookup, gradient": (gradient(lookup(P("data", None, None))), arg((64, 128), "model", None), IDS),
    "lookup, gradient of the whole": (gradient(lookup(P("data", None, None))), arg((64, 128)), IDS),
    "merge dimensions": (
        lambda x: jnp.reshape(x, (64, 128), out_sharding=P(None, None)), arg((8, 8, 128), None, "data")
    ),
    "merge sliced dimensions": (gradient(lambda x: x.reshape(64, 128)), arg((8, 8, 128), "data", "model")),
    "split a dimension of two slices": (lambda x: x.reshape(8, 8, 128), arg((64, 128), ("data", "model"), None)),
    "sums of windows": (lambda x: lax.reduce_window(x, 0.0, lax.add, (5, 1), (1, 1), "SAME"), X),
    "every other row": (lambda x: x[::2], X),
    "turned over": (lambda x: x[::-1], X),
    "dynamic slice": (lambda x, i: lax.dynamic_slice_in_dim(x, i, 16, 0), X, arg((), dtype=I)),
    "dynamic slice of two dimensions": (
        lambda x, i: lax.dynamic_slice(x, (i, i), (16, 64)), arg((64, 128), "data", "model"), arg((), dtype=I)
    ),
    "dynamic update of two dimensions": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)),
        arg((64, 128), "data", "model"), arg((16, 64), "data", "model"), arg((), dtype=I),
    ),
    "largest of sliced rows": (lambda x: lax.top_k(x, 4), arg((8, 64, 128), "data", "model")),
    "largest of sliced rows, gradient": (gradient(lambda x: lax.top_k(x, 4)[0]), arg((8, 64, 128), "data", "model")),
    "take along an axis": (lambda x, i: jnp.take_along_axis(x, i, 1), X, arg((64, 1), "data", None, dtype=I)),
    "tensor parallel": (tensor_parallel, *BLOCK),
    "tensor parallel, gradient": (gradient(tensor_parallel), *BLOCK),
    "sequence parallel, gradient": (gradient(sequence_parallel), *SEQUENCE),
    "layers, recomputed": (gradient(layers(tensor_parallel)), *STACK),
    "sequence-parallel layers": (gradient(layers(sequence_parallel)), *SEQUENCE_STACK),
    "manual": (manual, arg((8, 16), "data", None), arg((16, 32), "data", "model")),
    "manual, gradient": (gradient(manual), arg((8, 16), "data", None), arg((16, 32), "data", "model")),
    "per-shard mean": (per_shard_mean, X),
    "one of two branches": (chosen, X),
    "counted loop": (
        lambda x: lax.fori_loop(
            0, 5, lambda i, x: jax.reshard(jax.reshard(x, P(None, None)) * 2, P("data", None)), x
        ),
        X,
    ),
}  # fmt: skip
