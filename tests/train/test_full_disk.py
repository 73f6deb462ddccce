"""A disk that fills up while a run saves: one clear error, the last good checkpoint stays, the run goes on after it.

The disk is a tmpfs in a mount namespace of its own, where that is allowed; elsewhere the kernel's limit on the size of
files stands in.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from tests.data.test_full_disk import available_wrapper
from tests.train import forks
from tests.train.conftest import assembled_once, assembling
from tests.train.small import GOOD, curve
from trellis.checkpoints import checkpoints
from trellis.checkpoints.checkpoints import told_of_last_good
from trellis.commands import line
from trellis.files import no_room, write_whole
from trellis.models import generate
from trellis.train.stopping import RunStopped, explain
from trellis.train.trackers import JsonLines


def main() -> int:
    """In a process of its own: a run on a disk that has no room, and again when it has; and one that had room.

    With the compiler's options of tests, sums depend on how many CPU devices a process has.
    """
    disk, run, out, kind = sys.argv[1:]
    disk, out = Path(disk), Path(out)
    assembling.assemble, generate.sample = assembled_once, lambda *_, **__: ["a sample"]
    words = ["train", run, "--run-dir", str(disk / "run"), "--checkpoints.every", "1", "--layout.preset", "single"]
    if kind == "disk":
        (disk / "filler").write_bytes(bytes(2_000_000))  # what is left has room for two checkpoints
        codes = [line.main(words)]
        (disk / "filler").unlink()
    else:
        codes = [line.main([*words, "--until", "2"])]
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        codes = [line.main(words)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(path.name for path in (disk / "run" / "checkpoints").iterdir())
    codes.append(line.main(words))
    (out / "metrics.jsonl").write_text((disk / "run" / "metrics.jsonl").read_text())
    codes.append(line.main(["train", run, "--run-dir", str(out / "whole"), "--layout.preset", "single"]))
    print("codes", *codes, "left", *left)
    return 0


def ended(wrapper, disk, *words):
    """`main` with words, inside a wrapper that may mount a small disk: its exit code, and what it printed."""
    if not wrapper:
        process = forks.start("tests.train.test_full_disk", disk, *words)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err
    mounted = f'mount -t tmpfs -o size=3200k tmpfs "{disk}" && exec "$@"'
    command = [sys.executable, "-c", "from tests.train.test_full_disk import main; main()", disk, *words]
    command = [*wrapper, "sh", "-c", mounted, "sh", *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kind", ["disk", "limit"])
def test_a_run_whose_disk_is_full_loses_nothing(kind, run_file, tmp_path):
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir(), out.mkdir()
    wrapper = available_wrapper(disk) if kind == "disk" else []
    kind = "disk" if wrapper else "limit"
    code, printed, err = ended(wrapper, disk, run_file, out, kind)
    assert code == 0, err[-2000:]
    assert "codes 3 0 0 left step-" in printed
    assert "Traceback" not in err
    told = err[err.index("trellis: ") :]
    assert told.startswith("trellis: The disk must have room for what the run writes.\n  seen:  ")
    assert ("No space left on device" if kind == "disk" else "File too large") in told
    assert f"\n  where: last good checkpoint: {disk}/run/checkpoints/step-0000000" in told
    assert "\n  fix:   free some space, then run the same command again, which continues after that checkpoint" in told
    assert curve(out) == curve(out / "whole")


def test_a_checkpoint_without_room_is_told_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(folder, process):
        raise OSError(28, "No space left on device", str(folder))

    with checkpoints.Checkpoints(tmp_path) as saved:
        saved.save(1, {"x": jnp.ones(2)})
        saved.wait()
        monkeypatch.setattr(checkpoints, "write_checksums", full)
        saved.save(2, {"x": jnp.ones(2)})
        with pytest.raises(checkpoints.NoRoom) as error:
            saved.wait()
        assert saved.steps() == [1] and not saved.path(2).exists()
    assert error.value.exit_code == 3
    assert str(error.value) == (
        "The disk must have room for the run's checkpoints.\n  seen:  No space left on device\n"
        f"  where: {tmp_path / 'step-00000002'}\n"
        "  fix:   free some space, then run the same command again, which continues after the last good checkpoint"
    )


def test_other_errors_are_not_taken_for_a_full_disk():
    wrapped = RuntimeError("while saving")
    wrapped.__cause__ = ValueError("RESOURCE_EXHAUSTED: Failed writing: [OS error 28: ENOSPC No space left on device]")
    assert no_room(wrapped) == "No space left on device"
    assert not no_room(RuntimeError("No space left on device"))
    assert not no_room(PermissionError(13, "Permission denied", "x"))


def test_files_that_cannot_be_written_stop_a_run_in_one_message():
    told = explain(OSError(30, "Read-only file system", "a/metrics.jsonl"), GOOD)
    assert isinstance(told, RunStopped) and told.exit_code == 3
    assert told.rule == "The files of a run must be readable and writable while it trains."
    assert told.seen == "Read-only file system: a/metrics.jsonl" and told.where == "last good checkpoint: c"
    assert told.fix.endswith("then run the same command again, which continues after that checkpoint")
    other = ValueError("a loss is one number")
    assert explain(other, GOOD) is other


@pytest.mark.parametrize("number", [28, 116])
def test_an_error_about_a_file_that_is_open_names_it(tmp_path, monkeypatch, number):
    """Python names the file of an error only where it opens one."""

    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=os.strerror(number)) as error:
        write_whole(tmp_path / "ledger.txt", "nothing")
    assert error.value.filename == str(tmp_path / "ledger.txt") and not any(tmp_path.iterdir())
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.close()
    monkeypatch.setattr(lines, "_file", SimpleNamespace(write=fails, flush=fails))
    with pytest.raises(OSError, match=os.strerror(number)) as error:
        lines.log({"step": 1})
    assert error.value.filename == str(tmp_path / "metrics.jsonl")
    assert isinstance(explain(error.value, GOOD), RunStopped), "and no traceback"


def test_a_page_without_a_folder_is_named_as_it_was_asked_for(tmp_path):
    for path in (tmp_path / "none" / "page.html", tmp_path):
        with pytest.raises(OSError) as error:
            write_whole(path, "nothing")
        assert error.value.filename == str(path)


def test_of_two_that_write_a_file_at_once_the_last_one_stays(tmp_path, monkeypatch):
    """Two runs keep what they measured of their machine; `trellis report` while a run writes its own."""

    def beside(_):
        monkeypatch.undo()
        write_whole(tmp_path / "report.html", "a second one")
        assert (tmp_path / "report.html").read_text() == "a second one"

    monkeypatch.setattr(os, "fsync", beside)
    write_whole(tmp_path / "report.html", "first")
    assert (tmp_path / "report.html").read_text() == "first" and len([*tmp_path.iterdir()]) == 1


def test_the_fix_of_a_stop_says_what_the_same_command_does(tmp_path):
    full = OSError(28, "No space left on device", "a/metrics.jsonl")
    fix = lambda: explain(full, told_of_last_good(tmp_path / "checkpoints")).fix
    assert fix().endswith(", which continues after the newest of them, if there is one")
    (tmp_path / "checkpoints").mkdir()
    assert fix() == "free some space, then run the same command again, which starts over"
    (tmp_path / "checkpoints" / "step-00000003").mkdir()
    (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").touch()
    assert fix() == "free some space, then run the same command again, which continues after that checkpoint"


def test_a_first_checkpoint_without_room_leaves_nothing_to_continue_after(tmp_path, monkeypatch):
    def full(folder, process):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(checkpoints, "write_checksums", full)
    with checkpoints.Checkpoints(tmp_path) as saved:
        saved.save(2, {"x": jnp.ones(2)})
        with pytest.raises(checkpoints.NoRoom) as error:
            saved.wait()
    assert error.value.fix == "free some space, then run the same command again, which starts over"
