import sys

from trellis_start import allocator_env


def test_allocator_of_a_training_process(tmp_path, monkeypatch):
    """Large pages for training on a CPU, once, and what the user has set is kept."""
    monkeypatch.setattr(sys, "platform", "linux")
    env = allocator_env(["train", "tiny"], {"A": "b", "GLIBC_TUNABLES": "x=1"}, tmp_path)
    assert env is not None and env["A"] == "b" and env["GLIBC_TUNABLES"].startswith("x=1:glibc.malloc.hugetlb=1:")
    assert allocator_env(["train"], env, tmp_path) is None
    assert allocator_env(["train"], {"TRELLIS_ALLOCATOR": "default"}, tmp_path) is None
    assert allocator_env(["plan", "tiny"], {}, tmp_path) is None
    (tmp_path / "nvidia0").touch()
    assert allocator_env(["train"], {}, tmp_path) is None
    assert allocator_env(["train"], {"JAX_PLATFORMS": "cpu"}, tmp_path) is not None
