"""Where checkpoints can be: in a folder of a file system."""

import jax.numpy as jnp
import pytest

from trellis.checkpoints.checkpoints import Checkpoints
from trellis.errors import UserError


@pytest.mark.parametrize(
    "url, fix", [("s3://bucket/a", "mount the bucket"), ("file:///a", "write /a"), ("memory://a", "")]
)
def test_a_url_is_no_folder_of_checkpoints(tmp_path, monkeypatch, url, fix):
    """Of `s3://bucket/a`, Python makes `s3:/bucket/a`, a folder here."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="must be in a file system") as refused:
        Checkpoints(url)
    assert refused.value.where == url and fix in refused.value.fix
    assert not any(tmp_path.iterdir())


def test_a_link_that_leads_nowhere_and_a_file_are_no_folder_of_checkpoints(tmp_path):
    """As of checkpoints that were moved to a disk which is not mounted."""
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(tmp_path / "elsewhere")
    file.write_text("")
    for path, seen, fix in (
        (link, f"a link to {tmp_path}/elsewhere, which is not there", "mount"),
        (file, "a file", ""),
    ):
        with pytest.raises(UserError, match=f"must be in a folder(.|\n)*seen:  {seen}\n") as refused:
            Checkpoints(path)
        assert refused.value.where == str(path) and fix in refused.value.fix
    assert not (tmp_path / "elsewhere").exists()


def test_a_path_may_go_up(tmp_path, monkeypatch):
    """`trellis export ../runs/a` ended in an error of TensorStore's, which reads single entries."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with Checkpoints("../a/checkpoints") as saved:
        saved.save(1, {"x": jnp.arange(3)})
        assert saved.read(1, "x").tolist() == [0, 1, 2] and (tmp_path / "a" / "checkpoints").is_dir()
