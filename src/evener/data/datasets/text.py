"""A data set for language models: windows of characters from any text file."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from evener.errors import ConfigurationError, DataError
from evener.files import read_named


class CharacterText(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``context`` characters, each with the same window one character later as its target.

    An item is ``(tokens, next_tokens)``, both int64 ``(context,)``. Windows do not overlap: window ``i`` starts at
    character ``i * context`` of its part. So an epoch predicts each character once, except the first of the part and
    fewer than ``context`` at its end. The data set stores only the text, with one or four bytes a character.

    Args:
        path: A file in UTF-8. Its first ``fraction`` is the training part, the rest the test part. Both parts share
            one vocabulary.
        context: Characters in a window.
        train: True for the training part, False for the test part.
        fraction: The fraction of the text in the training part, above 0 and below 1.

    Raises:
        DataError: If the file is missing, not UTF-8, or too short for one window.
        ConfigurationError: If ``context`` or ``fraction`` makes no sense.
    """

    def __init__(self, path: Path | str, context: int, train: bool, fraction: float = 0.9) -> None:
        if context < 1:
            raise ConfigurationError(f"a window needs at least 1 character, not {context}")
        if not 0 < fraction < 1:
            raise ConfigurationError(f"the training part must be between 0 and 1 of a text, not {fraction}")
        characters = np.frombuffer(_read(Path(path)).encode("utf-32-le"), dtype=np.uint32)
        vocabulary, codes = np.unique(characters, return_inverse=True)
        split = int(len(codes) * fraction)
        part = codes[:split] if train else codes[split:]
        if len(part) <= context:
            part_name = "training part" if train else "test part"
            raise DataError(
                f"{path} is too short: its {part_name} has {len(part)} characters, "
                f"but a window of {context} needs {context + 1}; use a longer text or a smaller context"
            )
        self.context = context
        self.vocabulary = "".join(map(chr, vocabulary))
        """The distinct characters of the file, sorted. A token is an index into this string."""
        self._codes = torch.from_numpy(part.astype(np.uint8 if len(vocabulary) <= 256 else np.int32))

    def __len__(self) -> int:
        return (len(self._codes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index % len(self) * self.context
        window = self._codes[start : start + self.context + 1].long()
        return window[:-1], window[1:]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*self.gather_batch(torch.tensor(indices)), strict=True))

    def gather_batch(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the windows ``samples``, int64 ``(n,)``, as two tensors ``(n, context)``: tokens and next tokens."""
        places = samples[:, None] * self.context + torch.arange(self.context + 1)
        windows = self._codes[places].long()
        return windows[:, :-1], windows[:, 1:]

    def decode(self, tokens: Tensor) -> str:
        """Returns the text of ``tokens``, int64 ``(n,)``."""
        return "".join(self.vocabulary[token] for token in tokens.tolist())


def _read(path: Path) -> str:
    try:
        text = read_named(path, sys.maxsize)
    except OSError as error:
        raise DataError(
            f"the text {path} cannot be read: {error.strerror}; give the path of a file"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}; "
            f"convert it, for instance with iconv -f latin1 -t utf-8"
        ) from error
    if not text:
        raise DataError(f"{path} is empty; give a text file")
    return text
