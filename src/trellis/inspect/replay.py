"""How long a compiled program waits for its collectives: its schedule, replayed in the order in which it runs.

A compiled program's text has its instructions in the order that the compiler scheduled. An asynchronous collective
begins where that order has its start, and is waited for where the order has its end, if it takes longer than what lies
between. So one whose end follows its start at once hides nothing, and one beside work that is shorter than itself is
hidden in part. Those that need the same links share them, or come one after the other if one stream of work sends them.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping

from trellis.inspect.collective import KINDS
from trellis.inspect.hlo import Instruction, Program

# Instructions that run other computations, whose instructions are replayed.
LOOPS = ("while", "conditional", "call", "call-start", "async-start")


@dataclasses.dataclass(frozen=True, slots=True)
class Sending:
    """What a collective needs.

    Attributes:
        seconds: how long one run of it takes.
        links: what it needs for that, by any names.
        in_order: whether it comes after all that were started before it and need the same; otherwise each of them has
            its share of a link.
    """

    seconds: float
    links: tuple[Hashable, ...]
    in_order: bool = False


@dataclasses.dataclass(frozen=True)
class Replay:
    """A run of a compiled program on one device.

    Attributes:
        computing: seconds of everything but collectives.
        waits: for each collective, by the name of its instruction, seconds that the device waits for it and does
            nothing else.
    """

    computing: float
    waits: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """From the start of the program to its end."""
        return self.computing + sum(self.waits.values())


def replay(
    program: Program,
    computing: Callable[[Instruction], float],
    sending: Mapping[str, Sending],
    load: float | None = None,
) -> Replay:
    """Replays a compiled program.

    Args:
        program: the program.
        computing: seconds that one run of an instruction computes; not asked of loops, branches and calls, whose
            computations are replayed.
        sending: what collectives need, by the names of their instructions (`Collective.name`).
        load: as in `Program.walk`.
    """
    return _Replaying(program, computing, sending, load).run(program.entry)


class _Wires:
    """Collectives under way, and how long each of them still takes by itself."""

    def __init__(self, sending: Mapping[str, Sending]):
        self.sending = sending
        self.now = 0.0
        self.left: dict[str, float] = {}

    def start(self, collective: str, now: float) -> None:
        """Starts one."""
        self._until(now)
        self.left[collective] = self.sending[collective].seconds

    def end(self, collective: str, now: float) -> float:
        """When one that is waited for from now on arrives."""
        self._until(now)
        while collective in self.left:
            self._step(float("inf"))
        return max(now, self.now)

    def _until(self, now: float) -> None:
        while self.left and self.now < now:
            self._step(now)
        self.now = max(self.now, now)

    def _step(self, most: float) -> None:
        """Goes on to when the next one arrives, or to a time before that."""
        speeds = self._speeds()
        takes, first = min((left / speeds[name], name) for name, left in self.left.items() if speeds[name])
        step = min(takes, most - self.now)
        self.now += step
        for name, speed in speeds.items():
            self.left[name] -= step * speed
        if step == takes:
            del self.left[first]

    def _speeds(self) -> dict[str, float]:
        users = collections.Counter(link for name in self.left for link in self.sending[name].links)
        taken: set[Hashable] = set()
        speeds = {}
        for name in self.left:
            need = self.sending[name]
            if need.in_order:
                speeds[name] = 0.0 if taken & {*need.links} else 1.0
            else:
                speeds[name] = 1.0 / max((users[link] for link in need.links), default=1)
            taken |= {*need.links}
        return speeds


class _Replaying:
    """One replay; a computation that is called from several places is replayed once."""

    def __init__(self, program, computing, sending, load):
        self.program: Program = program
        self.computing: Callable[[Instruction], float] = computing
        self.sending: Mapping[str, Sending] = sending
        self.load: float | None = load
        self.done: dict[str, Replay] = {}

    def run(self, name: str) -> Replay:
        if name not in self.done:
            self.done[name] = self._run(name)
        return self.done[name]

    def _run(self, name: str) -> Replay:
        now = computed = 0.0
        waits: dict[str, float] = collections.defaultdict(float)
        wires = _Wires(self.sending)
        under_way: dict[str, list[str]] = {}  # collectives by what starts them
        instructions = self.program.computations[name]
        for instruction in instructions:
            sent, starts, ends = self._collective(instruction)
            awaited = [each for start in ends for each in under_way.pop(start, ())]
            for collective in sent:
                wires.start(collective, now)
                (under_way.setdefault(starts, []) if starts else awaited).append(collective)
            if instruction.op in LOOPS and not sent:
                for called, runs in self.program.calls(instruction, self.load):
                    inner, times = self.run(called), float(runs)
                    now, computed = now + inner.seconds * times, computed + inner.computing * times
                    for collective, seconds in inner.waits.items():
                        waits[collective] += seconds * times
            else:
                seconds = self.computing(instruction)
                now, computed = now + seconds, computed + seconds
            if instruction is instructions[-1]:
                awaited += [each for started in under_way.values() for each in started]
            for collective in awaited:
                there = wires.end(collective, now)
                waits[collective] += there - now
                now = there
        return Replay(computed, dict(waits))

    def _collective(self, instruction: Instruction) -> tuple[list[str], str, tuple[str, ...]]:
        """The collectives that an instruction sends, what it starts if they go on after it, and what it ends.

        A TPU's asynchronous collective fusion is one start and one end with the same channel, whatever is computed in
        the fusions between; other pairs name their start.
        """
        if instruction.op == "fusion":
            inside = [*self.program.inside(instruction)]
            channels = tuple(c for i in inside if i.op in KINDS and (c := i.attribute("channel_id")))
            if any("AsyncCollectiveDone" in i.attributes for i in inside):
                return [], "", channels
            sent = [i.name for i in inside if i.name in self.sending]
            begins = sent and any("AsyncCollectiveStart" in i.attributes for i in inside)
            return sent, channels[0] if begins else "", ()
        if instruction.op.endswith("-done"):
            return [], "", instruction.operands[:1]
        sent = [instruction.name] if instruction.name in self.sending else []
        if instruction.op in ("call-start", "async-start"):
            sent = [i.name for i in self.program.inside(instruction) if i.name in self.sending]
        return sent, instruction.name if instruction.op.endswith("-start") else "", ()
