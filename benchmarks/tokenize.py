"""How fast `trellis tokenize` is: against `tokenizers.encode_batch` on strings in memory, and against `datasets.map`.

    python benchmarks/tokenize.py [--megabytes 40] [--rounds 3] [--out benchmarks/results/tokenize.json]

Two corpora: the Python standard library's sources, and generated documents with the word frequencies and document
lengths of web text. The limit is what the tokenizer itself can do: `encode_batch` on all cores, on strings that lie in
memory. Everything else has to read, parse, encode, convert and write, and starts its workers inside the time. They take
turns, so that other load falls on all alike; a ratio is the median over rounds. Beside the time on the clock stands the
time of the cores (of a process and its workers), which other load disturbs less. Memory is the most that the process
and its workers held together (proportional set size), for a corpus and for one ten times as large.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

if __name__ == "tokenize":
    # Python puts a script's folder first on its path, so every script here that needs the standard library's module of
    # this name finds this file: put the real one in its place.
    import importlib.util

    place = importlib.util.spec_from_file_location(
        "tokenize", os.path.join(os.path.dirname(os.__file__), "tokenize.py")
    )
    sys.modules["tokenize"] = importlib.util.module_from_spec(place)
    place.loader.exec_module(sys.modules["tokenize"])


def write_corpora(folder: pathlib.Path, megabytes: int) -> dict[str, pathlib.Path]:
    """JSON lines of the standard library (again and again) and of generated text, of about ``megabytes`` each."""
    import numpy as np

    from trellis.data import embedded_corpus

    paths = {"python": folder / "python.jsonl", "web-like": folder / "web.jsonl"}
    texts = [pathlib.Path(file.url).read_text() for file in embedded_corpus().files]
    with open(paths["python"], "w") as file:
        while file.tell() < megabytes * 1e6:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlcumwfgypbvk"))
    words = np.array(["".join(rng.choice(letters, n)) for n in 1 + rng.poisson(4.5, 200_000)])
    with open(paths["web-like"], "w") as file:
        while file.tell() < megabytes * 1e6:
            ranks = np.minimum(rng.zipf(1.15, int(rng.lognormal(5.8, 1.1)) + 5), len(words)) - 1
            chosen = words[ranks]
            chosen[::17] = np.char.add(np.char.capitalize(chosen[::17]), ",")
            file.write(json.dumps({"text": " ".join(chosen)}) + "\n")
    return paths


def core_seconds() -> float:
    """Time that the cores spent on this process and its finished children."""
    return sum(os.times()[:4])


def limit(path, tokenizer: str, method: str) -> tuple[float, float]:
    """Tokens a second of encode_batch on all cores, strings in memory; and tokens a second of one core's time."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(tokenizer)
    with open(path) as file:
        texts = [json.loads(line)["text"] for line in file]
    began, tokens, cores = time.perf_counter(), 0, core_seconds()
    for start in range(0, len(texts), 1000):
        tokens += sum(len(e) for e in getattr(inner, method)(texts[start : start + 1000], add_special_tokens=False))
    return tokens / (time.perf_counter() - began), tokens / (core_seconds() - cores)


def trellis(path, tokenizer: str) -> tuple[float, float]:
    """The same of the library function, from the file to the finished store."""
    from trellis.data import FileSource, find_files, tokenize

    out = tempfile.mkdtemp(dir=pathlib.Path(path).parent)
    began, cores = time.perf_counter(), core_seconds()
    store = tokenize(FileSource(files=find_files(path)), f"{out}/store", tokenizer=tokenizer)
    seconds, cores = time.perf_counter() - began, core_seconds() - cores
    shutil.rmtree(out)
    return store.num_tokens / seconds, store.num_tokens / cores


def datasets_map(path, tokenizer: str) -> tuple[float, float]:
    """The same of a plain `datasets.map` pipeline: load the JSON lines, map with all cores, save."""
    import datasets
    import tokenizers

    datasets.disable_progress_bars()
    inner = tokenizers.Tokenizer.from_file(tokenizer)

    def encode(batch):
        return {"ids": [e.ids for e in inner.encode_batch(batch["text"], add_special_tokens=False)]}

    cache = tempfile.mkdtemp(dir=pathlib.Path(path).parent)
    began, cores = time.perf_counter(), core_seconds()
    data = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache)
    data = data.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns=data.column_names)
    data.save_to_disk(f"{cache}/out")
    seconds, cores = time.perf_counter() - began, core_seconds() - cores
    tokens = sum(map(len, data.with_format("arrow")["ids"]))
    shutil.rmtree(cache)
    return tokens / seconds, tokens / cores


