"""Operations that cut, join or reverse dimensions, or go along them: which dimensions each touches, and what compilers
move if mesh axes slice one of these."""

from collections.abc import Callable

from trellis.program.reading import Operation


def _cut(operation: Operation) -> list[int]:
    before, after = operation.operands[0].shape, operation.results[0].shape
    strides = operation.params.get("strides") or (1,) * len(before)
    return [i for i, (a, b) in enumerate(zip(before, after)) if a != b and not (strides[i] > 1 and a == b * strides[i])]


def _padded(operation: Operation) -> list[int]:
    """Also one that is cut off at one end by as much as it gets at the other."""
    return [i for i, config in enumerate(operation.params["padding_config"]) if any(config)]


def _updated(operation: Operation) -> list[int]:
    whole, update = (value.shape for value in operation.operands[:2])
    return [i for i, (a, b) in enumerate(zip(whole, update)) if a != b]


def _all(operation: Operation) -> list[int]:
    return list(range(len(operation.operands[0].shape)))


def _one(name: str) -> Callable[[Operation], list[int]]:
    return lambda operation: [operation.params[name]]


RESHAPING: dict[str, tuple[str, Callable[[Operation], list[int]]]] = {
    "slice": ("permute", _cut),
    "pad": ("permute", _padded),
    "dynamic_slice": ("all-gather", _cut),
    "dynamic_update_slice": ("all-gather", _updated),
    "split": ("permute", _one("axis")),
    "concatenate": ("all-to-all", _one("dimension")),
    "rev": ("permute", lambda operation: list(operation.params["dimensions"])),
    "sort": ("all-gather", _one("dimension")),
    "top_k": ("all-gather", _all),  # compilers cut none, but where they make a sort of it (a TPU's, of small arrays)
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), ("all-gather", _one("axis"))),
}
