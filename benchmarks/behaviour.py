"""What the commands compute, recorded, and two recordings compared to the last digit.

    python benchmarks/behaviour.py record before.json
    ... change the code ...
    python benchmarks/behaviour.py record after.json
    python benchmarks/behaviour.py compare before.json after.json

Everything goes through the command line, so that the same script records any commit: put its `src` on PYTHONPATH. Every
family trains 20 steps on every layout (8 CPU devices), every recipe is resolved and planned, a few are compiled for
hardware that is not here, and a run is interrupted, resumed on another mesh, evaluated, sampled and exported. What
differs between two recordings of the same code is left out: times, rates, machine, paths. Takes about half an hour on
four cores; `--only WORD` records the cases with that word in their name.

Compiled programs are told by the keys that JAX's persistent cache has for them, which leave out names and source
lines but not the cache's folder: give both recordings the same `--work`. A key that differs says that a program
differs, not that its numbers do: `compare` counts them apart.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "src"
TRELLIS = [sys.executable, "-c", "import sys, trellis_start; sys.exit(trellis_start.main())"]
STEPS = 20
NOTHING = '"nothing"'

_GATED = "vocab: 512, embed: 64, layers: 2, heads: 4, kv_heads: 2, head_dim: 16, mlp: 128, rope_theta: 10000.0"
FAMILIES = {
    "llama": f"{{family: llama, {_GATED}, rope_scaling: null, norm_eps: 1.0e-5, tie_embeddings: true}}",
    "qwen3": f"{{family: qwen3, {_GATED}, tie_embeddings: false}}",
    "mixtral": f"{{family: mixtral, {_GATED}, experts: 4, experts_per_token: 2, norm_eps: 1.0e-5, "
    "tie_embeddings: false, routing: {balance: 0.02, z_loss: 0.001}}",
    "gpt2": "{family: gpt2, vocab: 512, positions: 64, embed: 64, layers: 2, heads: 4, mlp: 128, norm_eps: 1.0e-5, "
    "dropout: 0.1, scale_by_inverse_layer: true, upcast_attention: true}",
    "gptj": "{family: gptj, vocab: 512, embed: 64, layers: 2, heads: 4, rotary_dim: 8, mlp: 128, head_bias: true}",
}
LAYOUTS = {
    "one": "--devices 1",
    "two": "--devices 2",
    "auto": "",
    "data": "--layout.preset data",
    "fsdp": "--layout.preset fsdp",
    "tensor": "--layout.preset tensor --mesh.model 2",
    "fsdp_tensor": "--layout.preset fsdp_tensor --mesh.model 2",
    "sequence": "--layout.preset fsdp_tensor_sequence --mesh.model 2",
    "context": "--layout.preset context --mesh.context 2",
    "hybrid": "--mesh.context 2 --mesh.model 2 --mesh.replica 2",
    "expert": "--layout.preset fsdp --mesh.expert 4",
    "expert_tensor": "--layout.preset fsdp_tensor --mesh.expert 2 --mesh.model 2",
    "stage": "--layout.preset fsdp --mesh.stage 2",
    "stage_tensor": "--layout.preset fsdp_tensor --mesh.stage 2 --mesh.model 2",
    "compiler_places": "--layout.mode auto --mesh.model 2",
}
# Beside the layouts: what else a run may say, each on one family.
OPTIONS = {
    "llama microbatches": "--layout.preset fsdp --batch_size 16 --microbatches 2",
    "llama microbatches tensor": "--mesh.model 4 --layout.compute.kv_heads= --layout.params.kv_heads= --microbatches 2",
    "llama microbatches stage": "--layout.preset fsdp --mesh.stage 2 --batch_size 16 --microbatches 2",
    "llama remat saved": "--layout.preset fsdp --remat.policy saved",
    "llama remat some": "--layout.preset fsdp --remat.policy saved --remat.names attention",
    "llama remat full": "--layout.preset fsdp --remat.policy full",
    "llama remat dots": "--layout.preset fsdp --remat.policy dots",
    "llama ema": "--layout.preset fsdp --ema 0.9",
    "llama bfloat16": "--mesh.model 2 --precision.compute bfloat16",
    "llama bfloat16 params": "--precision.params bfloat16 --precision.compute bfloat16",
    "llama exceptions": "--precision.compute bfloat16 --precision.exceptions.norm float32",
    "llama muon": "--layout.preset fsdp --optimizer muon --optimizer.learning_rate 0.01",
    "llama lion": "--layout.preset fsdp --optimizer lion --optimizer.learning_rate 0.001",
    "llama adafactor": "--layout.preset fsdp --optimizer adafactor --optimizer.learning_rate 0.01",
    "llama wsd": "--schedule wsd --schedule.warmup_steps 4 --schedule.decay_steps 4",
    "llama z_loss": "--z_loss 0.001 --clip_norm null --mesh.model 2",
    "llama per_axis": "--mesh.model 2 --layout.params.embed data/model --layout.gather per_axis",
    "llama overlap": "--layout.preset fsdp_tensor_sequence --mesh.model 2 --layout.overlap mlp,heads",
    "llama pipeline": "--layout.preset fsdp --mesh.stage 2 --layout.pipeline_microbatches 2",
    "llama growing batch": "--batch_size '[{step: 0, size: 8}, {step: 5, size: 16}]'",
    "llama pack": "--data.packing pack --mesh.model 2",
    "llama pad": "--data.packing pad",
    "llama no masks": "--data.mask_documents false --mesh.context 2",
    "llama skip": "--skip_nonfinite 2 --layout.preset fsdp",
    "llama strict": "--layout.strict true --mesh.model 2",
    "mixtral microbatches": "--layout.preset fsdp --mesh.expert 2 --batch_size 16 --microbatches 2",
    "mixtral bias": "--layout.preset fsdp --mesh.expert 4 --model.routing.bias_rate 0.01",
    "mixtral capacity": "--layout.preset fsdp --mesh.expert 4 --model.routing.capacity 1.25",
    "mixtral sequence": "--model.routing.balance_over sequence",
    **{
        f"mixtral {way}": f"--layout.preset fsdp --mesh.expert 4 --model.routing.way {way}"
        for way in ("gather", "ragged", "slots", "grouped", "dense")
    },
}
COMPILED = {
    "tiny fsdp": "tiny --on v5e:2x4 --layout.preset fsdp",
    "tiny tensor": "tiny --on v5e:2x4 --mesh.model 2",
    "tiny context": "tiny --on v5e:2x4 --mesh.context 2",
    "starter": "starter --on v6e:2x4",
    "llama32_1b_v5e_16": "llama32_1b_v5e_16 --on v5e:4x4",
}
# What differs from one recording of the same code to the next.
_LOSSES = ("step", "tokens", "loss", "learning_rate", "grad_norm", "accuracy", "z_loss", "validation", "bits", "perpl")
_VOLATILE = {"compile_seconds", "versions", "machine", "store"}
_SOURCE = re.compile(r"\S+\.py:\d+.*")
_KEY = re.compile(r"CACHE (?:MISS|HIT) for '([^']+)' with key '([^']+)'", re.IGNORECASE)


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Recorder:
    """Runs commands in a folder of their own and keeps what they leave.

    Args:
        folder: for runs, and for the caches of text and programs.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.environ.get("PYTHONPATH", str(SOURCE)),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "JAX_LOGGING_LEVEL": "DEBUG",
        }

    def run(self, *arguments: str) -> Done:
        """One command."""
        command = [*TRELLIS, *arguments]
        how = {"cwd": self.folder, "env": self._environment, "capture_output": True, "text": True, "timeout": 3600}
        done = subprocess.run(command, **how)
        if done.returncode < 0:  # on a busy machine XLA gives up where its threads wait for each other too long
            done = subprocess.run(command, **how)
        return Done(done.returncode, done.stdout, done.stderr)

    def trained(self, name: str, *arguments: str) -> dict[str, Any]:
        """What a run leaves: its numbers, what it moves and holds, its file, and its compiled programs."""
        folder = self.folder / "runs" / name.replace(" ", "_")
        if name != "resumed" or "--until" in arguments:
            shutil.rmtree(folder, ignore_errors=True)  # of the recording before
        done = self.run("train", *arguments, "--run-dir", str(folder))
        if done.code:
            return {"exit": done.code, "error": _message(done.err)}
        about = json.loads((folder / "about.json").read_text())
        text = lambda file: (folder / file).read_text()
        return {
            "exit": 0,
            "numbers": [_numbers(json.loads(line)) for line in text("metrics.jsonl").splitlines()],
            "ledger": text("ledger.txt").splitlines(),
            "about": _without(about),
            "run": text("run.yaml").splitlines(),
            "checkpoints": {
                path.parent.name: json.loads(path.read_text())["entries"]
                for path in sorted(folder.glob("checkpoints/*/manifest.json"))
            },
            "samples": (folder / "samples.jsonl").read_text() if (folder / "samples.jsonl").exists() else None,
            "programs": sorted(set(_KEY.findall(done.err))),
        }

    def printed(self, *arguments: str) -> Any:
        """What a command prints, as JSON where it is."""
        done = self.run(*arguments)
        if done.code:
            return {"exit": done.code, "error": _message(done.err)}
        try:
            return _without(json.loads(done.out))
        except ValueError:
            return done.out.replace(str(self.folder), "").splitlines()


