"""Text to token ids and back, on the `tokenizers` library. It must not know requests or HTTP."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from dflash2_ray.errors import CheckpointError, InvalidRequest


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
            raise CheckpointError(
                f"tokenizer: expected {path}, got no such file; a fast tokenizer (tokenizer.json) is needed"
            )
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises a bare Exception
            raise CheckpointError(f"tokenizer: {path} cannot be read: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens`: a leading BOS where the model has one (not behind a chat template).

        Raises InvalidRequest for half a surrogate pair, which no UTF-8 can hold.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:  # what the library says of a str that it cannot take
            raise InvalidRequest(
                "prompt: holds half a surrogate pair (\\ud800 to \\udfff), which is no text", param="prompt"
            ) from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that form no character become U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special tokens too; U+FFFD where its bytes form no character."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> list[int]:
        """The UTF-8 bytes of one token, also of one that is part of a character."""
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return list(text.encode())
        written = self._backend.id_to_token(token_id) or ""
        if written.startswith("<0x") and written.endswith(">"):
            return [int(written[3:-1], 16)]
        if all(character in _BYTE_OF for character in written):
            return [_BYTE_OF[character] for character in written]
        return list(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write for bytes: printable Latin-1 for itself, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


REPLACEMENT = "\ufffd"
_BYTE_OF = _byte_alphabet()
