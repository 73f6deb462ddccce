"""The first lines of the `trellis` command, outside the package: nothing is imported before a process starts again."""

import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path

TUNABLE = "glibc.malloc.hugetlb=1"
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages() -> None:
    """Replaces this process by itself with glibc told to ask for huge pages; returns where that is done or no use.

    XLA's CPU client takes and gives back the memory of every intermediate value. In small pages that is about a
    million page faults for each few steps, a third of the time of a step of a small model; glibc reads its tunables
    only when a process starts. Call it early: what was imported before is imported again.
    """
    environment = huge_page_environment(os.environ, _enabled())
    if environment is None:
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def huge_page_environment(environment: Mapping[str, str], enabled: str) -> dict[str, str] | None:
    """The environment to start again with, or None if nothing is to be done.

    Args:
        environment: of this process.
        enabled: what the kernel says of transparent huge pages, as `always [madvise] never`; "" if nothing.

    >>> huge_page_environment({"GLIBC_TUNABLES": "glibc.malloc.perturb=1"}, "always [madvise] never")
    {'GLIBC_TUNABLES': 'glibc.malloc.perturb=1:glibc.malloc.hugetlb=1'}
    >>> huge_page_environment({}, "always madvise [never]")
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "[madvise]" not in enabled or "glibc.malloc.hugetlb" in tunables:
        return None
    return {**environment, "GLIBC_TUNABLES": f"{tunables}:{TUNABLE}" if tunables else TUNABLE}


def _enabled() -> str:
    """What the kernel says, "" where there is no Linux with glibc."""
    if sys.platform != "linux" or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return ""
    return _PAGES.read_text() if _PAGES.exists() else ""


def main() -> int:
    """Starts training again with huge pages where that helps, then hands over to `trellis.commands.line`.

    What is imported stays: that Python looks through it for garbage again and again takes a fifth of the start.
    """
    if sys.argv[1:2] == ["train"]:
        use_huge_pages()

    gc.disable()
    from trellis.commands.line import main as command

    gc.freeze()
    gc.enable()
    return command()


if __name__ == "__main__":
    sys.exit(main())
