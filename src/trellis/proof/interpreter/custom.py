"""Custom calls: a compiler's own marks, random bits, sorting and products of libraries, and opaque kernels.

A reference of `kernels/` stands in for a kernel whose inside the program does not show. Which ones those were is kept,
so that a report can say it.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter import drawing, factoring, kernels, solving, whole
from trellis.proof.interpreter.layouts import blank, in_memory
from trellis.proof.interpreter.moving import falling, sliced, viewed
from trellis.proof.interpreter.values import NotInterpreted, Value


def _same(instruction: Instruction, machine) -> Callable:
    return lambda values, team: values[0]


def _unwritten(instruction: Instruction, machine) -> Callable:
    kind = machine.type(instruction)
    return lambda values, team: blank(kind, 1, machine.held)


def _async_start(instruction: Instruction, machine) -> Callable:
    """The start of a TPU's collective inside a fusion: the collective's inputs, its results, flags and semaphores.

    The fusions that follow repeat the collective from these inputs.
    """
    kind = machine.type(instruction)

    def run(values, team) -> Value:
        done, inputs = values[0], values[1:]
        made = (*inputs, *(done if isinstance(done, tuple) else (done,)))
        return *made, *(blank(t, 1, machine.held) for t in kind[len(made) :])

    return run


def _async_done(instruction: Instruction, machine) -> Callable:
    """Its end, which has the collective, repeated, as its third operand."""
    return lambda values, team: values[2]


def _joined(instruction: Instruction, machine) -> Callable:
    """An array whose slices were copied one by one, in the order in which the copies began.

    Each slice went to its own place, which is that in the array that it was cut from.
    """
    kind, named = machine.type(instruction), machine.program.by_name
    starts = [named[named[name].operands[0]] for name in instruction.operands]
    if len({s.operands for s in starts}) > 1 or any(s.attribute("slice") is None for s in starts):
        raise NotInterpreted(f"{instruction.name}, which joins what are not slices of one array")
    cuts = [sliced(start) for start in starts]
    (cut_from,) = machine.operand_types(starts[0])
    times = np.zeros((1, *cut_from.shape), np.int8)
    for cut in cuts:
        times[cut] += 1
    if (times != 1).any():
        raise NotInterpreted(f"{instruction.name}, which joins slices that are not all of an array, each once")
    view = viewed(cut_from, kind, machine, instruction.name)

    def run(values, team) -> Value:
        out = np.empty((max(map(len, values)), *cut_from.shape), values[0].dtype)
        for cut, value in zip(cuts, values):
            out[cut] = value
        return view(out)

    return run


def _cropped(instruction: Instruction, machine) -> Callable:
    """A larger array in an array's memory, with zeros where that has padding."""
    (before,), after = machine.operand_types(instruction), machine.type(instruction)
    source, target = in_memory(before), in_memory(after)
    if len(source) != len(target):
        raise NotInterpreted(f"{instruction.name}, which reads {before} as {after}")
    there = (source >= 0) & (target >= 0)

    def run(values, team) -> Value:
        x = values[0].reshape(len(values[0]), -1)
        out = np.zeros((len(x), math.prod(after.shape)), x.dtype)
        out[:, target[there]] = x[:, source[there]]
        return out.reshape(len(x), *after.shape)

    return run


def more_inputs(instruction: Instruction, others: Mapping[str, Instruction]) -> list[str]:
    """What an operation reads besides its operands: the start of an asynchronous collective passes on its inputs."""
    if instruction.op != "custom-call" or len(instruction.operands) != 1:
        return []
    if instruction.quoted("custom_call_target") != "AsyncCollectiveStart":
        return []
    return list(others[instruction.operands[0]].operands)


def _largest(instruction: Instruction, machine) -> Callable:
    """The largest entries along the last dimension, the first of equals first, and where they are."""
    kind = machine.type(instruction)

    def run(values, team) -> Value:
        order = falling(values[0])[..., : kind[0].shape[-1]]
        return np.take_along_axis(values[0], order, -1), order.astype(np.int32)

    return run


def _threefry(instruction: Instruction, machine) -> Callable:
    """Twenty rounds of Threefry-2x32 (Salmon et al., 2011) on two keys and two counters, as JAX calls it on GPUs."""

    def run(values, team) -> Value:
        devices = max(map(len, values))
        k0, k1, x0, x1 = (np.broadcast_to(v, (devices, *v.shape[1:])).astype(np.uint32) for v in values[:4])
        keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
        x0, x1 = x0 + k0, x1 + k1
        for turn in range(5):
            for by in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
                x0 = x0 + x1
                x1 = ((x1 << np.uint32(by)) | (x1 >> np.uint32(32 - by))) ^ x0
            x0 = x0 + keys[(turn + 1) % 3]
            x1 = x1 + keys[(turn + 2) % 3] + np.uint32(turn + 1)
        return x0, x1

    return run


# A compiler's marks, which change nothing.
_MARKS = ("AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "LayoutConstraint", "MoveToDevice",
          "MoveToHost", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement",
          "xla.sdy.FuncResultSharding")  # fmt: skip
TARGETS: Mapping[str, Callable] = {
    **whole.TARGETS,
    **drawing.TARGETS,
    **dict.fromkeys(_MARKS, _same),
    **dict.fromkeys(("AllocateBuffer", "PrepareAsyncCallDone", "PrepareAsyncCallStart"), _unwritten),
    "AsyncCollectiveDone": _async_done,
    "AsyncCollectiveStart": _async_start,
    "ConcatBitcast": _joined,
    "ZeroCrop": _cropped,
    **dict.fromkeys(("TopK", "__gpu$TopK"), _largest),
    "cu_threefry2x32_ffi": _threefry,
}
_NAMED_APART = ("tpu_custom_call", "__gpu$xla.gpu.triton")
# By how the target begins, or the instruction's name if all kernels have one target.
KERNELS: Mapping[str, Callable] = {
    **kernels.SPLASH,
    **kernels.FURTHER,
    **kernels.CUDNN,
    **kernels.BLOCK_SCALED,
    **kernels.CONVOLUTION,
    **kernels.GROUPED,
    **kernels.ACTIVATIONS,
    **solving.KERNELS,
    **factoring.KERNELS,
    **drawing.KERNELS,
}


def _custom_call(instruction: Instruction, machine) -> Callable:
    target = instruction.quoted("custom_call_target") or ""
    if target in TARGETS:
        return TARGETS[target](instruction, machine)
    # Kernels of one target are told apart by their names, which are the instruction's or stand in the scopes around it.
    scopes = (instruction.quoted("op_name") or "").split("/")[::-1]
    names = (instruction.name, *scopes) if target in _NAMED_APART else (target,)
    for name in names:
        for start, make in KERNELS.items():
            if name.startswith(start):
                machine.opaque.add(name.partition(".")[0])
                return make(name, instruction, machine)
    raise NotInterpreted(f"the custom call {target}, as {instruction.name}")


OPERATIONS: dict[str, Callable] = {
    "custom-call": _custom_call,
    "topk": _largest,
    **drawing.OPERATIONS,
    **kernels.OPERATIONS,
}
