"""Text to token ids and back, on the `tokenizers` library. It must not know requests or HTTP."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from dflash2_ray.errors import CheckpointError


class Tokenizer:
    """A fast tokenizer read from a checkpoint folder's `tokenizer.json`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        backend.no_truncation()  # a checkpoint may carry the settings of its training
        backend.no_padding()

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json`. Raises CheckpointError when it is missing or unreadable."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"tokenizer: expected {path}, got no such file; a fast tokenizer (tokenizer.json) is needed")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises a bare Exception
            raise CheckpointError(f"tokenizer: {path} cannot be read: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens`: a leading BOS where the model has one (not behind a chat template)."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that form no character become U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
