"""Examples of docstrings as code: an extension of griffe, which reads them for the site's reference of Python."""

import re

from griffe import Extension

# From a line that begins with `>>>` to the next empty line.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring with its examples between fences.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2").replace("`", "'"))
    Adds.
    <BLANKLINE>
    '''pycon
    >>> 1 + 1
    2
    '''
    """
    return EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


class Examples(Extension):
    """Fences the examples of every object that is read."""

    def on_object(self, *, obj, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