def _message(err: str) -> list[str]:
    """What a command printed before it failed, without the log's lines."""
    return [line for line in err.splitlines() if not re.match(r"DEBUG|[IWE]\d{4} ", line)][-6:]


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name.startswith(_LOSSES) and "second" not in name}


def _without(value: Any) -> Any:
    """JSON without what differs from one recording to the next."""
    if isinstance(value, dict):
        return {name: _without(item) for name, item in value.items() if name not in _VOLATILE}
    return [_without(item) for item in value] if isinstance(value, list) else value


def cases(recorder: Recorder) -> Iterator[tuple[str, Any]]:
    """Every case: its name, and the function that records it."""
    for family, model in FAMILIES.items():
        path = recorder.folder / f"{family}.yaml"
        path.write_text(f"base: tiny\nmodel: {model}\nsteps: {STEPS}\ncheckpoints: {{every: null}}\ndevices: 8\n")
        for layout, options in LAYOUTS.items():
            arguments = [str(path), *shlex.split(options)]
            yield f"train {family} {layout}", lambda n=f"{family} {layout}", a=arguments: recorder.trained(n, *a)
    for name, options in OPTIONS.items():
        arguments = [str(recorder.folder / f"{name.split()[0]}.yaml"), *shlex.split(options)]
        yield f"train {name}", lambda n=name, a=arguments: recorder.trained(n, *a)
    yield from _afterwards(recorder)
    for name, target in _recipes().items():
        yield f"recipe {name}", lambda n=name: recorder.printed("recipes", n)
        yield f"plan {name}", lambda n=name, t=target: recorder.printed("plan", n, "--on", t, "--json")
        yield f"memory {name}", lambda n=name, t=target: recorder.printed("memory", n, "--on", t, "--json")
    yield "search starter", lambda: recorder.printed("plan", "starter", "--on", "v5e:2x2", "--search", "--json")
    for name, words in COMPILED.items():
        yield f"compile {name}", lambda w=words: recorder.printed("plan", *w.split(), "--compile", "--json")


