"""`named_jit` and `shard`: whole programs and whole trees under a layout."""

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Mapping

import jax
import numpy as np

from trellis._compat import is_tracer
from trellis.mesh.landing import put
from trellis.mesh.layout import Layout, current_layout
from trellis.mesh.platform import are_cpus
from trellis.mesh.processes import check_alike, spans_processes
from trellis.mesh.reshard import place
from trellis.named.arguments import function_of, shown
from trellis.named.array import NamedArray, asking, check_rank, holds_none, is_named, notice
from trellis.named.axis import NamesError
from trellis.named.operand import in_order_here, on_mesh
from trellis.named.refusals import jaxs_in_our_words, raise_in_our_words
from trellis.notation import typeof
from trellis.notation.state import state_of
from trellis.program import refuse_traced
from trellis.program.trace import mesh_of


def _mapped(layout: Layout, which) -> Layout:
    """A layout whose `compute` is the given map: "params", "compute", or a dict."""
    _check_map(which, "shard")
    if which == "compute":
        return layout
    entries = layout.params if which == "params" else which
    return dataclasses.replace(layout, compute=entries, overlap=())


def _check_map(which, where: str) -> None:
    if not isinstance(which, Mapping) and not (isinstance(which, str) and which in ("params", "compute")):
        raise NamesError(
            f"a tree must be placed by one of the layout's maps or by a map of your own, got {shown(which)}, in "
            f"{where}: write 'params', 'compute' or {{'embed': 'data'}}"
        )


def shard(tree, which="params"):
    """Puts every named array of a tree where the layout in force says.

    Inside a program this is a reshard, outside a transfer to the devices. JAX's arrays without names are copied to
    every device; anything else stays as it is, such as names around nothing in the state of a masked optimizer. Without
    a layout everything stays: a model that calls it also runs on one device.

    Args:
        tree: any tree.
        which: "params", "compute", or a map from names to mesh axes.

    Raises:
        NotationError: a mesh axis does not divide its dimension.
        NamesError: a map of the caller's own, if no layout is in force.
    """
    layout = current_layout()
    if layout is None:
        return _left(tree, which)
    layout = _mapped(layout, which)

    def moved(x):
        if not is_named(x):
            return put(x, layout.sharding(()), "shard") if isinstance(x, jax.Array) and not is_tracer(x) else x
        if holds_none(x):
            return x
        check_rank(x, "shard")
        if asking:
            notice(x)
        if x.slices:
            raise NamesError(
                f'shard cannot move a slice in manual mode, got {typeof(x)}, in shard: write reshard("before -> '
                'after", x)'
            )
        layout.check(x.names, tuple(x.shape.values()))
        if not is_tracer(x.array) and not state_of(x.array).pending:
            return NamedArray(put(in_order_here(x.array, x.names), layout.sharding(x.names), "shard"), x.names)
        with layout:
            entered = on_mesh(x.array, x.names, "shard")
        return NamedArray(place(entered, layout.assign(x.names), names=x.names), x.names)

    return jax.tree.map(moved, tree, is_leaf=is_named)


def _left(tree, which):
    """The tree as it is: without a layout both maps are empty. The caller's own map is refused: it names mesh axes."""
    _check_map(which, "shard")
    if isinstance(which, Mapping):
        raise NamesError(
            f"a map to mesh axes needs a layout, got {which!r} and none in force, in shard: write 'with layout:' "
            "around it"
        )
    return tree


def abstract(tree, which="params"):
    """The tree with `jax.ShapeDtypeStruct`s in place of arrays, with the layout's shardings.

    It needs no devices: layouts of meshes that are not here work as well.
    """
    layout = current_layout()

    def leaf(x):
        if not is_named(x):
            if not hasattr(x, "dtype"):
                return x
            sharding = layout.sharding((None,) * len(x.shape)) if layout else None
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        if holds_none(x):
            return x
        shape = tuple(x.array.shape)
        if layout is None:
            return NamedArray(jax.ShapeDtypeStruct(shape, x.dtype), x.names)
        mapped = _mapped(layout, which)
        mapped.check(x.names, shape)
        return NamedArray(jax.ShapeDtypeStruct(shape, x.dtype, sharding=mapped.sharding(x.names)), x.names)

    return jax.tree.map(leaf, tree, is_leaf=is_named)


