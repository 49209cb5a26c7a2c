"""Builds SVG files, for charts and drawings of schedules."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from evener.core.text import printable

WHITE = '<rect width="100%" height="100%" fill="white"/>'
"""A shape that fills the page with white. Put it first: some viewers show SVG on a dark background."""


def svg_page(width: float, height: float, shapes: Iterable[str], attributes: str = 'font-size="12"') -> str:
    """Returns the text of an SVG file.

    Args:
        width: The width in pixels.
        height: The height in pixels.
        shapes: The SVG elements on the page.
        attributes: Further attributes of the ``svg`` element, such as the font size.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" {attributes}>'
    )
    return "\n".join([head, *shapes, "</svg>", ""])


def svg_text(text: str) -> str:
    """Returns ``text`` escaped for SVG, with control characters escaped."""
    return escape(printable(text))
