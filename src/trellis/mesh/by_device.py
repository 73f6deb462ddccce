"""Programs of one device's slices, which can also be run outside compiled programs."""

from collections.abc import Callable, Sequence

import jax

from trellis.mesh.reshard import place
from trellis.notation import spec_of
from trellis.notation.state import State


def by_device(function: Callable, **specs) -> Callable:
    """`jax.shard_map`, which runs as one program when nothing is being traced.

    Left to itself, JAX then compiles and runs every operation of the function as a program of its own, which takes
    twenty times as long for a lookup. Inside a trace there is no difference.

    Args:
        function: of one device's slices.
        specs: `mesh`, `in_specs`, `out_specs` and the like, as `jax.shard_map` has them.
    """
    return jax.jit(jax.shard_map(function, **specs), inline=True)


def unchecked(function: Callable, taken: Sequence[State], given: Sequence[State], *arrays, mesh=None) -> tuple:
    """Runs a program of one device's slices in which JAX does not keep track of what varies, as kernels and rings need.

    Args:
        function: of one device's slices; returns a tuple.
        taken, given: the states of what it takes and returns.
        arrays: what it takes.
        mesh: the mesh; the one in force if not given.
    """
    taken, given = tuple(taken), tuple(given)
    # A derivative's rule is made only where it is needed: JAX has none of a program that is mapped over slices.
    run = _unchecked if any(s.copied or s.pending for s in (*taken, *given)) else _run
    return run(function, taken, given, mesh, *arrays)


def _program(function: Callable, taken: Sequence[State], given: Sequence[State], mesh) -> Callable:
    specs = [tuple(spec_of(s.axes, s.pending, s.copied) for s in states) for states in (taken, given)]
    return by_device(function, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def _run(function: Callable, taken: tuple[State, ...], given: tuple[State, ...], mesh, *arrays):
    return _program(function, taken, given, mesh)(*arrays)


_unchecked = jax.custom_jvp(_run, nondiff_argnums=(0, 1, 2, 3))


@_unchecked.defjvp
def _derivative(function, taken, given, mesh, arrays, changes):
    """Of a program that takes no copies and leaves no sums pending: JAX (0.10.2) divides the gradient of a sum that a
    program without its checks leaves pending by the number of devices."""
    plain = lambda states: tuple(State(s.mode, s.axes) for s in states)

    def settled(*arrays):
        summed = lambda x, state: jax.lax.psum(x, tuple(state.pending)) if state.pending else x
        settling = lambda *slices: tuple(map(summed, function(*slices), given))
        whole = [place(x, state.axes) for x, state in zip(arrays, taken, strict=True)]
        out = _program(settling, plain(taken), plain(given), mesh)(*whole)
        return tuple(place(x, s.axes, s.pending, s.copied) for x, s in zip(out, given, strict=True))

    return _unchecked(function, taken, given, mesh, *arrays), jax.jvp(settled, arrays, changes)[1]
