"""Text in columns, and tables for notebooks."""

import html
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


def html_table(caption: str, rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of text as an HTML table, the first row as its head; all text is escaped.

    Columns in which every cell below the head is empty are left out.
    """
    head, *body = rows
    kept = [i for i in range(len(head)) if any(row[i] for row in body)]
    cells = [_row("th", head, kept), *(_row("td", row, kept) for row in body)]
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead>{cells[0]}</thead><tbody>{''.join(cells[1:])}</tbody></table>"
    )


def _row(tag: str, row: tuple[str, ...], kept: Sequence[int]) -> str:
    cells = "".join(f"<{tag}>{html.escape(row[i])}</{tag}>" for i in kept)
    return f"<tr>{cells}</tr>"
