"""How long a shuffled batch takes to read, from a store on the local disk and through HTTP range requests.

    python benchmarks/load.py [--tokens 1e7 1e8 1e9] [--folder DIR] [--out benchmarks/results/load.json]

Stores of random tokens are generated under DIR and deleted afterwards. "warm": the files lie in the page cache; "cold":
they were dropped from it before each batch. Times are on the clock and, beside it, of the core, which other load on the
machine disturbs less. Batches are what training reads: tokens, targets, mask, segments and positions, on the
host, without the loader's thread, so that nothing hides behind anything. A store of 1e13 tokens is simulated: its
metadata are real, its chunks are zeros made up on request; it shows that opening, ordering and seeking do not depend on
the size.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.data.synthetic import claim, read_zeros, rows_of, write_random  # noqa: E402
from trellis.data import Batches, Shuffle, open_store  # noqa: E402

SHAPES = ((8, 2048), (512, 4096))
CHUNK = 1 << 21


def drop_from_cache(folder: pathlib.Path) -> None:
    """Ask the kernel to forget the store's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_into_cache(folder: pathlib.Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()


def milliseconds(batches, steps, *, before=lambda: None) -> dict[str, float]:
    """Time of a batch: median and worst on the clock, median of the core."""
    times, cores = [], []
    for step in steps:
        before()
        began, core = time.perf_counter(), time.process_time()
        batches.batch(step)
        times.append((time.perf_counter() - began) * 1e3)
        cores.append((time.process_time() - core) * 1e3)
    middle = len(times) // 2
    return {"median": round(sorted(times)[middle], 2), "worst": round(max(times), 2),
            "core median": round(sorted(cores)[middle], 2)}  # fmt: skip


def local(store, rounds: int) -> dict:
    found = {}
    for rows, length in SHAPES:
        batches = Batches(store, sequence_length=length, batch_size=rows)
        read_into_cache(pathlib.Path(store.url))
        milliseconds(batches, range(3))
        found[f"{rows} x {length}"] = {
            "warm_ms": milliseconds(batches, range(10, 10 + rounds)),
            "cold_ms": milliseconds(batches, range(1000, 1000 + max(3, rounds // 4)),
                                    before=lambda: drop_from_cache(pathlib.Path(store.url))),
        }  # fmt: skip
    return found


def over_http(folder: pathlib.Path, rounds: int) -> dict:
    """The same through a web server in a process of its own."""
    code = "import pathlib, sys, time; from tests.data.web import serve; "
    code += "c = serve(pathlib.Path(sys.argv[1])); w = c.__enter__(); print(w.url, flush=True); time.sleep(3600)"
    server = subprocess.Popen(
        [sys.executable, "-c", code, str(folder.resolve())], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        url = server.stdout.readline().strip()
        found = {}
        for rows, length in SHAPES:
            ranges = Batches(open_store(url + "/store"), sequence_length=length, batch_size=rows)
            shuffle = Shuffle(block=CHUNK // length, window=8)
            kept = Batches(
                open_store(url + "/store", keep=16), sequence_length=length, batch_size=rows, shuffle=shuffle
            )
            milliseconds(ranges, range(2))
            milliseconds(kept, range(2))
            found[f"{rows} x {length}"] = {
                "rows_by_range_ms": milliseconds(ranges, range(5, 5 + rounds)),
                "whole_chunks_kept_ms": milliseconds(kept, range(5, 5 + rounds)),
            }
        return found
    finally:
        server.terminate()
        server.wait()


def simulated(folder: pathlib.Path, num_tokens: int) -> dict:
    """Opening, ordering, seeking and reading a store of which only the metadata exist."""
    claim(folder, num_tokens)
    began = time.perf_counter()
    store = open_store(folder, check=False)
    opened = time.perf_counter()
    read_zeros(store)
    batches = Batches(store, sequence_length=4096, batch_size=512)
    last = num_tokens // 4096 // 512 - 1
    made = time.perf_counter()
    orders = []
    for step in (0, last // 2, last):
        start = time.perf_counter()
        rows_of(batches, step, 512)
        orders.append((time.perf_counter() - start) * 1e3)
    read = milliseconds(batches, [0, last // 3, last // 2, last])
    return {"open_ms": round((opened - began) * 1e3, 2), "batches_ms": round((made - opened) * 1e3, 2),
            "order_of_512_rows_ms": round(max(orders), 2), "batch_512_x_4096_ms": read}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e7, 1e8, 1e9])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", metavar="DIR")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()

    if args.folder:
        pathlib.Path(args.folder).mkdir(parents=True, exist_ok=True)
    results: dict = {"cores": os.cpu_count(), "chunk_tokens": CHUNK, "local": {}, "http": {}, "simulated": {}}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        for tokens in map(int, args.tokens):
            folder = pathlib.Path(name) / "store"
            began = time.perf_counter()
            write_random(folder, tokens, CHUNK)
            print(f"{tokens:,} tokens generated in {time.perf_counter() - began:.1f} s", flush=True)
            results["local"][f"{tokens:.0e}"] = local(open_store(folder, check=False), args.rounds)
            print(json.dumps(results["local"][f"{tokens:.0e}"]), flush=True)
            if tokens == int(args.tokens[-1]):
                results["http"][f"{tokens:.0e}"] = over_http(pathlib.Path(name), max(1, args.rounds // 2))
                print(json.dumps(results["http"]), flush=True)
                for pretended in (10**9, 10**11, 10**13):
                    results["simulated"][f"{pretended:.0e}"] = simulated(folder, pretended)
                print(json.dumps(results["simulated"]), flush=True)
            shutil.rmtree(folder)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
