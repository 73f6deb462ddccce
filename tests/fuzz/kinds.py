"""Which kind of case a seed is."""

import numpy as np

from . import broken, manual, whole
from .case import Case


def draw(seed: int, many: bool = False) -> Case:
    """The case of a seed: three in five of whole arrays, one of slices, one that breaks a rule.

    Args:
        seed: what to draw from.
        many: whether it is for 9 to 24 devices, and not for up to 8.
    """
    share = np.random.default_rng([seed, 0]).random()
    if share < 0.2:
        return broken.draw(seed, many)
    if share < 0.38:
        return manual.draw(seed, many)
    return whole.draw(seed, many=many)


def kind(case: Case) -> str:
    """What it is counted as."""
    if case.broken:
        return "broken"
    return f"manual, {'named' if case.named else 'plain'}" if case.manual else case.setting.mode