def in_process(function, *arguments) -> tuple[float, float]:
    """A function's result from a fresh process, so that neither caches nor threads are shared."""
    code = f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); import importlib.util as u; "
    code += (
        f"s = u.spec_from_file_location('bench', {__file__!r}); m = u.module_from_spec(s); s.loader.exec_module(m); "
    )
    code += f"print(*m.{function.__name__}(*{[str(a) for a in arguments]!r}))"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr)
    by_clock, by_core = run.stdout.split()[-2:]
    return float(by_clock), float(by_core)


def peak_memory(path, tokenizer: str) -> int:
    """The most bytes held by a tokenizing process and its workers together."""
    code = "import sys; from trellis.data import *; "
    code += "tokenize(FileSource(files=find_files(sys.argv[1])), sys.argv[2], tokenizer=sys.argv[3])"
    out = tempfile.mkdtemp(dir=pathlib.Path(path).parent)
    process = subprocess.Popen([sys.executable, "-P", "-c", code, str(path), f"{out}/store", tokenizer])
    peak, done = 0, threading.Event()
    while not done.is_set():
        peak = max(peak, sum(map(proportional_size, family(process.pid))))
        if process.poll() is not None:
            done.set()
        done.wait(0.05)
    shutil.rmtree(out)
    return peak


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    try:
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for thread in os.listdir(f"/proc/{pid}/task"):
            children += pathlib.Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(p for child in set(children) for p in family(int(child)))]


def proportional_size(pid: int) -> int:
    """Bytes of memory of a process, shared pages divided among those that share them."""
    try:
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    from trellis.data import embedded_corpus, tokenize

    results: dict = {"cores": os.cpu_count(), "megabytes": args.megabytes, "vocabulary": args.vocab}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tokenize(embedded_corpus(), folder / "trained", train_bpe=args.vocab)
        tokenizer = str(folder / "trained" / "tokenizer.json")
        for corpus, path in write_corpora(folder, args.megabytes).items():
            rounds: dict[str, list] = {"encode_batch": [], "encode_batch_fast": [], "trellis": [], "datasets.map": []}
            for _ in range(args.rounds):
                rounds["encode_batch"].append(in_process(limit, path, tokenizer, "encode_batch"))
                rounds["trellis"].append(in_process(trellis, path, tokenizer))
                rounds["encode_batch_fast"].append(in_process(limit, path, tokenizer, "encode_batch_fast"))
                rounds["datasets.map"].append(in_process(datasets_map, path, tokenizer))
            results[corpus] = {
                "tokens_per_second": {
                    k: round(statistics.median([clock for clock, _ in v])) for k, v in rounds.items()
                },
                "tokens_per_core_second": {
                    k: round(statistics.median([core for _, core in v])) for k, v in rounds.items()
                },
            }
            for other in ("encode_batch", "encode_batch_fast", "datasets.map"):
                pairs = list(zip(rounds["trellis"], rounds[other]))
                results[corpus][f"trellis over {other}"] = {
                    "by the clock": round(statistics.median([a[0] / b[0] for a, b in pairs]), 3),
                    "by core time": round(statistics.median([a[1] / b[1] for a, b in pairs]), 3),
                }
            print(corpus, json.dumps(results[corpus], indent=1), flush=True)
        small = write_corpora(folder, max(2, args.megabytes // 5))["web-like"]
        large = folder / "large.jsonl"
        large.write_bytes(small.read_bytes() * 10)
        memory = {"1x": peak_memory(small, tokenizer), "10x": peak_memory(large, tokenizer)}
        results["peak_memory_megabytes"] = {k: round(v / 1e6, 1) for k, v in memory.items()}
        results["peak_memory_10x_over_1x"] = round(memory["10x"] / memory["1x"], 3)
        print(json.dumps(results["peak_memory_megabytes"]))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
