"""What is faster on one CPU and slower on another, as the program that is being traced was told."""

import contextlib
from collections.abc import Generator
from typing import Literal, NamedTuple

import jax


class Tuned(NamedTuple):
    """How a CPU's kernels are cut; accelerators ask for none of this.

    Attributes:
        attention_chunk: queries of attention that are computed at a time; None for the kernel's own.
        loss_chunk: tokens of the loss that are computed at a time; None for the kernel's own.
        turned: which operand of a weight gradient's product is copied transposed before it.
    """

    attention_chunk: int | None = None
    loss_chunk: int | None = None
    turned: Literal["narrower", "none"] = "narrower"


_USUAL = Tuned()
_told = jax.make_user_context(None)


def tuned() -> Tuned:
    """What holds where this is asked."""
    return _told.value or _USUAL


@contextlib.contextmanager
def tuned_for(choice: Tuned) -> Generator[None]:
    """What is traced within it is made so, backward passes only as far as they are traced within it too.

    What JAX keeps of traces is kept for each choice by itself.
    """
    with _told(choice if choice != _USUAL else None):
        yield
