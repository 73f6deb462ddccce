"""The ledger: every communication of a function, read off its types, without compiling.

The function is traced and read with its loops multiplied out. In explicit mode each value carries its placement in its
type, so that a communication is an operation whose result does not lie where its operands put it: a `reshard`, a
product or a sum over a sharded dimension whose result is not a pending sum. In manual mode (`shard_map`) the
collectives are operations themselves. What the types do not decide is left to the compiler, and the row says so.
"""

import dataclasses
from collections.abc import Callable, Iterator

from trellis.inspect.apart import made_at, read_at
from trellis.inspect.moved import Moved
from trellis.inspect.rows import EACH_TURN, Ledger, Row
from trellis.named.refusals import jaxs_in_our_words
from trellis.notation.typeof import short_dtype
from trellis.program import Body, Operation, Program, refuse_wrong, trace
from trellis.program.flow import Parameters, added_at, awaited, constants, is_gathered, repeats, roles
from trellis.program.manual import COLLECTIVES, moves, text_of, words
from trellis.program.moves import Move
from trellis.program.rules import Implied
from trellis.program.said import parts_said, share_sent, turns_said
from trellis.program.scopes import names_behind, names_of, turns_written_out
from trellis.program.sizes import local_shape, tiles_filled


def ledger(fn: Callable, *args, **kwargs) -> Ledger:
    """Lists every communication of a call of a function: forward, recomputed and backward.

    Nothing is compiled and nothing runs. Give it a gradient or a whole train step to see all three.

    Args:
        fn: any function of JAX, jitted or not. Arguments that are on no mesh are placed as `named_jit` places them,
            if it made the function; else they count as whole.
        *args, **kwargs: its arguments: arrays, named arrays, trees of them, or `jax.ShapeDtypeStruct`s with
            shardings. Leaves that are not arrays are passed as they are.

    Returns:
        The rows in program order. `print` it for a table. Over mesh axes in auto mode, which `Ledger.auto` names, types
        say nothing: what `shard_map` does is known, and other rows are estimates, by where the arguments lie and what
        sharding constraints say.

    Raises:
        PendingSumError: a sum that is settled in a loop is made pending again there, which compilers get wrong.
        UserError: a gradient of windows over slices that compilers get wrong, too.
        MeshError, TypeMismatch: JAX's types refuse what the function does with plain arrays in slices, or a rule for
            derivatives.
    """
    with jaxs_in_our_words(getattr(fn, "__name__", "the function"), "ledger"):
        program = trace(fn, *args, **kwargs)
    return ledger_of(program)


def ledger_of(
    program: Program, load: float | None = None, *, refuse: bool = True, moved: Moved | None = None
) -> Ledger:
    """The ledger of a program that was traced before.

    Args:
        program: from `trace`.
        load: rows that experts on the fullest device get, in those of an even load: loops over them count as often as
            they run then. Without it each `while` loop counts by one turn.
        refuse: whether to refuse what compilers get wrong.
        moved: what its operations move, if that is read elsewhere, too.

    Raises:
        PendingSumError: a sum that is settled in a loop is made pending again there.
        UserError: a gradient of windows over slices that compilers get wrong.
    """
    sizes = {name: size for name, size in program.mesh.items() if size > 1}
    if not sizes:  # one device: nothing moves
        return Ledger((), sizes, program.auto)
    reader = _Rows(program, load, moved or Moved(program))
    rows = reader.of(program)
    if refuse:
        refuse_wrong(program)
    return Ledger(tuple(rows), sizes, program.auto, tuple(reader.instead))


_REDUCTIONS = {"pmax": "maximum", "reduce_max": "maximum", "pmin": "minimum", "reduce_min": "minimum"}