def _afterwards(recorder: Recorder) -> Iterator[tuple[str, Any]]:
    """A run that is interrupted and resumed on another mesh, and what is made of it."""
    file, folder = str(recorder.folder / "llama.yaml"), str(recorder.folder / "runs" / "resumed")
    yield "resume first", lambda: recorder.trained("resumed", file, "--until", "10", "--checkpoints.every", "5")
    yield "resume then", lambda: recorder.trained("resumed", file, "--checkpoints.every", "5", "--mesh.model", "2")
    yield "evaluate", lambda: recorder.printed("evaluate", folder, "--json", "--batches", "4")
    yield "generate", lambda: recorder.printed("generate", folder, "--prompt", "def ", "--tokens", "40", "--top-k", "9")

    def exported() -> Any:
        to = recorder.folder / "exported"
        shutil.rmtree(to, ignore_errors=True)
        recorder.run("export", folder, "--to", str(to), "--dtype", "float32")
        return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(to.iterdir())}

    yield "export", exported

    def imported() -> Any:
        to = recorder.folder / "runs" / "imported"
        shutil.rmtree(to, ignore_errors=True)
        recorder.run("import", str(recorder.folder / "exported"), "--to", str(to))
        return recorder.printed("evaluate", str(to), "--json", "--batches", "2")

    yield "import", imported

    def tokenized() -> Any:
        text = recorder.folder / "text.txt"
        text.write_text("\n".join(f"line {i} of a text, and {i * i} more" for i in range(4000)))
        out = str(recorder.folder / "tokens")
        shutil.rmtree(out, ignore_errors=True)
        recorder.run("tokenize", str(text), "--out", out, "--train-bpe", "400", "--quiet")
        return recorder.printed("data", "inspect", out, "--json"), recorder.printed("data", "verify", out)

    yield "tokenize", tokenized


