"""The public API is a few declared modules, and nothing that is shown to users imports another one."""

import ast
import builtins
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [f for d in ("examples", "benchmarks", "docs/notebooks") for f in sorted((ROOT / d).rglob("*.py"))]


def declared() -> list[str]:
    """The faces, from the table in ARCHITECTURE.md."""
    part = (ROOT / "ARCHITECTURE.md").read_text().partition("## Faces")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(trellis[\w.]*)` \|", part, re.MULTILINE)


FACES = declared()


def beside_faces(text: str) -> list[str]:
    """What a program imports from Trellis that is no name of a face."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] == "trellis" and a.name not in FACES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trellis":
            for name in (alias.name for alias in node.names):
                public = node.module in FACES and name in public_names(node.module)
                if not public and f"{node.module}.{name}" not in FACES:
                    found.append(f"{node.module}.{name}")
    return found


def public_names(face: str) -> set[str]:
    """A face's names. `from trellis import *` leaves Python's own names alone, but they are public, too."""
    module = importlib.import_module(face)
    return set(module.__all__) | {name for name in vars(module) if hasattr(builtins, name) and name[0] != "_"}


@pytest.mark.parametrize("file", [*PAGES, *PROGRAMS], ids=lambda f: str(f.relative_to(ROOT)))
def test_users_see_faces_only(file: pathlib.Path):
    text = file.read_text()
    text = "\n".join(FENCE.findall(text)) if file.suffix == ".md" else text
    assert not beside_faces(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import trellis as tr\nfrom trellis import nn, Axis, sum\nfrom trellis.nn import moe", []),
        ("def f():\n    from trellis.mesh.topology import parse_slice", ["trellis.mesh.topology.parse_slice"]),
        ("import trellis.named.array", ["trellis.named.array"]),
        ("from trellis.data import StoreWriter", ["trellis.data.StoreWriter"]),
        ("from trellis import checkpoints", ["trellis.checkpoints"]),
    ],
)
def test_the_check_itself(text: str, found: list[str]):
    assert beside_faces(text) == found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda f: str(f.relative_to(ROOT)))
def test_names_in_texts_exist(page: pathlib.Path):
    """`tr.dot`, `nn.Linear`, `trellis.train.Run`, wherever a page says so."""
    short = {"tr": "trellis", "nn": "trellis.nn", "trellis": "trellis"}
    for first, rest in re.findall(r"`(trellis|tr|nn)((?:\.\w+)+)", page.read_text()):
        face, names = short[first], rest.strip(".").split(".")
        while names and f"{face}.{names[0]}" in FACES:
            face = f"{face}.{names.pop(0)}"
        assert not names or names[0] in public_names(face), f"{first}{rest}"
        value = importlib.import_module(face)
        for name in names:
            value = getattr(value, name)


@pytest.mark.parametrize("face", FACES)
def test_a_face_says_what_it_has(face: str):
    """Its names are listed once, exist, and say what they are."""
    module = importlib.import_module(face)
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isroutine(value) or inspect.isclass(value):
            doc = inspect.getdoc(value) or ""
            assert doc and not doc.startswith(f"{name}("), f"{face}.{name} has no docstring"


def test_every_face_has_its_page_in_the_reference():
    nav = (ROOT / "mkdocs.yml").read_text()
    assert not [face for face in FACES if f"- {face}: reference/{face}.md" not in nav]
    assert set(re.findall(r"reference/(trellis[\w.]*)\.md", nav)) == set(FACES)


@pytest.mark.slow
def test_every_public_name_is_the_same_whatever_is_imported():
    """A module of the name of a function takes its place in the package when it is first imported."""
    code = f"""
import importlib, pkgutil, trellis
faces = [importlib.import_module(face) for face in {FACES}]
before = {{(face.__name__, name): getattr(face, name) for face in faces for name in face.__all__}}
for module in pkgutil.walk_packages(trellis.__path__, "trellis."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print([name for name, value in before.items() if getattr(importlib.import_module(name[0]), name[1]) is not value])
"""
    changed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert changed.strip() == "[]"
