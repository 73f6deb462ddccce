"""Code in the README and the docs runs, and commands in them are understood."""

import io
import json
import re
import shlex
from pathlib import Path

import jax
import pytest

from trellis.commands.line import commands
from trellis.inspect.ledger import ledger_of
from trellis.inspect.memory import memory_of
from trellis.recipes import starter
from trellis.train.assemble import assemble
from trellis.train.choices import MEASURES, TRIAL, words_of
from trellis.train.pace import Pace
from trellis.train.progress import Progress
from trellis.train.summary import describe, sections, step_program

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(page.read_text()) if language in languages]


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: str(p.relative_to(ROOT)))
def test_python_runs(page: Path, tmp_path, monkeypatch):
    """The blocks of a page run one after the other, as a reader would type them, whose JAX is not as strict as ours."""
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for code in blocks(page, "python"):
            exec(compile(code, str(page), "exec"), names)


def commands_in(page: Path) -> list[str]:
    text = "".join(blocks(page, "sh", "bash", "console")).replace("\\\n", " ")
    return [line.removeprefix("$ ").split(" #")[0].strip() for line in text.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands_in(page):
        words = shlex.split(line)
        if words[:1] == ["make"]:
            assert {w for w in words[1:] if "=" not in w} <= targets, line
        if words[:1] == ["trellis"] and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in commands(), line


def headings(page: Path) -> set[str]:
    """The anchors that a code host gives to the headings of a page."""
    lines = re.findall(r"^#+ (.*)", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path):
    """As a code host shows a page, beside the files of the repository and without the pages that only the site has."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if "://" not in target:
            there = (page.parent / target).resolve() if target else page
            assert there.exists(), target
            assert not anchor or anchor in headings(there), f"{target}#{anchor}"


@pytest.mark.slow
def test_the_readme_shows_what_a_run_says():
    """The recording of the first run: what does not hang on the machine's speed, and the form of what does."""
    (before, block) = re.findall(
        r"^```\n(measures .*?)(^model .*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )[0]
    shown = [line.removesuffix("...").rstrip() for line in block.splitlines()]
    run, corpus = starter(), float(re.search(r"corpus of ([\d.]+)M", block)[1]) * 1e6
    assembled = assemble(run, jax.devices()[:2])
    program = step_program(assembled)
    ledger = ledger_of(program)
    said = describe(sections(assembled, memory_of(program).per_kind(), ledger, round(corpus))).splitlines()
    assert all(real.startswith(line) for line, real in zip(shown, said))
    assert f"matched  {len(ledger)} of {len(ledger)} rows of the ledger are in the" in block
    steps = [line for line in shown if line.startswith("step ")]
    assert len(steps) == 2
    measured, chosen = before.splitlines()
    assert measured == MEASURES
    words = words_of(run, {"devices": 2, "microbatches": 2, "attention_chunk": 64, "loss_chunk": 512})
    assert chosen == f"chosen   {words}, ..."
    pace = Pace(token_seconds=1e-4, basis=f"as in {TRIAL} of ... on this machine", measured=True)
    told = pace.tell(run, 0, run.steps, evaluations=run.steps // run.evaluation.every, validation_batches=48)
    masked = re.sub(r"(?<=about ).*?(?=:)|(?<=steps of ).*?(?= and)", "...", told)
    assert f"takes    {masked}" in block
    for line in steps:
        step, loss, speed, mfu, noncausal, memory = map(float, STEP.match(line).groups())
        values = {"step": int(step), "loss": loss, "tokens_per_second": 1e3 * speed, "memory_bytes": memory * 2**20}
        values |= {"mfu": mfu / 100, "mfu_noncausal": noncausal / 100}
        Progress(run.steps, stream=(terminal := io.StringIO())).update(values)
        assert line.partition("  left ")[0] == terminal.getvalue().rstrip()


STEP = re.compile(
    r"step (\d+)/600  loss (\S+)  (\S+)k tok/s  MFU (\S+) % \((\S+) % non-causal\)  (\d+) MiB(?:  left .*)?$"
)


def test_every_processor_that_was_measured_has_its_table_and_no_other():
    page = (ROOT / "docs" / "cpu-speed.md").read_text()
    tables = re.findall(r"^### (.*?), (\w+) cores$\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL)
    files = sorted((ROOT / "benchmarks" / "results").glob("train_speed*.json"))
    found = {path: json.loads(path.read_text()) for path in files}
    assert len(tables) == len(files) > 0
    for path, measured in found.items():
        machine, words = measured["machine"], {2: "two", 4: "four"}
        cores = words.get(machine["cores"], str(machine["cores"]))
        (text,) = [text for name, of, text in tables if of == cores and machine["processor"].startswith(name)]
        assert f"results/{path.name}" in text
        for row in measured["rows"]:
            assert f"| {row['tokens_per_second']:,} | {row['against_plain']:g} |" in text, row
