"""Choices that are faster on one machine and slower on another, for the program that is being traced."""

import contextlib
from collections.abc import Generator
from typing import Literal, NamedTuple

import jax


class Tuned(NamedTuple):
    """How loops over layers are compiled, and how a CPU's kernels are cut up.

    Attributes:
        attention_chunk: how many queries attention computes at a time; None: the kernel's own choice.
        loss_chunk: how many tokens the loss computes at a time; None: the kernel's own choice.
        turned: which operand of a weight gradient's product is copied transposed before it.
        scan_layers: whether layers are a loop of the compiled program, or written out; None: what is faster on the
            platform, see `longest_written_out`. The other choices are for CPUs alone.
    """

    attention_chunk: int | None = None
    loss_chunk: int | None = None
    turned: Literal["narrower", "none"] = "narrower"
    scan_layers: bool | None = None


_USUAL = Tuned()
_told = jax.make_user_context(None)


def tuned() -> Tuned:
    """The choices in force here."""
    return _told.value or _USUAL


@contextlib.contextmanager
def tuned_for(choice: Tuned) -> Generator[None]:
    """Makes this choice for what is traced inside; for backward passes only if they are traced inside too.

    JAX's cache keeps the traces of each choice apart.
    """
    with _told(choice if choice != _USUAL else None):
        yield
