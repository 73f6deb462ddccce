"""Attention by tiles, on whole arrays: each device's program, and the gradient of all.

Positions are in slices, or may be whole if heads have sinks.
"""

import dataclasses
import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from trellis._compat import refuses_copies
from trellis.mesh.by_device import unchecked
from trellis.mesh.layout import current_layout
from trellis.mesh.linear import linear
from trellis.nn.attention.chunked import ChunkedTiles
from trellis.nn.attention.sharded import Placement
from trellis.nn.attention.sinks import sinks_gradient, with_sinks
from trellis.nn.attention.sliced.program import Sliced
from trellis.nn.attention.sliced.whole import Whole
from trellis.notation.state import State, state_of


@dataclasses.dataclass(frozen=True, slots=True)
class _Attention:
    """What describes a call; hashable, for `custom_jvp` and `custom_vjp`."""

    place: Placement
    program: Sliced | Whole
    save_name: str | None
    sunk: frozenset[str] = frozenset()  # mesh axes along which sinks are copies

    @staticmethod
    def of(place: Placement, program: Sliced | Whole, save_name: str | None, sinks) -> "_Attention":
        return _Attention(place, program, save_name, frozenset() if sinks is None else state_of(sinks).copied)

    def run(self, local, arrays, inputs, outputs):
        """Runs a program of one device's slices."""
        if self.place.mesh is None:
            return local(*arrays)
        taken, given = (
            [State("explicit", axes, *map(frozenset, more)) for axes, *more in states] for states in (inputs, outputs)
        )
        return unchecked(local, taken, given, *arrays, mesh=self.place.mesh)

    def states(self, ids, sinks) -> list:
        """Mesh axes, pending sums and copies of queries, keys, values, of documents, and of sinks."""
        place = self.place
        q = (place.batch, place.pos, place.heads, ()), (), place.copied[0]
        keys = [((place.batch, place.key_pos, place.kv_heads, ()), (), copied) for copied in place.copied[1:]]
        documents = [((place.batch, axes), (), ()) for axes in (place.pos, place.key_pos)]
        own = [((place.heads,), (), self.sunk)]
        return [q, *keys, *(documents if ids is not None else []), *(own if sinks is not None else [])]

    @property
    def results(self) -> list:
        """Those of the result and of the log of its sums."""
        place = self.place
        return [((place.batch, place.pos, place.heads, ()), (), ()), ((place.batch, place.heads, place.pos), (), ())]

    def summed(self, gradient, copied):
        """A gradient of keys, summed over devices that hold parts of it, unless it is to stay a pending sum."""
        place = self.place
        own = {*place.batch, *place.key_pos, *place.kv_heads, *copied}
        axes = tuple(a for a in (*place.batch, *place.pos, *place.heads) if a not in own)
        return lax.psum(gradient, axes) if axes else gradient

    def summed_sinks(self, gradient):
        """The same for sinks, which are whole where batch and positions are sliced."""
        axes = tuple(a for a in (*self.place.batch, *self.place.pos) if a not in self.sunk)
        return lax.psum(gradient, axes) if axes else gradient


def tiled_attention(
    place: Placement, program: Sliced | Whole, q, k, v, segment_ids, sinks=None, *, save_name: str | None = None
) -> jax.Array:
    """Softmax attention by tiles. If queries are sliced along `pos`, so are keys, along the same mesh axes or the major
    ones of them.

    Arguments as in `trellis.nn.dot_product_attention`.
    """
    if (layout := current_layout()) is not None and layout.mapped:  # no custom gradient under such a `vmap`
        place, (q, k, v, sinks) = place.without_copies((q, k, v, sinks))
        run = jax.jit(lambda *arrays: _forward(_Attention(place, program, save_name), *arrays)[0])
        return run(q, k, v, segment_ids, sinks)
    attend = _attend_by_kernel if program.kernels.opaque else _attend
    call = _Attention.of(place, program, save_name, sinks)
    try:
        return attend(call, q, k, v, segment_ids, sinks)
    except ValueError as error:  # mapped over a name that is whole, where `layout.mapped` is empty
        if not (any(place.copied) or call.sunk) or not refuses_copies(error):
            raise
    place, (q, k, v, sinks) = place.without_copies((q, k, v, sinks))
    return attend(_Attention(place, program, save_name), q, k, v, segment_ids, sinks)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(call: _Attention, q, k, v, ids, sinks):
    return _forward(call, q, k, v, ids, sinks)[0]


