"""Updates by name: `x.at["pos", 3].set(value)`."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trellis.mesh.by_device import by_device
from trellis.mesh.layout import current_layout
from trellis.mesh.manual.take import is_narrow
from trellis.mesh.reshard import place
from trellis.named import backend
from trellis.named.arguments import dtypes_of_jax, has_keys, keeps_dtype, refuse_keys
from trellis.named.array import NamedArray
from trellis.named.axis import NamesError
from trellis.named.index import index
from trellis.named.operand import check_contained, check_sizes, on_one_mesh, operand, refuse_others, union
from trellis.named.placing import from_slices, kept_by_each_device, own_mesh, to_layout, transpose_array, whole, widen
from trellis.named.selection import on_mesh, selection
from trellis.notation import TypeMismatch, spec_of, typeof
from trellis.notation.state import state_of

# Updates that all count where a place is met several times.
_GATHERING = ("add", "multiply", "divide", "power")


def at(x: NamedArray) -> "At":
    """`at(x)["pos", 3].set(value)`, also `x.at["pos", 3].set(value)`.

    Names: those of `x`.
    Gradient: to the array where it was kept, to the values where they were put; an all-gather where an indexed name is
        sliced. Of `multiply`, `divide` and `power` at positions in arrays there is none.
    Moves: an all-gather along indexed names that are sliced; along all names in a `vmap` over slices.
    """
    return At(operand(x, "an update"))


class At:
    """What `x.at` gives, to be indexed with the places that an update is for."""

    def __init__(self, x: NamedArray):
        self.x = x

    def __getitem__(self, key) -> "Place":
        return Place(self.x, key)


class Place:
    """Places of an array, selected as in indexing, to be read or updated.

    An update gives a new array. Its value is a number or a named array whose names are among those of the places, which
    are the names that `x[...]` would have. An indexed dimension is gathered first, and so are the positions and the
    values along their own names. Positions that are values of the program are ignored if they are out of range.
    """

    def __init__(self, x: NamedArray, key):
        self.x, self.key = x, key

    def get(self) -> NamedArray:
        """The values at the places: `x[...]`."""
        return index(self.x, self.key)

    def set(self, value) -> NamedArray:
        """The array with these values at the places."""
        return self._update("set", value)

    def add(self, value) -> NamedArray:
        """The array with the values added at the places; both, if a place is met twice."""
        return self._update("add", value)

    def subtract(self, value) -> NamedArray:
        """The array with the values subtracted at the places; both, if a place is met twice."""
        return self._update("add", -value)

    def multiply(self, value) -> NamedArray:
        """The array with the places multiplied by the values."""
        return self._update("multiply", value)

    mul = multiply

    def divide(self, value) -> NamedArray:
        """The array with the places divided by the values."""
        return self._update("divide", value)

    def power(self, value) -> NamedArray:
        """The array with the places raised to the power of the values."""
        return self._update("power", value)

    def min(self, value) -> NamedArray:
        """The array with the smaller of place and value at the places."""
        return self._update("min", value)

    def max(self, value) -> NamedArray:
        """The array with the larger of place and value at the places."""
        return self._update("max", value)

    def _update(self, method: str, value) -> NamedArray:
        what = f"at[...].{method}"
        found = selection(self.x, self.key, what)
        arrays = {n: on_mesh(v, n, what) for n, v in found.items() if isinstance(v, NamedArray)}
        numbers = {n: v for n, v in found.items() if isinstance(v, int)}
        slices = {n: v for n, v in found.items() if isinstance(v, slice) and v != slice(0, self.x.shape[n], 1)}
        refuse_others((value,), what)
        if not isinstance(value, NamedArray) and getattr(value, "ndim", None) == 0:
            value = NamedArray(jnp.asarray(value), ())
        if isinstance(value, bool) and self.x.dtype != jnp.bool_:
            value = int(value)
        if method != "set" or has_keys(self.x) != has_keys(value):
            refuse_keys((self.x, value), what)
        given = [operand(value, what)] if isinstance(value, NamedArray) else []
        x, *rest = on_one_mesh([self.x, *arrays.values(), *given], what)
        arrays = dict(zip(arrays, rest, strict=False))
        value = rest[-1] if given else value
        updated = (*arrays, *numbers, *slices)
        layout = current_layout()
        # JAX 0.10.2 to 0.12.0 has no gradient of a `shard_map` that is mapped over slices, and XLA's own partition of
        # an update has been wrong: so it runs on whole arrays.
        mapped = layout is not None and layout.mapped
        x = _one_piece(whole(x, x.names if mapped else updated, what, by_order=updated), updated)
        x = kept_by_each_device(x)
        return to_layout(_one_piece(_Update(x, arrays, numbers, slices, what).run(method, value), updated))


def _one_piece(x: NamedArray, names) -> NamedArray:
    """In auto mode, an array whole along the names that are updated, before and after: if the compiler of JAX 0.10.2
    has just reshaped or joined a sliced dimension, or slices the result, its update writes to the wrong device."""
    layout = current_layout()
    if layout is None or state_of(x.array).mode != "auto":
        return x
    axes = [() if n in names else mine for n, mine in zip(x.names, layout.assign(x.names), strict=True)]
    return x.with_array(place(x.array, tuple(axes), names=x.names))


class _Update:
    """One update. Dimensions stand in this order in the program that runs it: those that positions share with the
    array (`aligned`, mapped over), those with positions, those with a number, the others."""

    def __init__(self, x: NamedArray, arrays, numbers, slices, what: str):
        self.x, self.what, self.slices = x, what, slices
        self.numbers = list(numbers.values())
        self.updated = {*arrays, *numbers, *slices}
        ids = list(arrays.values())
        self.id_names = union(ids) if ids else ()
        if ids:
            check_sizes(ids, what)
            check_contained(ids, self.id_names, what, "for all combinations broadcast one to all names")
        rest = [n for n in x.names if n not in arrays and n not in numbers]
        self.aligned = [n for n in rest if n in self.id_names and n not in slices]
        self.own = [n for n in self.id_names if n not in self.aligned]
        if clash := [n for n in self.own if n in rest]:
            raise NamesError(
                f"positions cannot have the name of a dimension that is indexed with a slice, got '{clash[0]}' in "
                f"{typeof(x)}, in {what}: rename it"
            )
        check_sizes([NamedArray(x.array, tuple(f"{n} updated" if n in arrays else n for n in x.names)), *ids], what)
        self.free = [n for n in rest if n not in self.aligned]
        self.order = [*self.aligned, *arrays, *numbers, *self.free]
        self.ids = ids

    def run(self, method: str, value) -> NamedArray:
        x, layout = self.x, current_layout()
        state = state_of(x.array)
        axes = dict(zip(x.names, x.slices or state.axes, strict=True))
        if state.mode == "auto" and layout is not None:  # as `_one_piece` put it, else XLA cuts the values otherwise
            axes = {n: () if n in self.updated else mine for n, mine in zip(x.names, layout.assign(x.names))}
        plain = place(x.array, state.axes, (), (), names=x.names) if state.mode == "explicit" else x.array
        names = [*self.aligned, *self.own, *self.free]
        arrays = [self._whole(widen(i, self.id_names), self.id_names, i, axes) for i in self.ids]
        if getattr(value, "ndim", 0) and not isinstance(value, NamedArray):
            raise NamesError(
                f"an update takes a number or a named array, got {typeof(value)}, in {self.what}: name its dimensions"
            )
        keeps_dtype(value, x, "an update", self.what)
        if isinstance(value, int):  # which JAX would take modulo the dtype's range; what is subtracted comes below 0
            with dtypes_of_jax((x, value), self.what):
                jnp.asarray(~value if method == "add" and value < 0 else value, x.dtype)
        if method == "divide" and not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeMismatch(
                f"an update must keep the dtype of its array, got a quotient for {typeof(x)}, in {self.what}: cast the "
                "array with .astype, or set x[...] // value"
            )
        if isinstance(value, NamedArray):
            arrays.append(self._values(value, names, axes))
        program = self._program(method, value)
        if state.mode == "explicit" and any(axes.values()):
            specs = tuple(spec_of(state_of(a).axes) for a in (plain, *arrays))
            program = by_device(program, mesh=own_mesh(x.array), in_specs=specs, out_specs=specs[0])
        try:
            with dtypes_of_jax((x, value), self.what):
                return x.with_array(program(plain, *arrays))
        except NotImplementedError as error:
            if "scatter_mul gradients" not in str(error):
                raise
            raise NamesError(
                f"JAX cannot differentiate an update by factors at positions that may repeat, got {method} of "
                f"{typeof(self.x)} at positions that are values, in {self.what}: read x[...], and set the result"
            ) from error

    def _whole(self, array, names, x: NamedArray, axes):
        """Positions or values, sliced as the array is along the names that it has, whole along others."""
        state = state_of(array)
        if state.mode == "manual":
            from_slices([self.x, x], tuple(dict.fromkeys((*self.x.names, *x.names))))
            return array
        keep = [*self.aligned, *self.free]
        wanted = [axes.get(n, ()) if n in keep and array.shape[i] > 1 else () for i, n in enumerate(names)]
        return array if state.mode == "none" else place(array, wanted, (), (), names=tuple(names))

    def _values(self, value: NamedArray, names: list[str], axes):
        if extra := [n for n in value.names if n not in names]:
            raise NamesError(
                f"an update's value can only have names of the updated part, got '{extra[0]}' in {typeof(value)} for "
                f"'{' '.join(names)}', in {self.what}: rename or select"
            )
        sizes = {n: s for i in self.ids for n, s in i.shape.items() if n in self.own}
        sizes |= {n: len(range(v.start, v.stop, v.step)) for n, v in self.slices.items()}
        sizes = {n: sizes.get(n, self.x.shape.get(n)) for n in names}
        if wrong := [n for n, s in value.shape.items() if s != sizes[n]]:
            raise NamesError(
                f"a name must have one size in an operation, got {wrong[0]}={value.shape[wrong[0]]} in "
                f"{typeof(value)} for a place of {wrong[0]}={sizes[wrong[0]]}, in {self.what}: slice it"
            )
        kept = tuple(n for n in names if n in value.names)
        value = value.with_array(backend.to_type(value.array, self.x.dtype))
        array = transpose_array(value.array, [kept.index(n) for n in value.names])
        moved = self._whole(array, kept, value, axes)
        return widen(NamedArray(moved, kept), tuple(names))

    def _program(self, method: str, value):
        x, count, mapped = self.x, len(self.ids), len(self.aligned)
        layout = current_layout()
        how = dict(out_sharding=PartitionSpec()) if layout is not None and layout.mapped else {}
        turn = [x.names.index(n) for n in self.order]
        back = [self.order.index(n) for n in x.names]
        basic = (*self.numbers, *(_as_key(self.slices[n]) if n in self.slices else slice(None) for n in self.free))
        id_turn = [self.id_names.index(n) for n in (*self.aligned, *self.own)]
        cut = [len(range(v.start, v.stop, v.step)) if (v := self.slices.get(n)) else None for n in self.free]
        # In 16 bits a place that is met often would no longer change: its updates are made in float32.
        wide = jnp.float32 if count and method in _GATHERING and is_narrow(x) else x.dtype

        def program(array, *rest):
            ids, given = rest[:count], [backend.to_type(new, wide) for new in rest[count:]]
            array = backend.to_type(array, wide)
            shape = jnp.broadcast_shapes(*(i.shape for i in ids)) if ids else ()
            ids = [jnp.transpose(jnp.broadcast_to(i, shape), id_turn) for i in ids]

            def one(array, *ids_and_value):
                ids, given = ids_and_value[:count], ids_and_value[count:]
                place = array.at[(*ids, *basic)]
                sizes = zip(cut, array.shape[array.ndim - len(cut) :], strict=True)
                shape = (*(ids[0].shape if ids else ()), *(size if part is None else part for part, size in sizes))
                new = given[0] if given else value
                new = backend.broadcast(new, shape) if backend.sums_wide(new, shape) else new
                return getattr(place, method)(new, mode="drop", **how)

            run = one
            for _ in range(mapped):
                run = jax.vmap(run)
            if given:  # full along what is mapped
                full = tuple(array.shape[turn[i]] if i < mapped else n for i, n in enumerate(given[0].shape))
                given = [backend.broadcast(given[0], full)]
            return backend.to_type(jnp.transpose(run(jnp.transpose(array, turn), *ids, *given), back), x.dtype)

        return program


def _as_key(value: slice) -> slice:
    """A slice as NumPy reads it: one that goes backwards to the first position has no end."""
    return slice(value.start, None if value.stop < 0 else value.stop, value.step)
