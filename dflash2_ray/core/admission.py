"""What no engine could run is refused here, before it reaches a worker: one check for client, ingress and step loop."""

from dflash2_ray.core.messages import RequestSpec
from dflash2_ray.errors import ContextLengthExceeded, InvalidRequest


def check_spec(spec: RequestSpec, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse what no engine of this vocabulary and context could run. Raises InvalidRequest or ContextLengthExceeded."""
    prompt = spec.prompt_token_ids
    if not prompt:
        raise InvalidRequest("the prompt holds no token; send at least one", param="prompt")
    for name, ids in (
        ("prompt", prompt),
        ("prompt", spec.output_token_ids),
        ("stop_token_ids", spec.params.stop_token_ids),
        ("allowed_token_ids", spec.params.allowed_token_ids or ()),
        ("logit_bias", [token_id for token_id, _ in spec.params.logit_bias]),
        ("bad_words", [token_id for word in spec.params.bad_words_token_ids for token_id in word]),
    ):
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{name}: token ids are integers from 0 to {vocab_size - 1}, got {token_id!r}", param=name
                )
    if len(prompt) >= max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens; the context of {max_model_len} leaves no room for a completion token"
        )
    if spec.params.n != 1:
        raise InvalidRequest(f"n: one request is one choice; expected 1, got {spec.params.n}", param="n")
    asked = spec.params.max_tokens
    if asked is not None and len(prompt) + asked > max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens and max_tokens is {asked}: {len(prompt) + asked} in all, but the context "
            f"holds {max_model_len}"
        )
