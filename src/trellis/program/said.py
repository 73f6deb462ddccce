"""What a program states about itself in name scopes, because its jaxpr does not say it.

That is a kernel's work and its mask, how often a loop runs, and how much of a buffer is filled:

    with kernel_work("attention", flops=4.0 * batch * heads * pairs * head_dim):
        out = kernel(q, k, v)

The planner reads it, and so does the proof of a compiled program; nothing is computed differently.
"""

import contextlib
import math
import re

import jax

from trellis.program.reading import Operation


def kernel_work(kind: str, flops: float) -> contextlib.AbstractContextManager:
    """The scope of a kernel's call, which says what its forward pass computes on one device.

    Kernels of the backward pass are in the scope, too. An "attention" kernel makes two products in the forward pass. In
    the backward pass it makes three if it gives one gradient, four if it gives two, and five if it gives all of them. A
    kernel of another kind does as much as in the forward pass; if not, the backward function has a scope of its own.

    Args:
        kind: "attention" or "product".
        flops: of the matrix units.
    """
    return jax.named_scope(f"work({kind} {flops:.0f})")


def grouped_work(
    rows: int, inner: int, columns: int, *, groups: int, tile: int, over_rows: bool = False
) -> contextlib.AbstractContextManager:
    """The scope of a kernel for sorted rows, with one matrix for each group of them.

    Args:
        rows: at most; in a buffer (`filled_rows`) those that are filled count.
        inner: columns of the rows.
        columns: of the other operand.
        groups: of rows, each of which takes whole tiles.
        tile: rows of a tile.
        over_rows: whether the product sums over each group's rows, as a gradient by the matrices does.
    """
    form = "gradient" if over_rows else "product"
    return jax.named_scope(f"grouped({form} {rows} rows {inner} {columns} in {groups} groups by {tile})")


def row_work(operations: int) -> contextlib.AbstractContextManager:
    """The scope of a kernel that computes each row of its operands by itself, such as an activation.

    In a buffer (`filled_rows`) it passes over rows that are not filled.

    Args:
        operations: of the vector units for each element of the largest operand, relative to an addition.
    """
    return jax.named_scope(f"rows(by {operations})")


def kernel_mask(before: int, after: int, ahead: int) -> contextlib.AbstractContextManager:
    """The scope of an attention kernel whose mask is a function inside it: says which keys a query sees.

    Args:
        before: how many before its own position.
        after: how many behind it.
        ahead: the position of the first query minus that of the first key.
    """
    return jax.named_scope(f"sees({before} before {after} after {ahead} ahead)")


def kernel_refused(why: str) -> contextlib.AbstractContextManager:
    """The scope of attention that its platform's kernel cannot compute: says why.

    Args:
        why: what the kernel takes, and what it was given; empty if nothing is refused.
    """
    return jax.named_scope(f"refused<{why}>") if why else contextlib.nullcontext()


def filled_rows(even: int, room: int) -> contextlib.AbstractContextManager:
    """The scope of what is done to a buffer of rows: says how many of them an even load fills."""
    return jax.named_scope(f"filled({even} of {room})")


def loop_turns(rows: int, a_turn: int, *, before: int = 0, by_load: bool = False) -> contextlib.AbstractContextManager:
    """The scope of a `while` loop over rows: says how often it runs.

    Args:
        rows: of them; in a buffer (`filled_rows`) those that are filled count.
        a_turn: how many a turn does.
        before: turns that were done before the loop.
        by_load: whether the rows are those of an even load, and come as often as the load assumed says.
    """
    return jax.named_scope(f"turns({rows} rows {a_turn} a turn {before} before{' load' * by_load})")


def interleaved(parts: int) -> contextlib.AbstractContextManager:
    """The scope of an exchange of one of several parts of a batch: while it is on its way, the others compute."""
    return jax.named_scope(f"interleaved(in {parts})")


