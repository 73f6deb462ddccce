"""A disk that fills up in the middle: one clear message, no store that looks whole, and it goes on once there is space.

The disk is a tmpfs of 2 MiB in a mount namespace of its own, which root may make, and elsewhere any user who may make
user namespaces. Where neither is allowed, the kernel's limit on the size of files stands in: it refuses the same write.
"""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.data.corpora import make_store, random_texts, tree, write_jsonl

ROOT = pathlib.Path(__file__).parents[2]
TEXTS = random_texts(np.random.default_rng(5), 2000, longest=200)

SCRIPT = """
import json, os, pathlib, resource, sys
from trellis.data.tokenizing import formats
from trellis.data import FileSource, find_files, open_store, tokenize
from trellis.errors import UserError

formats.BLOCK_BYTES = 60_000
disk, source, out, limited = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "limit"
if limited:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, resource.RLIM_INFINITY))
else:
    (disk / "filler").write_bytes(bytes(1_800_000))
os.chdir(disk)
os.symlink(source, "store.jsonl")
go = lambda: tokenize(FileSource(files=find_files("store.jsonl")), "store", use_bytes=True, workers=1,
                      chunk_tokens=1 << 13, chunk_offsets=8, commit_seconds=0.0)
said = {}
try:
    go()
except UserError as error:
    said = {"rule": error.rule, "seen": error.seen, "where": error.where, "fix": error.fix}
try:
    open_store("store")
    said["opened"] = True
except UserError as error:
    said["unfinished"] = error.rule
said["leftovers"] = [str(p) for p in disk.rglob("*.part")]
if limited:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
else:
    (disk / "filler").unlink()
store = go()
said["documents"] = store.num_documents
import shutil
shutil.copytree("store", out)
print(json.dumps(said))
"""


def run(wrapper: list[str], disk: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", SCRIPT, str(disk), *arguments]
    if wrapper:
        mount = f'mount -t tmpfs -o size=2m tmpfs "{disk}" && exec "$@"'
        command = [*wrapper, "sh", "-c", mount, "sh", *command]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def available_wrapper(folder: pathlib.Path) -> list[str]:
    """How this machine lets a test mount a small file system, or nothing."""
    for wrapper in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        if shutil.which("unshare"):
            probe = ["sh", "-c", f'mount -t tmpfs -o size=1m tmpfs "{folder}"']
            if subprocess.run([*wrapper, *probe], capture_output=True).returncode == 0:
                return wrapper
    return []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "limit"])
def test_a_full_disk(tmp_path, kind):
    disk = tmp_path / "disk"
    disk.mkdir()
    wrapper = available_wrapper(disk) if kind == "disk" else []
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    script = "limit" if not wrapper else "disk"
    result = run(wrapper, disk, str(source), str(tmp_path / "out"), script)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["rule"] == "The disk must have room for the store."
    reason = "No space left on device" if script == "disk" else "File too large"
    assert said["seen"].startswith(f"{reason} while writing ") and said["where"].startswith("store/")
    assert said["fix"] == "free some space, then run the same command again; it continues where it left off"
    assert "opened" not in said and said["unfinished"] == "A store must be complete before it is read."
    assert said["leftovers"] == [] and said["documents"] == len(TEXTS)
    whole = make_store(tmp_path / "whole", TEXTS, chunk_tokens=1 << 13)
    found, expected = tree(tmp_path / "out"), tree(pathlib.Path(whole.url))
    for name in ("zarr.json", "sources.json"):  # they hold the name of the input
        found.pop(name), expected.pop(name)
    assert found == expected
