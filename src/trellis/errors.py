"""Trellis's errors. All are `TrellisError`s; one that the user can fix ends a command without a traceback."""

import difflib
from collections.abc import Iterable


class TrellisError(Exception):
    """The base of every error that Trellis raises on its own: a rule was broken, and the message says how to fix it.

    A command that ends with one has its `exit_code`, and prints no traceback.
    """

    exit_code = 2


class UserError(TrellisError):
    """The user's input is wrong. The message has four parts.

    Args:
        rule: the rule that was broken, one sentence.
        seen: the values that broke it.
        where: the file, option, field or call they came from.
        fix: what to do about it.

    >>> print(UserError("A batch must be split evenly.", seen="batch_size=7, data=4", where="--batch_size",
    ...                 fix="use 4 or 8"))
    A batch must be split evenly.
      seen:  batch_size=7, data=4
      where: --batch_size
      fix:   use 4 or 8
    """

    def __init__(self, rule: str, *, seen: object, where: str, fix: str):
        self.rule, self.seen, self.where, self.fix = rule, shortened(str(seen)), shortened(where), fix
        super().__init__(f"{rule}\n  seen:  {self.seen}\n  where: {self.where}\n  fix:   {fix}")

    def __reduce__(self):
        return _rebuild, (type(self), self.rule, self.seen, self.where, self.fix)


def shortened(text: str, most: int = 1000) -> str:
    """A text, cut off at its end if it is longer than `most` characters.

    >>> shortened("0123456789", most=8)
    '01234...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _rebuild(cls: type[UserError], rule: str, seen: str, where: str, fix: str) -> UserError:
    return cls(rule, seen=seen, where=where, fix=fix)


def did_you_mean(word: str, known: Iterable[object], shown: str = "{}") -> str:
    """The end of a fix: the nearest known words, or all of them if none is near.

    Dotted names are near if their last parts are.

    >>> did_you_mean("learning_rte", ["learning_rate", "steps"])
    'did you mean `learning_rate`?'
    >>> did_you_mean("mesh.modl", ["mesh.model", "mesh.data"], shown="--{}")
    'did you mean `--mesh.model`?'
    >>> did_you_mean("zzz", ["b", "a"])
    'use one of: a, b'
    """
    words = sorted({str(k) for k in known})
    ends = [w.rpartition(".")[2] for w in words]
    near = difflib.get_close_matches(word.rpartition(".")[2], sorted(set(ends)), n=3, cutoff=0.6)
    found = [shown.format(w) for n in near for w, end in zip(words, ends, strict=True) if end == n]
    if found:
        return "did you mean " + " or ".join(f"`{f}`" for f in found) + "?"
    return "use one of: " + ", ".join(map(shown.format, words)) if words else "there is nothing to choose from here"
