"""A page of SVG, on which charts and schedules are drawn, and words on it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from evener.core.text import printable

WHITE = '<rect width="100%" height="100%" fill="white"/>'
"""The first shape of a page that is white wherever it is shown."""


def svg_page(width: float, height: float, shapes: Iterable[str], attributes: str = 'font-size="12"') -> str:
    """Returns a file of SVG.

    Args:
        attributes: Those of the page, as SVG has them, beyond its size and the family of its font.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" {attributes}>'
    )
    return "\n".join([head, *shapes, "</svg>", ""])


def svg_text(text: str) -> str:
    """Returns the text for a shape: no character of it is taken for SVG or obeyed by who shows it."""
    return escape(printable(text))
