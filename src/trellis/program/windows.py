"""Two gradients of windows over slices that XLA's partitioner gets wrong (JAX 0.10.2, on CPUs; the first on TPUs, too).

The gradient of a convolution's weight is a convolution over the batch. If channels are in groups (in a depthwise
convolution each is one), the batch of that convolution is in groups, and the partitioner sums it over all devices:

    x, d_y: f32["batch/data pos channel"]                       on a mesh with data=2, model=2
    d_weight = convolution(x, d_y, batch_group_count=channels)  twice what it is: summed over model, too

The gradient of a maximum over windows goes to the positions that were the largest. If windows overlap by as much as
they move on, or more, some of it is lost where they reach over the ends of slices.
"""

from collections.abc import Mapping
from typing import Any

from jax.sharding import AxisType

from trellis.errors import UserError
from trellis.program.natural import RULES
from trellis.program.reading import Operation, Program
from trellis.program.sizes import typed


def is_grouped(name: str, params: Mapping[str, Any]) -> bool:
    """Whether an operation is the gradient of a weight by which a convolution with groups multiplies."""
    return name == "conv_general_dilated" and params["batch_group_count"] > 1


def is_of_largest(name: str) -> bool:
    """Whether an operation is the gradient of a maximum over windows."""
    return name == "select_and_scatter_add"


def refuse_windows(program: Program) -> None:
    """Refuses a program with one of these gradients.

    Raises:
        UserError: with its line, and what to write in its place.
    """
    for operation in program.walk():
        if is_grouped(operation.name, operation.params):
            _refuse_groups(operation, program)
        elif is_of_largest(operation.name):
            _refuse_overlaps(operation, program)


def _refuse_groups(operation: Operation, program: Program) -> None:
    states = [value.state for value in operation.operands]
    if program.auto and states[0].mode != "manual":  # types do not say what is summed
        sizes = _sizes(program)
        wrong, along = len(sizes) > 1, f"on {', '.join(sizes)}, of which the compiler chooses"
    else:
        real, sliced = _real_axes(operation), {axis for state in states for axis in state.sliced}
        summed = [axis for axis in real if axis in RULES[operation.name](operation, states).pending]
        others = [axis for axis in real if axis not in sliced]
        wrong = bool(summed and others)
        along = f"summed over {', '.join(summed)}; the same along {', '.join(others)}"
    if wrong:
        raise UserError(
            "The weight's gradient of a convolution with groups must be summed over all mesh axes: compilers also sum "
            "it over those along which devices hold the same.",
            seen=f"{_types(operation)}, {along}",
            where=operation.source,
            fix="convolve the slice of each device, in tr.shard_map; or add up shifted arrays times their weights",
        )


def _refuse_overlaps(operation: Operation, program: Program) -> None:
    state, real = operation.operands[1].state, _real_axes(operation)
    windows, strides = operation.params["window_dimensions"], operation.params["window_strides"]
    by_compiler = _sizes(program) if state.mode == "auto" else []  # any dimension may be sliced
    for axes, window, stride in zip(state.axes, windows, strides):
        sliced = [axis for axis in axes if axis in real]
        if window >= 2 * stride and (sliced or by_compiler):
            along = (
                f"along {'/'.join(axes)}" if sliced else f"on {', '.join(by_compiler)}, which the compiler slices by"
            )
            raise UserError(
                "Windows whose maximum has a gradient must not reach far over the ends of slices: compilers lose some "
                "of it.",
                seen=f"{_types(operation)}, windows of {window} that move on by {stride} {along}",
                where=operation.source,
                fix="take the maximum of shifted arrays, or windows of each device's slice, in tr.shard_map"
                if by_compiler
                else "hold this dimension whole on each device, or take the maximum of shifted arrays",
            )


def _sizes(program: Program) -> list[str]:
    """The mesh axes of several devices, with their sizes."""
    return [f"{axis}={size}" for axis, size in program.mesh.items() if size > 1]


def _types(operation: Operation) -> str:
    return " and ".join(typed(value.aval) for value in operation.operands)


def _real_axes(operation: Operation) -> list[str]:
    """The mesh axes that types speak of and that have several devices."""
    mesh = operation.operands[0].aval.sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types)
    return [axis for axis, kind in kinds if kind == AxisType.Explicit and mesh.shape[axis] > 1]
