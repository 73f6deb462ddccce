"""What a turn of a loop over layers waits for, on TPUs, where weights are gathered beside computation.

A compiler has only one turn to order: it gathers a turn's weights when the turn begins, in the order in which they are
read, and sums gradients as soon as they are made; the next turn begins when all have come. So what is read early is
waited for, and so is what is made late, as far as nothing of the same turn is left to compute.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trellis.program import Body, Operation


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """A loop whose body computes.

    Attributes:
        first, last: the numbers of the first and the last operation of its body.
        times: how often a turn runs in a step.
    """

    first: int
    last: int
    times: int

    def __contains__(self, number: int) -> bool:
        return self.first <= number <= self.last


def turns_of(body: Body) -> Iterator[Turns]:
    """The scans of a program that have turns, those within others first."""
    for operation in body.operations:
        for inner in operation.bodies:
            yield from turns_of(inner)
        if operation.name == "scan" and operation.bodies[0].operations and operation.times * operation.params["length"]:
            yield _turns(operation)


def _turns(scan: Operation) -> Turns:
    (body,) = scan.bodies
    first = min(operation.number for operation in body.walk())
    times = scan.times * scan.params["length"] // scan.params["unroll"]
    return Turns(first, body.frame.last, max(times, scan.times))  # a turn may hold more than there is


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """A collective of one turn that may run beside computation.

    Attributes:
        key: tells it apart.
        seconds: what it takes by itself.
        made, read: the numbers of the operations that make what it moves, and read it first.
        is_gathered: whether it can begin with the turn, and something waits for it; else the next turn does.
    """

    key: int
    seconds: float
    made: int
    read: int
    is_gathered: bool


def waits(computed: Iterable[tuple[int, float]], sent: Sequence[Sent]) -> Mapping[int, float]:
    """Seconds that one turn waits for each of its collectives.

    >>> gather = Sent(0, 3.0, made=-1, read=2, is_gathered=True)
    >>> dict(waits([(1, 2.0), (2, 5.0)], [gather]))  # read after two seconds
    {0: 1.0}

    Args:
        computed: numbers of operations, and the seconds that they take, with what else nothing runs beside.
        sent: what may run beside them.
    """
    gathers = sorted((each for each in sent if each.is_gathered), key=lambda each: each.read)
    sums = sorted((each for each in sent if not each.is_gathered), key=lambda each: each.made)
    waited: dict[int, float] = collections.defaultdict(float)
    when = itertools.accumulate(each.seconds for each in gathers)  # each has come: one after the other
    come = collections.deque(zip(gathers, when))
    links, clock, ends = sum(each.seconds for each in gathers), 0.0, []
    for number, seconds in (*sorted(computed), (float("inf"), 0.0)):
        while come and come[0][0].read <= number:
            each, there = come.popleft()
            waited[each.key] += max(there - clock, 0.0)
            clock = max(there, clock)
        clock += seconds
        while sums and sums[0].made <= number:
            links = max(links, clock) + sums[0].seconds
            ends.append(sums.pop(0))
    late, whole = max(links - clock, 0.0), sum(each.seconds for each in ends)
    for each in ends:
        waited[each.key] += late * each.seconds / whole if whole else 0.0
    return waited
