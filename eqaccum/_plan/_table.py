"""Text in columns."""

from collections.abc import Sequence


def grid(rows: Sequence[tuple[str, ...]], align: str) -> str:
    """Rows of text in columns: `align` holds `<` (left) or `>` (right) for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}"
            for cell, side, width in zip(row, align, widths, strict=True)
        ).rstrip()
        for row in rows
    )
