"""A line of progress on standard error: documents, tokens, MB a second, time left."""

import contextlib
import sys
import time

from trellis.figures.numbers import duration


class TokenizingProgress:
    """Repaints a line on a terminal; elsewhere prints one every half minute.

    Args:
        sizes: bytes of each input file as stored, None if unknown.
        done: the cursor that the work starts from.
    """

    def __init__(self, sizes: list[int | None], *, enabled: bool, done: tuple[int, int, int] = (0, 0, 1)):
        self._before = [0]
        for size in sizes:
            self._before.append(self._before[-1] + (size or 0))
        self._known = bool(sizes) and all(size is not None for size in sizes)
        self._enabled, self._terminal = enabled, sys.stderr.isatty()
        self._began = self._painted = time.monotonic()
        self._from = self._before[min(done[0], len(sizes))]
        self._bytes = 0

    def update(self, block, encoded, writer) -> None:
        """Counts a block."""
        self._bytes += encoded.text_bytes
        now = time.monotonic()
        if self._enabled and now - self._painted >= (0.2 if self._terminal else 30):
            self._painted = now
            self._print(self.line(writer.counts, self._before[block.file] + block.raw, now - self._began))

    def line(self, counts: dict, position: int, seconds: float) -> str:
        """The text of the line.

        >>> counts = {"num_documents": 12, "num_tokens": 3456}
        >>> TokenizingProgress([1_000_000], enabled=False).line(counts, 250_000, 10.0)
        '12 documents  3,456 tokens  0.0 MB/s  25 %  30 s left'
        """
        text = (
            f"{counts['num_documents']:,} documents  {counts['num_tokens']:,} tokens  "
            f"{self._bytes / 1e6 / max(seconds, 1e-9):.1f} MB/s"
        )
        total, done = self._before[-1], position - self._from
        if self._known and total and done > 0:
            left = seconds * (total - position) / done
            text += f"  {100 * position / total:.0f} %  {duration(max(left, 0))} left"
        return text

    @contextlib.contextmanager
    def note(self, text: str):
        """Says what is being done for a while."""
        if self._enabled:
            self._print(text + " ...")
        yield

    def _print(self, text):
        print(
            f"\r\x1b[K{text}" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._enabled and self._terminal:
            print(file=sys.stderr)
