"""Writes the constraints file of the Python that runs it: `make lock`.

pip resolves the package with its extras from the index of the day, installs nothing, and reports what it chose.
"""

import json
import pathlib
import subprocess
import sys

EXTRAS = "test,wandb"  # test has the others, except those that bring an accelerator's libraries


def resolve() -> list[tuple[str, str]]:
    """Names and versions that pip would install into an empty environment."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    report = subprocess.run(
        [*pip, "--dry-run", "--ignore-installed", "--report", "-", f".[{EXTRAS}]"], check=True, stdout=subprocess.PIPE
    )
    packages = [item["metadata"] for item in json.loads(report.stdout)["install"]]
    names = {p["name"].lower().replace("_", "-"): p["version"] for p in packages}
    # A local version ("2.13.0+cpu") names a build, not a release: every build of the release will do.
    # The CUDA libraries that some builds of torch bring are theirs to choose, and JAX's own choice differs.
    brought = ("nvidia-", "cuda-", "triton", "trellis")
    return sorted((n, v.split("+")[0]) for n, v in names.items() if not n.startswith(brought))


if __name__ == "__main__":
    python = ".".join(map(str, sys.version_info[:2]))
    path = pathlib.Path(__file__).parent / f"python{python}.txt"
    pins = "".join(f"{name}=={version}\n" for name, version in resolve())
    path.write_text(f"# Known to work together on Python {python}. Written by `make lock`.\n{pins}")
    print(path)