def _forward(call: _Attention, q, k, v, ids, sinks):
    def local(q, k, v, *more):
        *ids, own = more if sinks is not None else (*more, None)
        k, v = (call.place.own_heads(x, q.shape[2]) for x in (k, v))
        out, log_sum = call.program.forward(q, k, v, tuple(ids) or None)
        return (out, log_sum) if own is None else with_sinks(out, log_sum, own)

    return call.run(local, _given(q, k, v, ids=ids, sinks=sinks), call.states(ids, sinks), call.results)


def _given(*arrays, ids, sinks) -> tuple:
    """All arrays that there are."""
    return (*arrays, *(ids or ()), *(() if sinks is None else (sinks,)))


def _kept(call: _Attention, q, k, v, ids, sinks):
    """The result, and what its derivative needs."""
    out, log_sum = _forward(call, q, k, v, ids, sinks)
    if call.save_name is not None:
        out, log_sum = (checkpoint_name(x, call.save_name) for x in (out, log_sum))
    return out, (q, k, v, ids, sinks, out, log_sum)


@_attend.defjvp
def _derivative(call: _Attention, primals, tangents):
    out, kept = _kept(call, *primals)
    change = linear(functools.partial(_attend_change, call), functools.partial(_attend_backward, call), like=out)
    own = () if primals[4] is None else (tangents[4],)
    return out, change(kept, (*tangents[:3], *own))


def _attend_change(call: _Attention, kept, changes):
    """Kernels have no forward mode, so here the tiles are computed in chunks."""
    q, k, v, ids, sinks, *_ = kept
    if (kernels := call.program.kernels).opaque:
        chunks = ChunkedTiles(scale=kernels.scale, logit_softcap=kernels.logit_softcap)
        call = dataclasses.replace(call, program=dataclasses.replace(call.program, kernels=chunks))
    varied = (q, k, v) if sinks is None else (q, k, v, sinks)
    run = lambda q, k, v, sinks=None: _forward(call, q, k, v, ids, sinks)[0]
    return jax.jvp(run, varied, tuple(changes))[1]


def _attend_backward(call: _Attention, kept, d_out):
    """The gradients of queries, keys and values, and of sinks, if there are any."""
    q, k, v, ids, sinks, out, log_sum = kept

    def local(q, k, v, out, log_sum, d_out, *more):
        *ids, mine = more if sinks is not None else (*more, None)
        own, spread = jax.vjp(lambda *keys: tuple(call.place.own_heads(x, q.shape[2]) for x in keys), k, v)
        d_q, *d_keys = call.program.backward(q, *own, tuple(ids) or None, out, log_sum, d_out)
        d_keys = spread(tuple(d_keys))
        found = d_q, *(call.summed(d, copied) for d, copied in zip(d_keys, call.place.copied[1:], strict=True))
        if mine is None:
            return found
        return *found, call.summed_sinks(sinks_gradient(out, d_out, log_sum, mine))

    queries, *keys = call.states(ids, None)
    own = [] if sinks is None else call.states(None, sinks)[-1:]
    states = [queries, *keys[:2], *call.results, call.results[0], *keys[2:], *own]
    gradients = [(axes, copied, pending) for axes, pending, copied in (queries, *keys[:2], *own)]
    return call.run(local, _given(q, k, v, out, log_sum, d_out, ids=ids, sinks=sinks), states, gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_by_kernel(call: _Attention, q, k, v, ids, sinks):
    """The same by kernels without a forward mode, whose tangents JAX cannot even trace."""
    return _forward(call, q, k, v, ids, sinks)[0]


def _by_kernel_backward(call: _Attention, kept, d_out):
    *found, d_sinks = (*_attend_backward(call, kept, d_out), *(() if kept[4] is not None else (None,)))
    return (*found, None, d_sinks)


_attend_by_kernel.defvjp(_kept, _by_kernel_backward)
