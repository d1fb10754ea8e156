"""What the checks need of whatever answers: facts, token counts, and answers to many prompts under the same options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash2_ray.errors import ConfigError
from dflash2_ray.verification.answer import Answer, Prompt


@dataclass(frozen=True)
class Facts:
    """What is verified. where: `in process` or the address of the service."""

    where: str
    model: str
    dtype: str
    device: str
    drafter: str
    num_speculative_tokens: int
    draft_width: str
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, where: str, told: Mapping[str, Any]) -> "Facts":
        """From what an engine says of itself (`LLM.describe`, `/server_info`). Raises ConfigError where nothing drafts."""
        try:
            config = told["config"]
            facts = cls(
                where=where,
                model=told["model"],
                dtype=config["dtype"],
                device=config["device"],
                drafter=str(config["drafter"]),
                num_speculative_tokens=config["num_speculative_tokens"],
                draft_width=config["draft_width"],
                max_model_len=told["max_model_len"],
                max_num_seqs=config["max_num_seqs"],
                eos_token_ids=tuple(told["eos_token_ids"]),
            )
        except (KeyError, TypeError):
            raise ConfigError(
                f"{where}: not a dflash2_ray service of this version (/server_info lacks what verify reads)"
            ) from None
        if facts.num_speculative_tokens == 0:
            raise ConfigError(f"drafter: nothing to verify, no drafter is configured ({where}); set `drafter`")
        return facts


class Backend(Protocol):
    """`facts` are read once, before anything is asked."""

    facts: Facts

    def close(self) -> None:
        """Let go of what it holds."""

    def num_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        """Tokens of each prompt, chat prompts in the chat template."""

    def answer(
        self,
        prompts: Sequence[Prompt],
        options: Mapping[str, Any],
        *,
        speculate: bool,
        in_flight: int,
        top_logprobs: int | None = None,
        stream: bool = False,
    ) -> list[Answer]:
        """Answers in order, at most `in_flight` requests at once. options: HTTP fields. top_logprobs: log-probabilities with so
        many alternatives, on either route. stream: answers are put together from streams. Raises ConfigError when the
        service cannot be reached or fails; a refusal is an answer."""


def request_body(
    prompt: Prompt, options: Mapping[str, Any], speculate: bool, top_logprobs: int | None
) -> dict[str, Any]:
    """The HTTP body that asks for it."""
    body: dict[str, Any] = {**options}
    if prompt.chat:
        body["messages"] = [{"role": "user", "content": prompt.text}]
    else:
        body["prompt"] = prompt.text
    if top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": top_logprobs} if prompt.chat else {"logprobs": top_logprobs}
    if not speculate:
        body["speculative"] = {"enabled": False}
    return body
