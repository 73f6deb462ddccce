"""Old checkpoints are removed, and nothing else; and what a new one has before that."""

import os
import pathlib
import shutil

import jax.numpy as jnp
import pytest

from trellis.checkpoints.checkpoints import MANIFEST, Checkpoints


def test_a_checkpoint_that_was_moved_and_linked_stays_where_it_is(tmp_path):
    """The rule removes the link. One whose disk is not mounted is no half of a checkpoint."""
    state, moved = {"x": jnp.ones(4)}, tmp_path / "archive"
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, keep_latest=1) as saved:
        saved.save(1, state)
        saved.wait()
        shutil.move(saved.path(1), moved)
        saved.path(1).symlink_to(moved)
        assert saved.steps() == [1]
        saved.save(2, state)
        saved.wait()
        assert saved.steps() == [2] and not saved.path(1).is_symlink()
    assert (moved / MANIFEST).is_file() and (moved / "state").is_dir()
    saved.path(1).symlink_to(tmp_path / "not mounted")
    with Checkpoints(folder) as saved:
        assert saved.steps() == [2] and saved.path(1).is_symlink()


def test_the_disk_has_all_files_before_their_manifest(tmp_path, monkeypatch):
    """Else a loss of power leaves a manifest of files that are empty, and the one before may be removed."""
    settled, settle = [], os.fsync

    def noted(descriptor):
        settled.append(os.fstat(descriptor).st_ino)
        settle(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    (tmp_path / "run.yaml").write_text("steps: 3")
    with Checkpoints(tmp_path / "checkpoints", copy=(tmp_path / "run.yaml",)) as saved:
        saved.save(3, {"x": jnp.ones(4)})
    files = [path for path in saved.path(3).rglob("*") if path.is_file()]
    assert len(files) > 5 and {path.stat().st_ino for path in files} <= {*settled}
    assert settled[-1] == (saved.path(3) / MANIFEST).stat().st_ino


def test_a_checkpoint_that_cannot_be_read_now_is_not_set_aside(tmp_path, monkeypatch):
    state = {"x": jnp.ones(4)}
    with Checkpoints(tmp_path) as saved:
        saved.save(1, state)
        saved.save(2, state)
        saved.wait()

        def refuse(path, *_, **__):
            raise OSError(24, "Too many open files", str(path))

        with monkeypatch.context() as patched, pytest.raises(OSError, match="Too many open files"):
            patched.setattr(pathlib.Path, "read_text", refuse)
            saved.restore(state)
        assert saved.steps() == [1, 2] and saved.restore(state).step == 2


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_a_run(tmp_path, monkeypatch):
    """NFS keeps the files that a reader has open, under other names, and with them their folder."""

    def refuse(folder, *_, **__):
        raise OSError(39, "Directory not empty", str(folder))

    told, state = [], {"x": jnp.ones(4)}
    with Checkpoints(tmp_path, keep_latest=1, report=told.append) as saved:
        saved.save(1, state)
        saved.wait()
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", refuse)
            saved.save(2, state)
            saved.wait()
        assert saved.steps() == [2] and "step-00000001 is not removed whole" in told[0]
    with Checkpoints(tmp_path) as saved:
        assert not saved.path(1).exists()