class _Rows:
    """The rows of a program's bodies."""

    def __init__(self, program: Program, load: float | None, moved: Moved):
        self.sizes, self.implied, self.roles, self.load = program.mesh, moved, roles(program), load
        self.parameters, self.repeats, self.constants = Parameters(program), repeats(program), constants(program)
        self.awaited = awaited(program)
        self.instead: list[Row] = []

    def of(self, body: Body) -> list[Row]:
        rows = [row for operation in body.operations for row in self.operation(operation)]
        made = [(value, value.maker) for value in body.results if value.maker is not None]
        return rows + [
            self.row(one.move, one.aval, _words(one, maker), maker, one.note)
            for value, maker in made
            for one in self.implied.states.settled(value)
        ]

    def operation(self, operation: Operation) -> Iterator[Row]:
        inside = [self.of(body) for body in operation.bodies]
        if operation.name == "while":
            rows = [*self.condition(operation, inside[0]), *inside[1]]
            if self.load is None:
                yield from (_noted(row, EACH_TURN) for row in rows)
            elif turns := turns_said(operation, self.load):
                yield from (dataclasses.replace(row, times=row.times * turns) for row in rows)
        elif operation.name == "cond":
            largest = max(inside, key=lambda rows: sum(row.total for row in rows))
            self.instead += (row for rows in inside if rows is not largest for row in rows)
            yield from (_noted(row, f"the largest of {len(inside)} branches") for row in largest)
        elif inside:
            yield from inside[0]
        else:
            yield from self.moved(operation)

    def condition(self, loop: Operation, rows: list[Row]) -> list[Row]:
        """What the condition of a `while` loop moves. If it is one for each example, as a map makes it, JAX computes it
        in the body, too, to keep the examples that are done as they are."""
        if not loop.bodies[0].results[0].shape:
            return rows
        told = [self.row(one.move, one.aval, "", loop, "") for one in self.implied.states.ends(loop)]
        return [*rows, *told, *rows]

    def moved(self, operation: Operation) -> Iterator[Row]:
        """What an operation with no others inside moves; by hand, each as written, but no empty arrays."""
        if operation.name not in COLLECTIVES:
            for implied in self.implied.by(operation):
                yield self.row(implied.move, implied.aval, _words(implied, operation), operation, implied.note)
            return
        twin = self.implied.states.again(operation)
        for move, before, after, note in [] if self.implied.of_zeros(operation) else moves(operation, self.sizes):
            if move.payload:
                what = text_of(operation.scope, before) or f"{words(before)} -> {words(after)}"
                yield dataclasses.replace(self.row(move, before.aval, what, operation, note), twin=twin)

    def row(self, move: Move, aval, what: str, operation: Operation, note: str) -> Row:
        ragged = operation.name == "ragged_all_to_all"
        sent = share_sent(operation.scope, aval.shape[0], self.load) if ragged else 1.0
        return Row(
            kind=move.kind,
            axes=move.axes,
            what=what,
            dtype=short_dtype(aval.dtype),
            payload=round(move.payload * sent),
            wire=round(move.wire * sent),
            times=operation.times,
            direction="forward" if operation.direction == "update" else operation.direction,
            source=operation.source,
            note=note,
            role=self.roles[operation],
            ring="ring[" in operation.scope,
            parts=parts_said(operation.scope),
            down=_down(operation),
            parameter=self.parameters.moved_by(operation, self.roles[operation]),
            reduction=_REDUCTIONS.get(operation.name, "sum"),
            same=self.repeats[operation],
            constant=self.constants.issuperset(operation.results),
            tiles=tiles_filled(local_shape(aval)),
            turns=turns_written_out(operation.scope),
            added=added_at(operation),
            gathered=move.kind == "all-reduce" and is_gathered(operation, move.axes),
            number=operation.number,
            made=made_at(operation),
            read=read_at(operation),
            awaited=operation in self.awaited,
        )


def _down(operation: Operation) -> bool:
    """Whether most devices of a permute send to one before them."""
    steps = operation.params["perm"] if operation.name == "ppermute" else ()
    return 2 * sum(to < source for source, to in steps) > len(steps)


def _words(implied: Implied, operation: Operation) -> str:
    """A transition in the notation, with the names that the operation's scope has."""
    shape, scope = implied.aval.shape, operation.scope
    names = names_of(scope, len(shape)) or names_behind(scope, implied.before.axes) or ()
    names = (*map(str, shape[: len(shape) - len(names)]), *names)  # what was mapped over comes first, by its size
    before, after = implied.before, implied.after
    if len(before.axes) != len(names) or len(after.axes) != len(names):
        return " ".join(names)
    return f"{before.words(names)} -> {after.words(names)}"


def _noted(row: Row, note: str) -> Row:
    return dataclasses.replace(row, note=f"{row.note}; {note}" if row.note else note)
