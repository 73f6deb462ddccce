"""Errors that are the user's to mend: one clear message, no traceback, exit code 2."""


class UserError(Exception):
    """The user's input broke a rule.

    A message has four parts: the rule that was broken, the values seen, where, and the fix.

    >>> print(UserError("a batch has at least one row", seen="batch_size 0", where="run.yaml", fix="set batch_size"))
    a batch has at least one row
      seen:  batch_size 0
      where: run.yaml
      fix:   set batch_size
    """

    def __init__(self, rule: str, *, seen: object, where: object, fix: str):
        self.rule, self.seen, self.where, self.fix = rule, str(seen), str(where), fix
        super().__init__(f"{rule}\n  seen:  {seen}\n  where: {where}\n  fix:   {fix}")

    def __reduce__(self):
        return _rebuild, (self.rule, self.seen, self.where, self.fix)


def _rebuild(rule, seen, where, fix):
    return UserError(rule, seen=seen, where=where, fix=fix)
