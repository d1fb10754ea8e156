"""`/tokenize` and `/detokenize`: what this model's tokenizer and chat template make of a text. It must not know engines."""

from collections.abc import Mapping
from typing import Any

from dflash2_ray.errors import InvalidRequest
from dflash2_ray.serving.openai_api import flag
from dflash2_ray.text.text_side import TextSide

TOKENIZE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "model": {"type": ["string", "null"]},
        "prompt": {"type": ["string", "null"]},
        "messages": {"type": ["array", "null"]},
        "tools": {"type": ["array", "null"]},
        "add_special_tokens": {"type": ["boolean", "null"]},
        "return_token_strs": {"type": ["boolean", "null"]},
    },
}
DETOKENIZE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "model": {"type": ["string", "null"]},
        "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    },
    "required": ["tokens"],
}


def tokenize(text: TextSide, body: Any, max_model_len: int) -> dict[str, Any]:
    """Token ids of a prompt, or of messages in the chat template. Raises InvalidRequest, naming the field."""
    known = _known(body, TOKENIZE_SCHEMA)
    prompt, messages = known.get("prompt"), known.get("messages")
    if (prompt is None) == (messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if messages is not None:
        ids = text.prepare(None, None, messages, {"tools": known.get("tools")}).token_ids
    elif isinstance(prompt, str):
        ids = text.tokenizer.encode(prompt, flag(known, "add_special_tokens", True))
    else:
        raise InvalidRequest(f"prompt must be a string, got {type(prompt).__name__}", param="prompt")
    shown = [text.tokenizer.token_text(token) for token in ids] if flag(known, "return_token_strs") else None
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": shown}


def detokenize(text: TextSide, body: Any, vocab_size: int) -> dict[str, Any]:
    """The text of token ids, special tokens too. Raises InvalidRequest, naming the field."""
    tokens = _known(body, DETOKENIZE_SCHEMA).get("tokens")
    if not isinstance(tokens, list):
        raise InvalidRequest(f"tokens must be a list of token ids, got {type(tokens).__name__}", param="tokens")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"tokens: token ids are integers from 0 to {vocab_size - 1}, got {str(token)[:80]!r}", param="tokens"
            )
    return {"prompt": text.tokenizer.decode(tokens, skip_special_tokens=False)}


def _known(body: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise InvalidRequest(f"the body must be a JSON object, got {type(body).__name__}")
    unknown = sorted(str(name) for name in set(body) - set(schema["properties"]) if body[name] is not None)
    if unknown:
        raise InvalidRequest(f"not offered: {', '.join(unknown)[:200]}", param=unknown[0][:80])
    return body
