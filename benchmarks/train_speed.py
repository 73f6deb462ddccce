"""Training speed on a CPU, side by side: Trellis, plain JAX, transformers on torch, nanoGPT, Levanter.

    python benchmarks/train_speed.py [--shape nano small-llama] [--dtype float32 bfloat16] [--rounds 8]
        [--nanogpt FOLDER] [--levanter-python PATH] [--out benchmarks/results/train_speed_PROCESSOR.json]

Every contestant is a process of its own, started as its users start it, with the same shape, batch and kind of
optimizer (AdamW, clipping). They train in turn, a few steps each a round, so whatever else the machine does hits
all alike; a step is a batch in, the loss out and the parameters ready. The table gives the median of the quieter half
of the rounds, the ratio to plain JAX, seconds from the start of the process to the end of its first step, seconds for
imports, and the peak of its memory. Trellis takes its step from `trellis.train.assemble` on one device a core, in a
process set up as `trellis train` sets itself up. nanoGPT is not installable: give the folder of a clone. Levanter needs
other versions of JAX than Trellis does: give the Python of an environment that has it (`pip install marin-levanter`).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CONTESTANTS = {
    "plain": ("nano", "small-llama"),
    "trellis": ("nano", "small-llama"),
    "transformers": ("small-llama",),
    "nanogpt": ("nano",),
    "levanter": ("small-llama",),
}


class Contestant:
    """One process that trains a few steps when told to."""

    def __init__(self, who: str, shape: str, dtype: str, elsewhere: dict[str, str], cache: str):
        self.who = who
        environment = os.environ | ({"NANOGPT": elsewhere["nanogpt"]} if "nanogpt" in elsewhere else {})
        if who == "trellis":
            environment["JAX_COMPILATION_CACHE_DIR"] = cache
        self.started = time.perf_counter()
        python = elsewhere[who] if who == "levanter" else sys.executable
        command = [python, str(HERE / "workers" / f"with_{who}.py"), shape, dtype]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first = self.read()
        self.first_step = time.perf_counter() - self.started
        self.cold = self.first_step
        self.seconds: list[float] = []

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.who} ended with code {self.process.wait()}: see its message above")
        return json.loads(line)

    def turn(self) -> None:
        self.process.stdin.write("train\n")
        self.process.stdin.flush()
        self.seconds.append(self.read()["seconds"])

    def finish(self) -> dict:
        self.process.stdin.close()
        end = self.read()
        self.process.wait()
        quiet = sorted(self.seconds)[: (len(self.seconds) + 1) // 2]
        return {
            "who": self.who,
            "milliseconds": round(1e3 * statistics.median(quiet), 1) if quiet else None,
            "first_step_seconds": round(self.first_step, 1),
            "first_step_seconds_uncached": round(self.cold, 1),
            "import_seconds": round(self.first["import_seconds"], 1),
            "peak_megabytes": end["peak_megabytes"],
            "versions": self.first["versions"],
        }


def start(who: str, shape: str, dtype: str, elsewhere: dict[str, str], cache: str) -> Contestant:
    """A contestant that made its first step; Trellis keeps compiled programs, so it starts once without them before."""
    contestant = Contestant(who, shape, dtype, elsewhere, cache)
    if who == "trellis":
        contestant.finish()
        cold, contestant = contestant.first_step, Contestant(who, shape, dtype, elsewhere, cache)
        contestant.cold = cold
    return contestant


def race(shape: str, dtype: str, who: list[str], rounds: int, elsewhere: dict[str, str]) -> list[dict]:
    """The rows of one shape in one dtype."""
    with tempfile.TemporaryDirectory() as cache:
        contestants = [start(name, shape, dtype, elsewhere, cache) for name in who if shape in CONTESTANTS[name]]
    for _ in range(rounds):
        for contestant in contestants:
            contestant.turn()
    rows = [contestant.finish() for contestant in contestants]
    plain = next((r["milliseconds"] for r in rows if r["who"] == "plain"), None)
    tokens = contestants[0].first["tokens"]
    for row in rows:
        row |= {"shape": shape, "dtype": dtype, "tokens_per_second": round(1e3 * tokens / row["milliseconds"])}
        row["against_plain"] = round(plain / row["milliseconds"], 2) if plain else None
        print(
            f"{shape:12} {dtype:9} {row['who']:13} {row['tokens_per_second']:8,} tokens/s  x{row['against_plain']}  "
            f"first step {row['first_step_seconds']:4} s (uncached {row['first_step_seconds_uncached']:4} s)  "
            f"import {row['import_seconds']:4} s  "
            f"{row['peak_megabytes']:6,} MB",
            flush=True,
        )
    return rows


def processor() -> str:
    """The name of this machine's processor, as its system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    told = {key.strip(): value.strip() for key, value in found.items()}
    which = f"family {told.get('cpu family', '?')}, model {told.get('model', '?')}"
    return f"{told.get('model name', platform.machine())} ({which})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["nano", "small-llama"], choices=["nano", "small-llama"])
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument(
        "--who", nargs="+", choices=list(CONTESTANTS), help="contestants; all that can run if not given"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--nanogpt", metavar="FOLDER", help="a clone of karpathy/nanoGPT")
    parser.add_argument("--out", type=Path, help="write the rows there, as JSON")
    parser.add_argument("--levanter-python", metavar="PATH", help="the python of an environment that has Levanter")
    args = parser.parse_args()
    elsewhere = {"nanogpt": args.nanogpt, "levanter": args.levanter_python}
    elsewhere = {name: path for name, path in elsewhere.items() if path}
    absent = {"nanogpt", "levanter"} - elsewhere.keys()
    if asked := absent & set(args.who or ()):
        parser.error(f"{', '.join(sorted(asked))}: say where it is, with --nanogpt FOLDER or --levanter-python PATH")
    if args.who is None and absent:
        print(f"without {', '.join(sorted(absent))}: give --nanogpt FOLDER, --levanter-python PATH", flush=True)
    who = args.who or [name for name in CONTESTANTS if name not in absent]
    rows = [row for s in args.shape for d in args.dtype for row in race(s, d, who, args.rounds, elsewhere)]
    if args.out:
        machine = {"processor": processor(), "cores": len(os.sched_getaffinity(0))}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
