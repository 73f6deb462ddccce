"""A dictionary that cannot be changed."""

import typing


class FrozenMap(dict):
    """A dictionary that cannot be changed, so that a configuration has a hash and stays what it was."""

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def _refuse(self, *_: object, **__: object) -> typing.NoReturn:
        raise TypeError("a configuration cannot be changed: make a changed copy with dataclasses.replace")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse

    def __reduce__(self):
        return FrozenMap, (dict(self),)
