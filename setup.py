"""What pyproject.toml cannot say: the README as a package index shows it, without links that would lead nowhere there.

An index shows the text alone. Links to other files of the project become their words, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def for_an_index(text: str) -> str:
    """``text`` without what only the project's own directory has."""
    text = re.sub(r"<!--.*?-->\n", "", text, flags=re.S)
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.M)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


if __name__ == "__main__":
    setup(
        long_description=for_an_index((ROOT / "README.md").read_text()),
        long_description_content_type="text/markdown",
    )