def _positions(option: str, given) -> tuple[int, ...]:
    """The positions of arguments that an option gives."""
    found = tuple(given) if isinstance(given, tuple | list) else (given,)
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in found):
        raise NamesError(
            f"named_jit takes positions of arguments, which are whole numbers, got {option}={given!r}, in named_jit: "
            f"write {option}=0 for the first argument"
        )
    return found


def named_jit(
    fn=None,
    *,
    donate: tuple[int, ...] | int = (),
    inputs=None,
    outputs=None,
    static: tuple[int, ...] | int = (),
    **options,
):
    """`jax.jit` under the layout in force: no sharding arguments.

    Args:
        fn: the function.
        donate: positions of arguments whose memory the results may take.
        inputs: "params", "compute" or a map: named inputs are moved there first. Arrays that are on no mesh (NumPy's,
            or made before the layout) are placed there, as `compute` says if nothing is given.
        outputs: the same for named results. Without a layout neither moves anything.
        static: positions of arguments that are Python values.
        **options: passed to `jax.jit`.

    Raises:
        NamesError: not a function, a map or positions; or, in a call, an array that is donated and given a second time.
        MeshError: in a call, arrays that it places, or at the first call numbers, differ between processes.
        UserError, PendingSumError: compilers get such a program wrong (`tr.ledger` says which). It is read when it is
            first called with arrays, lowered or traced; not where another program, or a gradient of it, calls it.
    """
    for option, ours in (("donate_argnums", "donate"), ("static_argnums", "static")):
        if option in options:
            raise NamesError(
                f"named_jit takes donate= and static= for positions of arguments, got {option}={options[option]!r}, "
                f"in named_jit: write {ours}={options[option]!r}"
            )
    donated, fixed = _positions("donate", donate), _positions("static", static)
    if fn is None:
        return functools.partial(named_jit, donate=donate, inputs=inputs, outputs=outputs, static=static, **options)
    function_of(fn, "named_jit", "write named_jit(lambda x: 2 * x)")
    for what, which in (("inputs", inputs), ("outputs", outputs)):
        if which is not None:
            _check_map(which, f"named_jit({what}=...)")

    traced, right = 0, set()  # how many programs there are, and those that were read and not refused
    compared = False  # whether numbers were, between processes

    @functools.wraps(fn)
    def run(*args, **kwargs):
        nonlocal traced
        if inputs is not None and current_layout() is not None:
            args = tuple(a if i in fixed else shard(a, inputs) for i, a in enumerate(args))
            kwargs = shard(kwargs, inputs)
        out = fn(*args, **kwargs)
        out = out if outputs is None or current_layout() is None else shard(out, outputs)
        traced += 1
        return out

    compiled = jax.jit(run, donate_argnums=donated, static_argnums=fixed or None, **options)
    named, name = _names_of(fn, donated), getattr(fn, "__name__", "the function")

    def given(args, kwargs, put=put):
        layout = current_layout()
        if layout is None:
            return args, kwargs
        mapped = _mapped(layout, "compute" if inputs is None else inputs)
        args = tuple(a if i in fixed else _brought(a, mapped, put) for i, a in enumerate(args))
        return args, _brought(kwargs, mapped, put)

    def using(use: Callable) -> Callable:
        @functools.wraps(fn)
        def call(*args, **kwargs):
            args, kwargs = given(args, kwargs)
            return use(*args, **kwargs)

        return call

    def used(*args, **kwargs):
        nonlocal compared
        if donated:
            _check_given_once(donated + named, args, kwargs)
        if not compared:
            compared = _numbers_compared(args, kwargs)
        if traced > len(right):  # one was refused, or traced for its types; JAX has kept it
            read(*args, **kwargs)
        before = traced
        try:  # not a context, which would be made in each call
            results = compiled(*args, **kwargs)
        except Exception as error:
            raise_in_our_words(error, name, "named_jit")
            raise
        if traced > before:
            read(*args, **kwargs)
        return results

    def read(*args, **kwargs):
        """Refuses what compilers get wrong. JAX has kept the program, and traces nothing again."""
        layout = current_layout()
        mesh = mesh_of((args, kwargs)) if layout is None else layout.mesh
        if any(map(is_tracer, jax.tree.leaves((args, kwargs)))):
            return
        with jaxs_in_our_words(name, "named_jit"):
            program = compiled.trace(*args, **kwargs).jaxpr.jaxpr
        if program not in right:
            on_cpus = isinstance(mesh, jax.sharding.Mesh) and are_cpus(mesh)
            refuse_traced(program, mesh, moves_sums=not on_cpus)
            right.add(program)

    def reading(use: Callable) -> Callable:
        def call(*args, **kwargs):
            read(*args, **kwargs)
            with jaxs_in_our_words(name, "named_jit"):
                return use(*args, **kwargs)

        return using(call)

    call = using(used)
    placed = functools.partial(given, put=_type_of)  # which `trellis.program.trace` asks for
    stages = {"lower": reading(compiled.lower), "trace": reading(compiled.trace), "arguments_placed": placed}
    for stage, use in stages.items():
        setattr(call, stage, use)
    return call


