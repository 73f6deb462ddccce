"""Code in the README and the docs runs, and commands in them are understood."""

import re
import shlex
from pathlib import Path

import jax
import pytest

from trellis.commands.line import commands

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(page.read_text()) if language in languages]


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
