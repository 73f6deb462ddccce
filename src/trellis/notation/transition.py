"""What a transition does: the collectives, in order, that lead from one sharding to another."""

import dataclasses
import typing

from trellis.notation.shape import Dim, Shape

Kind = typing.Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute", "slice", "cast"]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One collective, or one step that moves nothing (slice, cast).

    Attributes:
        kind: what it is. "permute" only reorders slices between devices, as in `a/x/y -> a/y/x`.
        axes: the mesh axes it runs over, major to minor.
        dim: the dimension (its index) that it gathers, scatters, slices or
            reorders; for an all-to-all the one that becomes whole; None for an
            all-reduce and a cast.
        before: the type before this step.
        after: the type after it.
        to: all-to-all: the dimension that becomes sliced.
    """

    kind: Kind
    axes: tuple[str, ...]
    dim: int | None
    before: Shape
    after: Shape
    to: int | None = None


def kind_of(before: Shape, after: Shape) -> list[tuple[Kind, tuple[str, ...], str | int | None]]:
    """The collectives of a transition: kind, mesh axes, and the name of the dimension (or None).

    Mesh axes of size 1 move nothing; take them out first if the mesh is known.

    >>> from trellis.notation import parse_transition
    >>> kind_of(*parse_transition("embed/data/model mlp -> embed mlp ~data ~model"))
    [('all-gather', ('data', 'model'), 'embed')]
    >>> kind_of(*parse_transition("batch/data pos embed +model -> batch/data pos/model embed"))
    [('reduce-scatter', ('model',), 'pos')]
    >>> kind_of(*parse_transition("a b +x -> a b ~x"))
    [('all-reduce', ('x',), None), ('cast', ('x',), None)]
    """
    names = before.names
    return [(s.kind, s.axes, None if s.dim is None else names[s.dim]) for s in plan(before, after)]


def plan(before: Shape, after: Shape) -> list[Step]:
    """The steps of a transition between two shapes of the same dimensions.

    Sums settle first, then slices are taken, then slices are exchanged, and gathers come last, so each step runs on as
    little data as it can. The axes that slice a dimension form a stack, the minor one last: a gather takes the last
    axes off, a scatter puts one on. If the order is then not the one asked for, a permute follows.
    """
    return _Planner(before, after).run()


class _Planner:
    def __init__(self, before: Shape, after: Shape):
        self.names = before.names
        self.ellipsis = before.ellipsis
        self.stacks = [list(dim.axes) for dim in before.dims]
        self.goal = [list(dim.axes) for dim in after.dims]
        self.pending, self.copied = list(before.pending), list(before.copied)
        self.want_pending, self.want_copied = set(after.pending), set(after.copied)
        self.steps: list[Step] = []

    def shape(self) -> Shape:
        dims = tuple(Dim(name, tuple(axes)) for name, axes in zip(self.names, self.stacks, strict=True))
        return Shape(dims, tuple(sorted(self.pending)), tuple(sorted(self.copied)), self.ellipsis)

    def step(self, kind: Kind, axes, dim: int | None, change, to: int | None = None) -> None:
        before = self.shape()
        change()
        self.steps.append(Step(kind, tuple(axes), dim, before, self.shape(), to))

    def run(self) -> list[Step]:
        for i in range(len(self.stacks)):
            self.bring_leaving_last(i)
        while self.scatter() or self.reduce() or self.slice() or self.exchange() or self.gather() or self.force():
            pass
        for i, goal in enumerate(self.goal):
            if self.stacks[i] != goal and sorted(self.stacks[i]) == sorted(goal):
                self.permute(i, goal)
        self.cast()
        return self.steps

    def target(self, axis: str) -> int | None:
        """The dimension that the axis slices in the end."""
        return next((i for i, goal in enumerate(self.goal) if axis in goal), None)

    def leaving(self, i: int) -> list[str]:
        return [axis for axis in self.stacks[i] if axis not in self.goal[i]]

    def permute(self, i: int, order: list[str]) -> None:
        first = next(k for k, (a, b) in enumerate(zip(self.stacks[i], order, strict=True)) if a != b)
        self.step("permute", order[first:], i, lambda: self.stacks.__setitem__(i, list(order)))

    def bring_leaving_last(self, i: int) -> None:
        leaving = self.leaving(i)
        kept = [axis for axis in self.goal[i] if axis in self.stacks[i]]
        # Axes that stay must be the major ones, in their final order, or gathers would leave holes.
        if self.stacks[i][: len(kept)] != kept:
            self.permute(i, kept + leaving)

    def arrivals(self, i: int, source) -> list[str]:
        """The next axes that arrive at a dimension, while they come from `source`."""
        run: list[str] = []
        if self.leaving(i):
            return run
        for axis in self.goal[i]:
            if axis in self.stacks[i]:
                continue
            if axis not in source:
                break
            run.append(axis)
        return run

    def scatter(self) -> bool:
        for i in range(len(self.stacks)):
            if run := self.arrivals(i, self.pending):

                def change(i=i, run=run):
                    self.pending = [a for a in self.pending if a not in run]
                    self.stacks[i] += run

                self.step("reduce-scatter", run, i, change)
                return True
        return False

    def reduce(self) -> bool:
        run = [a for a in self.pending if a not in self.want_pending and self.target(a) is None]
        if run:

            def change():
                self.pending = [a for a in self.pending if a not in run]

            self.step("all-reduce", run, None, change)
        return bool(run)

    def replicated(self) -> list[str]:
        held = {a for axes in self.stacks for a in axes} | set(self.pending)
        return [a for goal in self.goal for a in goal if a not in held]

    def slice(self) -> bool:
        free = self.replicated()
        for i in range(len(self.stacks)):
            if run := self.arrivals(i, free):
                # A copied axis and a replicated one have different gradients: one step each.
                run = [a for a in run if (a in self.copied) == (run[0] in self.copied)]

                def change(i=i, run=run):
                    self.stacks[i] += run
                    self.copied = [a for a in self.copied if a not in run]

                self.step("slice", run, i, change)
                return True
        return False

    def exchange(self) -> bool:
        for i, stack in enumerate(self.stacks):
            for start in range(len(stack)):
                run = stack[start:]
                to = self.target(run[0])
                # The longest run of last axes that another dimension takes next, in this order.
                if to is not None and to != i and self.arrivals(to, run) == run:

                    def change(i=i, to=to, run=run):
                        self.stacks[i] = [a for a in self.stacks[i] if a not in run]
                        self.stacks[to] += run

                    self.step("all-to-all", run, i, change, to)
                    return True
        return False

    def gather(self) -> bool:
        for i, stack in enumerate(self.stacks):
            run: list[str] = []
            for axis in reversed(stack):
                if axis in self.goal[i] or self.target(axis) is not None or axis in self.want_pending:
                    break
                if run and (axis in self.want_copied) != (run[0] in self.want_copied):
                    break
                run.insert(0, axis)
            if run:

                def change(i=i, run=run):
                    self.stacks[i] = [a for a in self.stacks[i] if a not in run]
                    self.copied += [a for a in run if a in self.want_copied]

                self.step("all-gather", run, i, change)
                return True
        return False

    def force(self) -> bool:
        """When nothing is ready: dimensions wait for each other's axes, or a leaving axis is not the last of its stack.

        The last axis of a stack is exchanged out of turn (a permute follows at the end). Only if no last axis can go
        anywhere is a leaving axis made the last. So each call leaves fewer axes to go, or the next one does.
        """
        for i, stack in enumerate(self.stacks):
            to = self.target(stack[-1]) if stack else None
            if to is not None and to != i:

                def change(i=i, to=to, axis=stack[-1]):
                    self.stacks[i].remove(axis)
                    self.stacks[to].append(axis)

                self.step("all-to-all", [stack[-1]], i, change, to)
                return True
        for i, stack in enumerate(self.stacks):
            for axis in self.leaving(i):
                # A sliced axis that ends as a pending sum stays until cast().
                if self.target(axis) is not None or axis not in self.want_pending:
                    self.permute(i, [a for a in stack if a != axis] + [axis])
                    return True
        return False

    def cast(self) -> None:
        """Does what moves nothing: to `~x`, and the steps that only gradients take (to `+x`, away from `~x`)."""
        axes = sorted(
            (set(self.copied) ^ self.want_copied)
            | (self.want_pending - set(self.pending))
            | {a for i in range(len(self.stacks)) for a in self.leaving(i)}
        )
        if axes:

            def change():
                self.stacks = [list(goal) for goal in self.goal]
                self.copied, self.pending = list(self.want_copied), list(self.want_pending)

            self.step("cast", axes, None, change)
