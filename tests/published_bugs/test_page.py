"""What the code of docs/published-bugs.md prints is what the page says."""

import contextlib
import io
import linecache
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "published-bugs.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_page_prints_what_it_says():
    names: dict = {"__name__": "__main__"}
    printed = io.StringIO()
    checked = 0
    try:
        for language, code in FENCE.findall(PAGE.read_text()):
            if language == "python":
                linecache.cache["example.py"] = (len(code), None, code.splitlines(True), "example.py")
                with contextlib.redirect_stdout(printed):
                    exec(compile(code, "example.py", "exec"), names)
            elif language == "text":
                said = printed.getvalue().replace(NOTE, "")
                assert said.split() == code.split()
                printed = io.StringIO()
                checked += 1
    finally:
        linecache.cache.pop("example.py", None)
    assert checked >= 8
    assert not printed.getvalue()


# JAX says this once in each exception that passes through it.
NOTE = (
    "--------------------\nFor simplicity, JAX has removed its internal frames from the traceback of the following "
    "exception. Set JAX_TRACEBACK_FILTERING=off to include these."
)
