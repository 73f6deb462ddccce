"""Checks and measures Trellis on one accelerator, without anybody beside it, in half an hour.

    python benchmarks/accelerator.py                     # on the machine: checks, then rows in the order of worth
    python benchmarks/accelerator.py --minutes 9         # the same, in parts: the same command goes on
    python benchmarks/accelerator.py --toy               # a rehearsal on a CPU, at toy sizes

First come checks: attention, the loss, grouped products and train steps against the CPU of the same machine, whether
steps repeat to the bit, and the compiled step against the ledger. Then rows: steps with the settings that the planner's
search finds for the device (1B and 8B), the recipes, layers of mixtures and the explicit trainer as they are, PyTorch's
step of the same model where torch is installed, attention, the loss and grouped products alone, other compiler
options. Each row is a process of its own with a limit of time: what runs out of memory or hangs loses that row only,
and says so in a line. A row is saved when it ends, as a line of `rows.jsonl` in the folder; what is saved is not done
again (`--again NAME` does, `--failed` what failed). `table.txt` has all of it beside published figures. Nothing is
downloaded.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "accelerator_rows"))

from process import LEFT_OUT  # noqa: E402
from rows import Row, all_rows  # noqa: E402

# With less than this left no row is begun.
LEAST = 20.0


class Rows:
    """The rows that were saved, in `rows.jsonl`.

    Args:
        folder: of the file.
    """

    def __init__(self, folder: Path):
        self.path = folder / "rows.jsonl"
        self.lines: list[dict] = []
        if self.path.exists():
            for text in self.path.read_text().splitlines():
                try:
                    self.lines.append(json.loads(text))
                except ValueError:  # cut off while it was written: that row is not there
                    continue
            self._write()

    def add(self, line: dict) -> None:
        """Saves a row, in place of an earlier one of its name."""
        self.lines = [kept for kept in self.lines if kept["row"] != line["row"]] + [line]
        self._write()

    def _write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        part.replace(self.path)


class Stopped(Exception):
    """A signal came."""


def perform(row: Row, folder: Path, limit: float, options: list[str], device: str) -> dict:
    """Does a row in a process of its own.

    Args:
        row: which.
        folder: where everything goes.
        limit: seconds after which the process is ended.
        options: for the process.
        device: what the machine's device is called, as far as that is known.

    Returns:
        The line to save: `row`, `outcome` ("done", "failed", "left out" or "too long"), `why`, `seconds`, `values`,
        `device`.
    """
    stem = row.name.replace(",", "").replace(" ", "-")
    out, log = folder / "working" / f"{stem}.json", folder / "logs" / f"{stem}.txt"
    for path in (out, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "accelerator_rows" / "work.py"), str(folder), row.name, str(out), *options]
    started, outcome, why = time.time(), "done", ""
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if code := process.wait(limit):
                outcome = "left out" if code == LEFT_OUT else "failed"
                why = reason(log.read_text(errors="replace"), code)
        except subprocess.TimeoutExpired:
            outcome, why = "too long", f"ended after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    values = json.loads(out.read_text()) if out.exists() else {}
    device = values.get("device", device)
    return {"row": row.name, "outcome": outcome, "why": why, "seconds": round(time.time() - started, 1),
            "at": round(started), "device": device, "values": values}  # fmt: skip


def reason(log: str, code: int) -> str:
    """One line about a process that failed, from what it wrote.

    >>> reason("Traceback ...\\nValueError: no such shape\\n", 1)
    'ValueError: no such shape'
    >>> reason("", -9)
    'ended by signal 9'
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    short = next((line for line in lines if "RESOURCE_EXHAUSTED" in line or "OutOfMemoryError" in line), None)
    if short:
        return f"out of memory: {short:.200}"
    if code < 0:
        return f"ended by signal {-code}"
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    return f"{(errors or lines or [f'exit code {code}'])[-1]:.300}"


class Told:
    """What is printed is kept in `told.txt`, too, and goes on being kept once nobody reads it any more.

    Args:
        folder: of the file.
    """

    def __init__(self, folder: Path):
        self.path = folder / "told.txt"

    def __call__(self, text: str) -> None:
        with open(self.path, "a") as file:
            file.write(text + "\n")
        with contextlib.suppress(OSError):  # the terminal is gone
            print(text, flush=True)


def go_through(rows: list[Row], saved: Rows, args: argparse.Namespace, folder: Path, tell: Told) -> None:
    """Does the rows that are not done yet, as far as the time goes.

    Raises:
        SystemExit: there is no accelerator.
    """
    until = time.time() + 60 * args.minutes
    options = [*["--toy"] * args.toy, *(["--on", args.on] if args.on else [])]
    for count, row in enumerate(rows, 1):
        known = {line["row"]: line for line in saved.lines}
        before, where = known.get(row.name), f"[{count}/{len(rows)}] {row.name}"
        kept = before and row.name not in args.again and not (args.failed and before["outcome"] != "done")
        if kept or (args.only and row.name not in args.only):
            continue
        left = until - time.time()
        if left < LEAST:
            tell(f"the time is over before `{row.name}`; the same command goes on")
            return
        tell(f"{where} ...")
        limit = min(row.limit, left)
        line = perform(row, folder, limit, options, known.get("machine", {}).get("device", ""))
        if row.name == "machine" and line["outcome"] == "left out":
            tell(line["why"])
            raise SystemExit(2)
        if line["outcome"] == "too long" and limit < row.limit:
            tell(f"the time is over in `{row.name}`; the same command goes on")
            return
        saved.add(line)
        ended = (
            line["values"].get("said", "") if line["outcome"] == "done" else f"{line['outcome'].upper()}: {line['why']}"
        )
        tell(f"{where}: {ended} ({line['seconds']:.0f} s)")


def main() -> int:
    """Does what is not done yet, as far as the time goes, and writes the table; 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of the rows; benchmarks/results/accelerator if not given")
    parser.add_argument("--minutes", type=float, default=30.0, help="for this start; a row that does not fit waits")
    parser.add_argument("--on", help="what is planned for, as `trellis plan` has it; the device here if not given")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="these rows, in the table's spelling")
    parser.add_argument("--again", nargs="+", metavar="NAME", default=[], help="these, although they are saved")
    parser.add_argument("--failed", action="store_true", help="those that failed, too")
    parser.add_argument("--toy", action="store_true", help="at toy sizes, on a CPU")
    args = parser.parse_args()
    folder = (args.folder or HERE / "results" / ("accelerator_toy" if args.toy else "accelerator")).resolve()
    args.on = args.on or ("1xH200" if args.toy else None)
    rows = all_rows(args.toy, args.on)
    if unknown := {*args.only, *args.again} - {row.name for row in rows}:
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are: {'; '.join(row.name for row in rows)}")
    folder.mkdir(parents=True, exist_ok=True)
    saved, tell = Rows(folder), Told(folder)
    if args.toy:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # whoever started it may leave
    try:
        go_through(rows, saved, args, folder, tell)
    except Stopped:
        tell("stopped; the same command goes on")
        return 130
    finally:
        shutil.rmtree(folder / "working", ignore_errors=True)
    from table import table

    text = table(saved.lines)
    (folder / "table.txt").write_text(text)
    tell("\n" + text)
    return int(any(line["row"].startswith("check") and line["outcome"] != "done" for line in saved.lines))


def _stop(number: int, frame: object) -> None:
    raise Stopped


if __name__ == "__main__":
    sys.exit(main())
