"""What an error of manual mode says, apart from the line of the user's program that it names."""

import re

_LINE = re.compile(r" \(\w+\.py:\d+: .*?\)(?=: )")


def told(error, *, by_line: bool = False) -> str:
    """The text without the line.

    Args:
        error: what `pytest.raises` caught.
        by_line: whether a line must be there.
    """
    text = str(error.value)
    assert not by_line or _LINE.search(text), text
    return _LINE.sub("", text)
