"""A whole feed-forward block with its communication behind its products."""

from collections.abc import Callable, Sequence

import jax

from trellis.collectives.matmuls import gather_matmul, matmul_scatter
from trellis.mesh.ring import Ring, RingError
from trellis.notation import parse


def feed_forward(text: str, x, into: Sequence, out, between: Callable, *, ring: Ring | tuple[Ring, Ring]):
    """`x` times the weights of `into`, `between`, times `out`: two rings, in manual mode.

        feed_forward("batch/x embed/y, embed mlp/y, mlp/y embed", x, [gate, up], down,
                     lambda gate, up: jax.nn.silu(gate) * up, ring=Ring(axis="y", both_ways=True))

    Args:
        text: the types of `x`, of each weight of `into`, and of `out`. The result is sliced like `x`. With
            `batch/x pos/y embed` for `x` it does the same over positions.
        into: one or several weights; each passing slice of `x` is used by all of them.
        between: elementwise, from the products with `into` to the operand of the product with `out`.
        ring: how slices travel; or a pair: how slices of `x` travel, and how sums of the result do.

    Raises:
        RingError: as for `gather_matmul` and `matmul_scatter`.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or "->" in text:
        raise RingError(
            "a feed-forward block needs three types, of x, of the weights into it and of the weight out of it, got "
            f"{len(parts)}, in feed_forward('{text}'): write 'batch/x embed/y, embed mlp/y, mlp/y embed'"
        )
    outer, inner, last = map(parse, parts)
    gathering, scattering = ring if isinstance(ring, tuple) else (ring, ring)
    hidden = [dim for dim in inner.dims if dim.name in last.names and dim.name not in outer.names]
    summed = [(dim, gathering) for dim in outer.dims if dim.name in inner.names]
    sizes = jax.sharding.get_abstract_mesh().shape
    for dim, own in (*summed, *((dim, scattering) for dim in hidden)):
        if any(axis != own.axis and sizes.get(axis, 1) > 1 for axis in dim.axes):
            raise RingError(
                f"a feed-forward block sums over names that its ring's axis alone slices, got '{dim}', in "
                f"feed_forward('{text}'): write it as gather_matmul and matmul_scatter, whose results may be pending"
            )
    # The name that the ring slices is whole between the two products, or summed away by the first.
    lead = [f"{dim.name}{''.join(f'/{a}' for a in dim.axes if a != gathering.axis)}" for dim in outer.dims]
    kept = [word for word, dim in zip(lead, outer.dims, strict=True) if dim.name not in inner.names]
    middle = " ".join([*kept, *map(str, hidden)])
    found = gather_matmul(f"{parts[0]}, {parts[1]} -> {middle}", x, *into, ring=gathering)
    mixed = between(*found) if len(into) > 1 else between(found)
    return matmul_scatter(f"{middle}, {parts[2]} -> {_settled(outer)}", mixed, out, ring=scattering)


def _settled(shape) -> str:
    return " ".join(map(str, shape.dims))
