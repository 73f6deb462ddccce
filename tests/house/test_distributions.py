"""What is installed from a wheel or a source distribution is all there, and runs outside of the clone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import trellis

ROOT = Path(__file__).parents[2]
VERSION = trellis.__version__
IGNORED = shutil.ignore_patterns(".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()))
BUILD = "from setuptools.build_meta import build_sdist, build_wheel; build_sdist('built'); build_wheel('built')"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with both distributions, built in a copy of the source tree."""
    tree = tmp_path_factory.mktemp("distributions") / "tree"
    shutil.copytree(ROOT, tree, ignore=IGNORED)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return tree / "built"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """What the wheel puts into an environment."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(built / f"trellis-{VERSION}-py3-none-any.whl") as wheel:
        wheel.extractall(folder)
    return folder


def files(folder: Path) -> set[str]:
    """Every file of a source tree, by its path in it, without what programs leave there."""
    found = set()
    for at, folders, names in os.walk(folder):
        left_out = IGNORED(at, [*folders, *names])
        folders[:] = [name for name in folders if name not in left_out]
        found |= {str((Path(at) / name).relative_to(folder)) for name in names if name not in left_out}
    return found


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_source(installed):
    found = {name for name in files(installed) if ".dist-info" not in name}
    assert found == files(ROOT / "src")


@pytest.mark.slow
def test_a_source_distribution_is_the_whole_tree(built):
    with tarfile.open(built / f"trellis-{VERSION}.tar.gz") as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {"PKG-INFO", "setup.cfg"}
    assert {name for name in found - made if ".egg-info/" not in name} == files(ROOT) - {".gitignore"}


@pytest.mark.slow
def test_a_wheel_runs_in_an_empty_folder(installed, tmp_path):
    """The command and its data files, with nothing of the clone on the path."""
    program = (
        "import sys, pathlib, trellis, trellis_start\n"
        "for module in (trellis, trellis_start):\n"
        "    assert pathlib.Path(module.__file__).is_relative_to(sys.argv.pop(1)), module.__file__\n"
        "sys.exit(trellis_start.main())"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}

    def run(*words: str) -> str:
        command = [sys.executable, "-c", program, str(installed), str(installed), *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version").strip() == VERSION
    assert "tiny on 8xH100" in run("plan", "tiny", "--on", "8xH100", "--page", "plan.html")
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_the_changes_begin_with_this_version():
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == VERSION


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("there", "message"), [(False, "Trellis needs Python 3.11 or newer"), (True, "is made anew")])
def test_make_refuses_an_older_python_in_a_line(tmp_path, there, message):
    """One that is named, and one in an environment that is there."""
    old = tmp_path / "bin" / "python"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    named = [f"VENV={tmp_path}"] if there else [f"PYTHON={old}", f"VENV={tmp_path / 'other'}"]
    done = subprocess.run(["make", "train", *named], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and message in done.stdout and not (tmp_path / "other").exists()
