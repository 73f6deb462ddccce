"""`named_jit` and `shard`: whole programs and whole trees under a layout."""

import dataclasses
import functools

import jax

from trellis.mesh.layout import Layout, current_layout
from trellis.mesh.reshard import place
from trellis.named.array import NamedArray, is_named
from trellis.named.axis import NamesError
from trellis.notation.state import mode_of, state_of


def _require() -> Layout:
    layout = current_layout()
    if layout is None:
        raise NamesError("sharding by name needs a layout, got none in force: write 'with layout:' around it")
    return layout


def _mapped(layout: Layout, which) -> Layout:
    """A layout whose `compute` is the given map: "params", "compute", or a dict."""
    if which == "compute":
        return layout
    entries = layout.params if which == "params" else which
    return dataclasses.replace(layout, compute=entries, overlap=())


def shard(tree, which="params"):
    """Puts every named array of a tree where the layout in force says.

    Inside a program this is a reshard, outside a transfer to the devices.
    Arrays without names are copied to every device.

    Args:
        tree: any tree.
        which: "params", "compute", or a map from names to mesh axes.

    Raises:
        NotationError: a mesh axis does not divide its dimension.
        NamesError: no layout is in force.
    """
    layout = _mapped(_require(), which)

    def put(x):
        if not is_named(x):
            return jax.device_put(x, layout.sharding(())) if isinstance(x, jax.Array) and not _traced(x) else x
        layout.check(x.names, tuple(x.shape.values()))
        if not _traced(x.array):
            return NamedArray(jax.device_put(x.array, layout.sharding(x.names)), x.names)
        context = mode_of(jax.sharding.get_abstract_mesh())
        if state_of(x.array).mode == "none" and context != "none":  # came in from outside the mesh
            move = jax.reshard if context == "explicit" else jax.lax.with_sharding_constraint
            return NamedArray(move(x.array, layout.sharding(x.names)), x.names)
        return NamedArray(place(x.array, layout.assign(x.names), names=x.names), x.names)

    return jax.tree.map(put, tree, is_leaf=is_named)


def _traced(x) -> bool:
    return isinstance(x, jax.core.Tracer)


def abstract(tree, which="params"):
    """The tree with `jax.ShapeDtypeStruct`s in place of arrays, with the layout's shardings.

    Works without devices: layouts of meshes that are not here do as well.
    """
    layout = current_layout()

    def leaf(x):
        if not is_named(x):
            if not hasattr(x, "dtype"):
                return x
            sharding = layout.sharding((None,) * len(x.shape)) if layout else None
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        shape = tuple(x.array.shape)
        if layout is None:
            return NamedArray(jax.ShapeDtypeStruct(shape, x.dtype), x.names)
        mapped = _mapped(layout, which)
        mapped.check(x.names, shape)
        return NamedArray(jax.ShapeDtypeStruct(shape, x.dtype, sharding=mapped.sharding(x.names)), x.names)

    return jax.tree.map(leaf, tree, is_leaf=is_named)


def named_jit(
    fn=None, *, donate: tuple[int, ...] | int = (), inputs=None, outputs=None, static: tuple[int, ...] = (), **options
):
    """`jax.jit` under the layout in force: no sharding arguments.

    Args:
        fn: the function.
        donate: positions of arguments whose memory the results may take.
        inputs: "params", "compute" or a map: named inputs are moved there first.
        outputs: the same for named results.
        static: positions of arguments that are Python values.
        **options: passed to `jax.jit`.
    """
    if fn is None:
        return functools.partial(named_jit, donate=donate, inputs=inputs, outputs=outputs, static=static, **options)
    compiled: dict = {}

    def program(layout: Layout | None):
        def run(*args):
            args = tuple(a if i in static or inputs is None else shard(a, inputs) for i, a in enumerate(args))
            out = fn(*args)
            return out if outputs is None else shard(out, outputs)

        if layout not in compiled:
            compiled[layout] = jax.jit(run, donate_argnums=donate, static_argnums=static or None, **options)
        return compiled[layout]

    @functools.wraps(fn)
    def call(*args):
        return program(current_layout())(*args)

    call.lower = lambda *args: program(current_layout()).lower(*args)
    call.trace = lambda *args: program(current_layout()).trace(*args)
    return call
