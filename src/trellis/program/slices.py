"""How the results of operations on slices are sliced, as far as that is known: types of manual programs do not say."""

import math

from trellis.program.natural import RULES, placed, updated_dims
from trellis.program.reading import Operation

# Operations that take, add or repeat elements along dimensions.
_ALONG = frozenset("slice pad concatenate dynamic_slice dynamic_update_slice split tile".split())
# Operations that leave a slice of fewer elements, over the same mesh axes in the same order.
_CUT = frozenset("slice dynamic_slice split".split())


# Stands before the name of a mesh axis along which a dimension differs without being sliced: `h d/y` joined is one
# dimension, of which no device has a slice. Two that are joined alike may meet.
JOINED = "*"
# Stands before the name of a mesh axis whose parts were gathered out of their order (`order.py`).
GATHERED = "^"

Axes = tuple[str, ...]
# For each dimension, the mesh axes that slice it, major to minor; none if nothing is known.
Dims = tuple[Axes, ...]


def slices_kept(operation: Operation, operands: list[Dims], shape: tuple[int, ...]) -> Dims:
    """How a result of each device's own work is sliced, as far as this is known: no axes if it is not.

    Args:
        operands: for each operand, for each dimension, the mesh axes that slice it, or that are `JOINED` in it.
        shape: of one device's slice of the result.
    """
    found = _kept(operation, operands, shape)
    if not any(GATHERED in axis for dims in operands for axes in dims for axis in axes):
        return found
    # Parts out of order are so only together: of some of them, or sorted, nothing is known.
    whole = {
        (axes, size)
        for value, dims in zip(operation.operands, operands)
        for i, (axes, size) in enumerate(zip(dims, value.shape))
        if operation.name != "sort" or i != operation.params["dimension"]
    }
    lost = lambda axes, size: any(GATHERED in axis for axis in axes) and (axes, size) not in whole
    found = tuple(() if lost(axes, size) else axes for axes, size in zip(found, shape))
    return _together(operation.operands[0].shape, shape, operands[0], found) if operation.name == "reshape" else found


def _kept(operation: Operation, operands: list[Dims], shape: tuple[int, ...]) -> Dims:
    name = operation.name
    if name == "reshape":
        return _regrouped(operation.operands[0].shape, shape, operands[0])
    if name.startswith("scatter"):
        dims = list(operands[0])
        for index, target in windows(operation):
            dims[target] = max(dims[target], operands[2][index], key=len)
        return tuple(dims)
    if name == "broadcast_in_dim":  # every element comes from one slice of size 1
        sizes = zip(operation.operands[0].shape, operation.params["broadcast_dimensions"], operands[0])
        operands = [tuple(axes if size == shape[target] else () for size, target, axes in sizes)]
    if name in RULES and name != "reshard":
        return RULES[name](operation, [placed(dims) for dims in operands]).axes
    alike = [
        (value.shape, dims)
        for value, dims in zip(operation.operands, operands)
        if broadcasts(value.shape, shape) or (name in _ALONG and len(value.shape) == len(shape))
    ]
    if name in _CUT:
        return tuple(_piece(operation, i, axes, shape[i]) for i, axes in enumerate(alike[0][1]))
    kept = [
        max((dims[i] for before, dims in alike if before[i] == size), key=len, default=())
        for i, size in enumerate(shape)
    ]
    if name == "concatenate":
        joined = {dims[operation.params["dimension"]] for dims in operands}
        kept[operation.params["dimension"]] = joined.pop() if len(joined) == 1 else ()
    return tuple(kept)


