"""Starting again with huge pages: once, and only where it helps."""

import gc
import json
import os
import subprocess
import sys

import trellis_start
from trellis_start import huge_page_environment

PROGRAM = """
import importlib.util, json, os, sys
# The file alone: the package's other imports take a second each time.
spec = importlib.util.spec_from_file_location("process", os.environ["FILE"])
process = importlib.util.module_from_spec(spec)
spec.loader.exec_module(process)
process._enabled = lambda: os.environ["PAGES"]
process.use_huge_pages()
print(json.dumps([os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[1:]]))
"""


def run(pages: str, **more: str):
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | more
    environment |= {"PAGES": pages, "FILE": trellis_start.__file__}
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "train", "--steps", "3"], env=environment, stdout=subprocess.PIPE, text=True
    )
    with started:
        out, _ = started.communicate(timeout=300)
    pid, tunables, arguments = json.loads(out)
    assert started.returncode == 0 and pid == started.pid and arguments == ["train", "--steps", "3"]
    return tunables


def test_a_process_starts_again_once_with_its_own_arguments():
    assert run("always [madvise] never") == "glibc.malloc.hugetlb=1"
    assert run("always madvise [never]") is None
    assert run("always [madvise] never", GLIBC_TUNABLES="glibc.malloc.perturb=1") == (
        "glibc.malloc.perturb=1:glibc.malloc.hugetlb=1"
    )


def test_what_the_user_chose_stays():
    chosen = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert huge_page_environment(chosen, "always [madvise] never") is None


def test_garbage_is_looked_for_where_a_command_runs(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["trellis", "recipes"])
    monkeypatch.setattr("trellis.commands.line.main", lambda: int(gc.isenabled()))
    assert trellis_start.main() == 1
