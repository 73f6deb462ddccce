"""Programs that are kept between runs: what goes wrong with that is told in one line, and stops nothing."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from trellis.train import compilation, use_persistent_cache


@pytest.fixture
def settings(monkeypatch):
    """JAX's, and how warnings are shown, as they were."""
    names = (
        "jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs",
    )  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    yield monkeypatch.setattr
    for name, value in before.items():
        jax.config.update(name, value)
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def test_programs_that_cannot_be_kept_are_told_once(tmp_path, settings, capsys):
    shown, folder = [], tmp_path / "compiled"
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        settings(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
        settings(compilation, "keep_what_loads_right", lambda: True)
        for _ in range(2):
            use_persistent_cache(folder)
        folder.rmdir()
        folder.touch()  # neither read nor written, as on a disk that is full or gone
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        for number in range(3):
            jax.jit(lambda x, number=number: x + number)(jnp.ones(2))
        warnings.warn("another", stacklevel=1)
    (one,) = capsys.readouterr().err.splitlines()
    assert one.startswith("kept programs are not read: FileExistsError: ")
    assert shown == ["another"]


def test_a_folder_that_cannot_be_made(tmp_path, settings, capsys):
    (tmp_path / "file").touch()
    settings(compilation, "keep_what_loads_right", lambda: True)
    use_persistent_cache(tmp_path / "file" / "compiled")
    assert not jax.config.jax_enable_compilation_cache
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compiled programs are not kept: [Errno 20] Not a directory")
