"""Every example runs as a user would run it, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
