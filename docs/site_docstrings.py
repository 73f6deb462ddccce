"""Docstrings on the site: examples as code, what operations say of themselves as lists. An extension of griffe."""

import re

from griffe import Extension

# What an operation says of its names, its gradient and what it moves, as lines of its docstring.
SAID = re.compile(r"^( *)(Names|Gradient|Moves): (.*(?:\n\1 +\S.*)*)", re.MULTILINE)
# From a line that begins with `>>>` to the next empty line.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring with its examples between fences.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2").replace("`", "'").replace(">>>", "In:"))
    Adds.
    <BLANKLINE>
    '''pycon
    In: 1 + 1
    2
    '''
    """
    return EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


def listed(text: str) -> str:
    """A docstring with what an operation says of its names, its gradient and what it moves as a list.

    >>> print(listed("Sums.\\n\\nNames: others.\\nMoves: an\\n    all-reduce."))
    Sums.
    <BLANKLINE>
    - **Names:** others.
    - **Moves:** an all-reduce.
    """
    return SAID.sub(lambda found: f"{found[1]}- **{found[2]}:** {' '.join(found[3].split())}", text)


class Examples(Extension):
    """Fences the examples of every object that is read, and lists what operations say."""

    def on_object(self, *, obj, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = listed(fenced(obj.docstring.value))
