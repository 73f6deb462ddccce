"""The site builds without a warning, its notebooks run, and the tutorial's commands do what it says."""

import functools
import glob
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.house.test_faces import FACES
from trellis.commands.line import main
from trellis.hardware import peak

ROOT = Path(__file__).parents[2]
FIGURE = re.compile(r"\d[\d.\\]*(\\ [KMG]iB|k)?")  # with its unit, in an escaped text
TUTORIAL = ("first-run", "what-it-did", "own-text", "more-devices", "plan-for-a-pod")


@pytest.mark.slow(first=True)
def test_the_site_builds_without_a_warning(tmp_path):
    """Links, anchors and the order of pages are checked by `--strict`; a notebook that raises ends the build."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert "all-gather" in (tmp_path / "notebooks/named_tensors.html").read_text()
    reference = {page.stem: page.read_text() for page in (tmp_path / "reference").glob("*.html")}
    assert {*FACES} < {*reference}
    for face in FACES:
        module = importlib.import_module(face)
        public = [getattr(module, name) for name in module.__all__]
        documented = [f"{v.__module__}.{v.__name__}" for v in public if inspect.isroutine(v) or inspect.isclass(v)]
        assert not [path for path in documented if not any(f'id="{path}"' in page for page in reference.values())]
    fields = (tmp_path / "reference/fields.html").read_text()
    assert {"batch_size", "optimizer.beta1", "iterations", "rotary_dim"} <= {*re.findall(r"<dt><code>([\w.]+)", fields)}
    assert "<br>step &lt;int&gt;: The first step with this size, counted from 0." in fields
    # A notebook's page has rules of its own, which come after ours: ours are the more specific.
    colors = re.findall(r"([^\n{}]*?) *{[^}]*--jp-mirror-editor-comment-color:", (tmp_path / "site.css").read_text())
    theirs = (tmp_path / "notebooks/by_hand.html").read_text().replace("=slate]", '="slate"]')
    assert len(colors) == 2 and all(color.replace(".md-typeset ", "") + "{" in theirs for color in colors)
    assert all(".md-typeset " in color for color in colors)
    scripts = re.findall(r'<(?:script|link)[^>]* (?:src|href)="(.*?)"', (tmp_path / "index.html").read_text())
    assert "iframe-worker.js" in scripts and not [found for found in scripts if "://" in found]


@pytest.fixture
def quickly(tmp_path, monkeypatch):
    """What this machine could do is measured in milliseconds and kept in a folder of the test, and what a process of
    its own compiled is not compiled again."""
    assert len(jax.devices()) == 8  # a first command would settle how many there are for all tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(jax.stages.Lowered, "compile", inspect.unwrap(jax.stages.Lowered.compile))
    monkeypatch.setattr(peak, "_LONG", 0.0)
    monkeypatch.setattr(peak, "measure_matmul_peak", functools.partial(peak.measure_matmul_peak, size=64))


@pytest.mark.slow(first=True)
@pytest.mark.usefixtures("quickly")
def test_the_tutorial_s_commands_do_what_it_says(tmp_path, monkeypatch, capsys):
    """All pages in one folder, in their order, as a reader types them; the first one as a process, with what the page
    shows of it on four devices."""
    monkeypatch.chdir(tmp_path)
    pages = [(ROOT / "docs" / "tutorial" / f"{name}.md").read_text() for name in TUTORIAL]
    blocks = [block for page in pages for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)]
    first, *others = [line for block in blocks for line in block.splitlines()]
    said = in_a_shell(f"{first} --devices 4").splitlines()
    assert not [line.pattern for line in recorded(pages[0]) if not any(map(line.match, said))]
    for line in others:
        if line.startswith("trellis "):
            words = [found for word in shlex.split(line) for found in sorted(glob.glob(word)) or [word]]
            assert main(words[1:]) == 0, (line, *capsys.readouterr())
        else:
            in_a_shell(line)
    assert (tmp_path / "runs/first/checkpoints/step-00000040").is_dir()
    assert (tmp_path / "runs/one/report.html").is_file() and (tmp_path / "stores/mine").is_dir()
    assert losses(tmp_path / "runs/one")[10] == pytest.approx(losses(tmp_path / "runs/eight")[10], rel=1e-5)


def in_a_shell(command: str) -> str:
    """What a command prints that is typed into a shell, on a CPU; it succeeds."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(["sh", "-ec", command], env=env, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout + ran.stderr


def recorded(page: str) -> list[re.Pattern]:
    """What a terminal showed, line by line, with any figures; a line may end in dots for the rest of it."""
    (block,) = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
    lines = [line.removesuffix("...").rstrip() for line in block.splitlines()]
    return [re.compile(FIGURE.sub(lambda _: r"\d[\w. ]*?", re.escape(line))) for line in lines]


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
