"""Writes the constraints files of all Pythons: `make lock`.

uv resolves the package with its extras from the index of the day, for each Python whether it is here or not.
"""

import pathlib
import subprocess
import sys

PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = ("test", "wandb")  # test has the others, except those that bring an accelerator's libraries
HERE = pathlib.Path(__file__).parent


def resolve(python: str) -> list[str]:
    """What would be installed into an empty environment of a Python, as `name==version`."""
    uv = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--python-version", python, "--quiet"]
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    command = [*uv, *extras, "--no-annotate", "--no-header"]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=HERE.parent).stdout
    # A local version ("2.13.0+cpu") names a build, not a release: every build of the release will do.
    pins = [line.split("+")[0] for line in out.splitlines() if "==" in line]
    # The CUDA libraries that some builds of torch bring are theirs to choose, and JAX's own choice differs.
    brought = ("nvidia-", "cuda-", "triton", "trellis")
    return sorted((pin for pin in pins if not pin.startswith(brought)), key=lambda pin: pin.split("=="))


if __name__ == "__main__":
    for python in PYTHONS:
        path = HERE / f"python{python}.txt"
        pins = "\n".join(resolve(python))
        path.write_text(f"# Known to work together on Python {python}. Written by `make lock`.\n{pins}\n")
        print(path.relative_to(HERE.parent))