def _recipes() -> dict[str, str]:
    """Every recipe with the hardware that its docstring plans it for; one node of H100 GPUs where it names none."""
    listed = subprocess.run(
        [*TRELLIS, "recipes"], capture_output=True, text=True, check=True, env=_source_environment()
    )
    names = [line.split()[0] for line in listed.stdout.splitlines() if line]
    docs = "\n".join(
        path.read_text() for path in Path(_source_environment()["PYTHONPATH"].split(":")[0]).rglob("trellis/**/*.py")
    )
    planned = dict(re.findall(r"^    trellis plan (\w+) --on (\S+)$", docs, re.MULTILINE))
    return {name: planned.get(name, "8xH100") for name in names}


def _source_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(SOURCE))}


def record(path: Path, only: str, work: Path | None) -> int:
    """Records every case whose name holds `only`, and writes the recording as it grows."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as made:
        recorder = Recorder(work or Path(made))
        recorder.folder.mkdir(parents=True, exist_ok=True)
        for name, make in cases(recorder):
            if only not in name or (name in found and not only):
                continue
            print(name, flush=True)
            found[name] = make()
            path.write_text(json.dumps(found, indent=1))
    return 0


def compare(before: Path, after: Path) -> int:
    """Prints what differs, one line a value, and returns how many cases differ."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    differing = programs = more = 0
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            print(f"{name}: only in {before if name in old else after}")
            differing += 1
            continue
        lines = list(differences(old[name], new[name]))
        more += any(line[1] == NOTHING for line in lines)
        lines = [line for line in lines if line[1] != NOTHING]
        mine = [line for line in lines if not line[0].startswith(".programs")]
        programs += len(mine) < len(lines)
        differing += bool(mine)
        for where, was, now in mine[:6]:
            print(f"{name}{where}: {was} -> {now}")
        if len(mine) > 6:
            print(f"{name}: and {len(mine) - 6} more")
    same = len(old.keys() | new.keys()) - differing
    print(f"{same} cases are the same to the last digit, {differing} differ")
    print(f"{more} say more than before, {programs} have other compiled programs")
    return differing


def differences(old: Any, new: Any, where: str = "") -> Iterator[tuple[str, str, str]]:
    """Where two JSON values differ, and how. Source lines in texts, and the width of their columns, may differ.

    >>> list(differences({"a": [1, 2]}, {"a": [1, 3]}))
    [('.a[1]', '2', '3')]
    >>> list(differences("7 B  step.py:161 (measured_gradient", "7 B   step.py:157 (measured_gradients)"))
    []
    """
    if isinstance(old, str) and isinstance(new, str):
        old, new = (" ".join(_SOURCE.sub("", text).split()) for text in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from differences(old.get(key, "nothing"), new.get(key, "nothing"), f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new)):
            yield from differences(a, b, f"{where}[{i}]")
    elif old != new:
        yield where, f"{json.dumps(old):.160}", f"{json.dumps(new):.160}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record")
    recording.add_argument("path", type=Path)
    recording.add_argument("--only", default="", metavar="WORD", help="cases with WORD in their name, made again")
    recording.add_argument("--work", type=Path, metavar="DIR", help="keep runs and caches here (default: nowhere)")
    comparing = actions.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.action == "record":
        return record(args.path, args.only, args.work)
    return 1 if compare(args.before, args.after) else 0


if __name__ == "__main__":
    sys.exit(main())
