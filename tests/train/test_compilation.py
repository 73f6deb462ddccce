"""Programs that are kept between runs: what goes wrong with that is told in one line, and stops nothing."""

import os
import platform
import signal
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

from tests.compiler import reads_behind_arrays
from trellis.errors import UserError
from trellis.train import compilation, use_persistent_cache
from trellis.train.compilation import options_for


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


def test_a_program_that_reads_behind_its_arrays_is_not_made():
    level = "xla_backend_optimization_level"
    with pytest.raises(UserError, match=f"{level} 0") as caught:
        options_for("cpu", {level: "0"})
    assert f"compiler_options.{level}" in str(caught.value)
    assert options_for("cpu", {level: 1}, devices=8) == {level: "1"}
    assert options_for("tpu", {level: "0"}) == {level: "0"}


READS_AT_THE_END = """
import ctypes, mmap, sys
import jax, jax.numpy as jnp, numpy as np

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
page = mmap.PAGESIZE
start = libc.mmap(None, 3 * page, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
assert libc.mprotect(start + 2 * page, page, 0) == 0
last = np.frombuffer((ctypes.c_char * (2 * page)).from_address(start), np.float32).reshape(-1, 32)
last[:] = 1
last = jax.device_put(last, may_alias=True)
assert last.unsafe_buffer_pointer() == start
few = jnp.zeros(last.shape)
choose = jax.jit(lambda x, few, many: jnp.where(few <= many, x, 0.0)).lower(last, few, few)
print(choose.compile({"xla_backend_optimization_level": sys.argv[1]})(last, few, few + 1).sum(), flush=True)
"""


WITHOUT_512 = "--xla_cpu_max_isa=AVX2"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="x86's, shown by Linux's mmap")
@pytest.mark.parametrize(
    "level, flags, status",
    [
        ("0", WITHOUT_512, -signal.SIGSEGV),
        ("0", "", -signal.SIGSEGV if reads_behind_arrays() else 0),
        ("0", f"{WITHOUT_512} --xla_backend_extra_options=-fast-isel=0", 0),
        ("1", WITHOUT_512, 0),
    ],
    ids=["without AVX-512", "as this processor has it", "as tests are", "at level 1"],
)
def test_what_xla_reads_behind_an_array(level, flags, status):
    """An array that ends where memory ends. If the first fails, XLA is mended: nothing need be refused, and no flag set
    for tests."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", READS_AT_THE_END, level], env=environment, capture_output=True)
    assert done.returncode == status, done.stderr.decode()[-2000:]