def laid_out_anew(slower: float) -> contextlib.AbstractContextManager:
    """The scope of an array's mark (`tr.save`): compilers copy the array before it is read.

    Args:
        slower: how much longer the copy takes than its bytes do where they are streamed; 0 where nothing is copied.
    """
    return jax.named_scope(f"anew({slower})") if slower else contextlib.nullcontext()


def held_as(kind: str) -> contextlib.AbstractContextManager:
    """The scope of an array's making, into which loops write: says which kind of memory it is.

    Args:
        kind: one of `trellis.inspect.buffers.KINDS`.
    """
    return jax.named_scope(f"held(as {kind})")


def as_it_lies() -> contextlib.AbstractContextManager:
    """The scope of a transpose that moves nothing: the array is read in the order in which compilers have it."""
    return jax.named_scope("lies()")


_WORK, _FILLED = re.compile(r"work\((\w+) (\d+)\)"), re.compile(r"filled\((\d+) of (\d+)\)")
_GROUPED = re.compile(r"grouped\((product|gradient) (\d+) rows (\d+) (\d+) in (\d+) groups by (\d+)\)")
_ROWS = re.compile(r"rows\(by (\d+)\)")
_TURNS = re.compile(r"turns\((\d+) rows (\d+) a turn (\d+) before( load)?\)")
_INTERLEAVED = re.compile(r"interleaved\(in (\d+)\)")
_REFUSED = re.compile(r"refused<([^<>]+)>")
_HELD = re.compile(r"held\(as ([a-z ]+)\)")
_ANEW = re.compile(r"anew\(([0-9.]+)\)")
_SEES = re.compile(r"sees\((\d+) before (\d+) after (-?\d+) ahead\)")
# Products of an attention kernel in the backward pass, by how many gradients it gives; the forward pass has two.
_GRADIENT_PRODUCTS = {1: 3, 2: 4, 3: 5}


def work_said(operation: Operation) -> tuple[str, float, int] | None:
    """Kind and FLOPs of a kernel: as its author says, or by its own estimate (`pallas_call(cost_estimate=...)`); and,
    of attention, how many keys a query sees, on average."""
    found = _WORK.findall(operation.scope)
    if not found:
        estimate = operation.params.get("cost_estimate")
        return ("kernel", float(estimate.flops), 0) if estimate is not None else None
    kind, flops = found[-1][0], float(found[-1][1])
    if kind != "attention":
        return kind, flops, 0
    keys = round(flops / (4 * operation.operands[0].num_elements))
    if operation.direction == "backward":
        gradients = sum(len(value.shape) >= 3 and bool(value.readers) for value in operation.results)
        flops *= _GRADIENT_PRODUCTS[max(1, min(gradients, 3))] / 2
    return kind, flops, keys


