"""Counts of what ran and what came of it, as a table."""

import collections

from .running import FAILURES


class Tally:
    """What came of the cases so far."""

    def __init__(self):
        self.total = 0
        self.outcomes: collections.Counter = collections.Counter()
        self.steps: collections.Counter = collections.Counter()
        self.refusals: collections.Counter = collections.Counter()
        self.failures: dict[tuple[str, str], list[int]] = {}
        self.ledgers = 0

    def add(self, told: dict) -> bool:
        """Counts one; says whether it is the first failure of its kind."""
        what, rule = told["what"], told.get("rule", "")
        self.total += 1
        self.outcomes[told.get("kind", "?"), what] += 1
        self.ledgers += bool(told.get("ledger"))
        if what == "kept out":
            self.refusals[rule] += 1
        if what not in FAILURES:
            self.steps.update(told["steps"])
            self.steps.update(["derivative, " + told["derivative"], told["run"]])
            return False
        seeds = self.failures.setdefault((what, rule), [])
        seeds.append(told["seed"])
        return len(seeds) == 1

    def __str__(self) -> str:
        columns = [
            w
            for w in ("right", "other moves", "kept out", "unsteady", *FAILURES)
            if any(what == w for _, what in self.outcomes)
        ]
        rows = [("", *columns)]
        for kind in sorted({kind for kind, _ in self.outcomes}):
            rows.append((kind, *(str(self.outcomes[kind, what]) for what in columns)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines += ["", f"ledgers held against compiled programs: {self.ledgers}"]
        lines += ["", "programs with a step of each kind:"]
        lines += [f"{count:7}  {name}" for name, count in self.steps.most_common()]
        lines += ["", "refused, by rule:"]
        lines += [f"{count:7}  {rule}" for rule, count in self.refusals.most_common()]
        for (what, rule), seeds in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            lines.append(f"FAILED {len(seeds)} times: {what} {rule} (seeds {' '.join(map(str, seeds[:8]))})")
        return "\n".join(lines)