def _names_of(fn: Callable, positions: tuple[int, ...]) -> tuple[str, ...]:
    """The names by which arguments at these positions may be given instead: `jax.jit` donates them there too."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # of a builtin
        return ()
    return tuple(names[p] for p in positions if -len(names) <= p < len(names))


def _check_given_once(donate: tuple[int | str, ...], args: tuple, kwargs: dict) -> None:
    """Refuses an array that is donated and given a second time: on several devices JAX (0.10.2) ends the process.

    Raises:
        NamesError: with both places.
    """
    held = [_memory(x) for x in jax.tree.leaves((args, kwargs)) if _is_concrete(x)]
    if len(set(held)) == len(held):
        return
    donated, places = {p + len(args) if isinstance(p, int) and p < 0 else p for p in donate}, {}
    for given, tree in (*enumerate(args), *kwargs.items()):
        for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_named):
            array, place = x.array if is_named(x) else x, f"argument {given}{jax.tree_util.keystr(path)}"
            if not _is_concrete(array):
                continue
            first, other = places.setdefault(_memory(array), (place, given))
            if place != first and not donated.isdisjoint((given, other)):
                raise NamesError(
                    f"a donated array cannot be passed twice, got {typeof(x)} as {first} and as {place}, in "
                    "named_jit(donate=...): copy one of them with jax.tree.map(jax.numpy.copy, ...)"
                )


def _numbers_compared(args: tuple, kwargs: dict) -> bool:
    """Refuses numbers, texts and keys that differ between the processes of a layout; whether it has several. Arrays are
    compared where they are placed; a key or a number that JAX made of a seed lies on the mesh already.

    Raises:
        MeshError: one differs.
    """
    layout = current_layout()
    if layout is None or not spans_processes(layout.mesh):
        return False
    whole = lambda x: _is_concrete(x) and x.ndim == 0 and x.is_fully_replicated
    found = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, numbers.Number | str | np.generic) or whole(x)]
    if found:
        check_alike(found, "named_jit")
    return True


def _is_concrete(x) -> bool:
    return isinstance(x, jax.Array) and not is_tracer(x)


def _memory(array: jax.Array) -> int:
    """A number that is the same for arrays in the same memory. Arrays that were put on a mesh share none, except keys
    and numbers without a fixed type (see `trellis.mesh.landing.put`)."""
    key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
    if not key and not jax.typeof(array).weak_type:
        return id(array)
    return (jax.random.key_data(array) if key else array).addressable_data(0).unsafe_buffer_pointer()


def _type_of(array, sharding: jax.sharding.NamedSharding, _what: str) -> jax.ShapeDtypeStruct:
    """The type of an array that lies so; nothing is sent."""
    known = jax.typeof(array)
    return jax.ShapeDtypeStruct(known.shape, known.dtype, sharding=sharding, weak_type=known.weak_type)


def _brought(tree, layout: Layout, put: Callable):
    """The tree with arrays that are on no mesh placed as the layout says, before a program takes them.

    Raises:
        MeshError: an array of another mesh.
    """

    def bring(x):
        array = x.array if is_named(x) else x
        if not isinstance(array, jax.Array | np.ndarray):
            return x
        names = x.names if is_named(x) else tuple(f"_{i}" for i in range(array.ndim))
        if is_tracer(array):
            if not jax.typeof(array).sharding.mesh.empty:
                on_mesh(array, names, "named_jit")
            return x
        mesh = getattr(getattr(array, "sharding", None), "mesh", None)
        if mesh is layout.mesh or mesh == layout.mesh:
            return x
        if mesh is not None and not getattr(mesh, "empty", False):
            on_mesh(array, names, "named_jit")
            return x
        layout.check(names, array.shape)
        values = in_order_here(array, x.names) if is_named(x) else array
        array = put(values, layout.sharding(names), "named_jit")
        return NamedArray(array, names) if is_named(x) else array

    return jax.tree.map(bring, tree, is_leaf=is_named)
