"""Tables that people read in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(cells: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield lines with the columns aligned; the last one runs free."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