def broadcasts(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether an elementwise operation takes an operand of one shape to a result of another, dimension by dimension.

    >>> broadcasts((2, 1), (2, 8)), broadcasts((8,), (2, 8))
    (True, False)
    """
    return len(before) == len(after) and all(size in (1, made) for size, made in zip(before, after))


def _piece(operation: Operation, dim: int, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """How a piece of a dimension is sliced. If it is one block of what was joined, it is that block's slice again; and
    if it is not made of whole blocks, no later piece is one."""
    blocks = {axis: joined_of(axis) for axis in axes}
    if operation.operands[0].shape[dim] == size or None in blocks.values():
        return axes
    whole = {axis: _cuts_whole(operation, dim, math.prod(block)) for axis, block in blocks.items() if block}
    if all(whole.values()) and {block and math.prod(block) for block in blocks.values()} == {size}:
        return tuple(map(bare_axis, axes))
    return tuple(axis if whole[axis] else _joined(bare_axis(axis), 0, 0) for axis in axes)


def _cuts_whole(operation: Operation, dim: int, unit: int) -> bool:
    """Whether an operation cuts a dimension between blocks of so many elements only."""
    params = operation.params
    if unit == 0 or operation.name == "dynamic_slice" or params.get("strides"):
        return False
    if operation.name == "split":
        return all(size % unit == 0 for size in params["sizes"])
    return params["start_indices"][dim] % unit == 0 == params["limit_indices"][dim] % unit


def _regrouped(before: tuple[int, ...], after: tuple[int, ...], dims: tuple) -> tuple[tuple[str, ...], ...]:
    """How a reshape's result is sliced. A dimension that keeps its size and what stands before it keeps its slices. If
    one is cut into several, the first has them. If several are joined, the result has those of the first, if it alone
    has any; otherwise they are `JOINED` in it.

    Dimensions of size 1 come and go anywhere. So nothing is known of a slice of that size, nor of one with a new
    dimension of that size before it, which may be what is sliced.
    """
    out: list[tuple[str, ...]] = [()] * len(after)
    if 0 in before or before == after:
        return tuple(out) if 0 in before else dims
    # A block of elements that mesh axes slice lies between two strides: to the next element of it, and past all of it.
    sliced: dict[tuple[int, int], list[str]] = {}
    strides = _strides(after)
    for size, stride, axes in zip(before, _strides(before), dims, strict=True):
        for axis in axes if size != 1 else ():
            block, within = joined_of(axis) or (size, 1)
            if block == 0:  # pieces of blocks stay what they are, in the last of the dimensions that they go to
                inner = [i for i, step in enumerate(strides) if after[i] != 1 and step < stride * size]
                out[max((i for i in inner if strides[i] >= stride), default=inner[0])] += (axis,)
            elif size % (block * within) == 0:
                name = axis if axis.startswith(GATHERED) else bare_axis(axis)
                sliced.setdefault((stride * within, stride * within * block), []).append(name)
    places = {
        block: next(i for i, stride in enumerate(strides) if after[i] != 1 and stride < block[1]) for block in sliced
    }
    for (low, top), axes in sliced.items():
        i = places[low, top]
        alone = sum(place == i for place in places.values()) == 1
        if not (alone and top == strides[i] * after[i]):
            within = max(1, low // strides[i])
            out[i] += tuple(_joined(axis, max(1, top // strides[i] // within), within) for axis in axes)
        elif not (i and after[i - 1] == 1):
            out[i] += tuple(axes)
    return tuple(out)


def _together(before: tuple[int, ...], after: tuple[int, ...], dims: Dims, found: Dims) -> Dims:
    """What is known of a reshape's result, with that of parts that stood `apart` and are one dimension again."""
    out = list(found)
    for i in range(len(dims) - 1):
        first, second = dims[i], dims[i + 1]
        if (
            len(first) == len(second) == 1
            and first[0].startswith(_PARTS)
            and second[0] == _REST + first[0][len(_PARTS) :]
        ):
            place = (math.prod(before[:i]), before[i] * before[i + 1])
            for j, size in enumerate(after):
                if (math.prod(after[:j]), size) == place:
                    out[j] = tuple(filter(None, first[0].removeprefix(_PARTS).split("|")))
    return tuple(out)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _joined(axis: str, size: int, stride: int) -> str:
    """The text for a mesh axis that slices a block of `size` elements, `stride` apart, of a dimension."""
    return f"{JOINED}{size}.{stride}.{axis}"


def joined_of(axis: str) -> tuple[int, int] | None:
    """The block of a `JOINED` axis, as its size and stride, zeros if it was cut; None for another axis."""
    if not axis.startswith(JOINED):
        return None
    size, stride, _ = axis.removeprefix(JOINED).split(".", 2)
    return int(size), int(stride)


def gathered(axis: str, place: int, count: int) -> str:
    """The text for a mesh axis of which a device has all `count` parts, in that place among others like it, from
    outermost to innermost."""
    return f"{GATHERED}{place}.{count}.{axis}"


# Stand before the mesh axes of a dimension that was gathered into two, its parts and what is in each.
_PARTS, _REST = f"{GATHERED}parts ", f"{GATHERED}rest "


def apart(axes: Axes) -> tuple[Axes, Axes]:
    """The texts for a dimension that stands as two, its parts along some mesh axes and what is in each: what is known
    of it once they are joined."""
    text = "|".join(axes)
    return (_PARTS + text,), (_REST + text,)


def is_apart(axis: str) -> bool:
    """Whether this is such a text, and no mesh axis."""
    return axis.startswith((_PARTS, _REST))


def is_gathered(axis: str) -> bool:
    """Whether the parts along a mesh axis were gathered out of their order."""
    return axis.startswith(GATHERED) and not is_apart(axis)


def place_and_count(axis: str) -> tuple[int, int]:
    """The place among a device's own parts, and their number, of an axis whose parts were gathered."""
    place, count, _ = axis.removeprefix(GATHERED).split(".", 2)
    return int(place), int(count)


def bare_axis(axis: str) -> str:
    """The plain name of a mesh axis, `JOINED`, `GATHERED` or not; empty for a text of dimensions that stand `apart`.

    >>> bare_axis("x"), bare_axis("*8.1.x"), bare_axis("^0.2.x")
    ('x', 'x', 'x')
    """
    if is_apart(axis):
        return ""
    return axis.split(".", 2)[-1] if axis.startswith((JOINED, GATHERED)) else axis


def plain_axes(axes: Axes) -> Axes:
    """The plain names of the mesh axes that slice a dimension, without those whose parts were gathered."""
    return tuple(bare_axis(axis) for axis in axes if not axis.startswith(GATHERED))


def windows(operation: Operation) -> list[tuple[int, int]]:
    """The dimensions of a scatter's updates that cover a dimension of the array from end to end, each with that one."""
    array, _, updates = (value.shape for value in operation.operands[:3])
    return [(i, j) for i, j in updated_dims(operation) if updates[i] == array[j]]