def grouped_said(operation: Operation, load: float) -> tuple[float, tuple[int, int, int], float] | None:
    """FLOPs of a kernel for sorted rows, its sizes (rows, what is summed, columns), and how many rows it reads.

    Args:
        operation: a kernel.
        load: rows of the fullest device, in those of an even load.
    """
    found = _GROUPED.findall(operation.scope)
    if not found:
        return None
    rows, inner, columns, groups, tile = map(int, found[-1][1:])
    filled = rows * share_filled(operation, load)
    # The last tile of each group is half full, on average over all sizes.
    rows = min(round(filled) + groups * tile // 2, rows + groups * tile)
    dims = (rows, inner, columns) if found[-1][0] == "product" else (inner, -(-rows // groups), columns)
    return 2.0 * rows * inner * columns, dims, filled


def row_said(operation: Operation, load: float) -> tuple[int, float] | None:
    """Operations for each element of a kernel that computes rows by themselves, and the share of rows that are there.

    Args:
        operation: a kernel.
        load: rows of the fullest device, in those of an even load.
    """
    found = _ROWS.findall(operation.scope)
    return (int(found[-1]), share_filled(operation, load)) if found else None


def mask_said(op_name: str) -> tuple[int, int, int] | None:
    """What `kernel_mask` was given for a kernel of a compiled program; None if nothing is said.

    >>> mask_said("jit(step)/transpose(jvp(sees(127 before 0 after 256 ahead)))/splash_mha_dq")
    (127, 0, 256)
    """
    found = _SEES.findall(op_name)
    if not found:
        return None
    before, after, ahead = map(int, found[-1])
    return before, after, ahead


def refused_said(operation: Operation) -> str:
    """Why an operation's platform has no kernel for the attention that it is a part of, or nothing.

    Args:
        operation: any.
    """
    found = _REFUSED.findall(operation.scope)
    return found[-1] if found else ""


def share_filled(operation: Operation, load: float) -> float:
    """The share of its buffer's rows that an operation finds filled.

    Args:
        operation: any.
        load: rows of the fullest device, in those of an even load.
    """
    return _filled(operation.scope, load)


def share_sent(scope: str, rows: int, load: float | None) -> float:
    """The share of its operand's rows that a ragged exchange sends, in a program or in a compiled one.

    Args:
        scope: the name scopes that it stands in.
        rows: of its operand; they are all sent unless they are the buffer's of which somebody says how full it is.
        load: rows of the fullest device, in those of an even load; None where nothing is assumed, and all may be sent.

    >>> share_sent("jit(step)/filled(1000 of 1500)/ragged_all_to_all", 1500, 1.0)
    0.6666666666666666
    """
    said = [int(even) for even, room in _FILLED.findall(scope) if int(room) == rows]
    return min(load * said[-1] / rows, 1.0) if said and load is not None else 1.0


def anew_said(operation: Operation) -> float:
    """How much longer a marked array takes to be laid out anew than to be streamed; 0 if it stays as it is."""
    found = _ANEW.findall(operation.scope) if operation.mark else ()
    return float(found[-1]) if found else 0.0


def held_said(operation: Operation) -> str:
    """The kind of memory that the array is which an operation makes, or nothing.

    Args:
        operation: any.
    """
    found = _HELD.findall(operation.scope)
    return found[-1] if found else ""


def lies_so(operation: Operation) -> bool:
    """Whether an operation is a transpose that moves nothing."""
    return operation.name == "transpose" and "lies()" in operation.scope


def parts_said(scope: str) -> int:
    """How many parts of a batch run side by side, if an operation is in one of them; 1 if nothing is said.

    >>> parts_said("jit(step)/interleaved(in 2)/all_to_all"), parts_said("jit(step)/all_to_all")
    (2, 1)
    """
    return max(map(int, _INTERLEAVED.findall(scope)), default=1)


def turns_said(loop: Operation, load: float) -> int:
    """How often a `while` loop runs; once if nothing is said.

    Args:
        loop: the loop.
        load: rows of the fullest device, in those of an even load.
    """
    turns = _turns(loop.own_scope, loop.scope, load)
    return 1 if turns is None else turns


def turns_in(op_name: str, load: float) -> int | None:
    """The same for a loop of a compiled program, whose scopes are in its name; None if nothing is said.

    >>> turns_in("jit(step)/while/body/turns(1000 rows 300 a turn 1 before load)/while", 1.0)
    3
    """
    return _turns(op_name.rpartition("/body/")[2], op_name, load)


def _filled(scope: str, load: float) -> float:
    found = _FILLED.findall(scope)
    if not found:
        return 1.0
    even, room = map(int, found[-1])
    return min(load * even / room, 1.0)


def _turns(own: str, scope: str, load: float) -> int | None:
    """How often a loop runs, by what its own scope says and the scopes around it."""
    found = _TURNS.findall(own)
    if not found:
        return None
    rows, a_turn, before = map(int, found[-1][:3])
    rows = rows * (load if found[-1][3] else _filled(scope, load))
    return max(math.ceil(rows / a_turn) - before, 0)
