"""A running service, asked over HTTP on its two OpenAI routes."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from dflash2_ray.errors import ConfigError
from dflash2_ray.verification.answer import Answer, Choice, Prompt, TokenLogprobs, refusal
from dflash2_ray.verification.backend import Facts, request_body

TIMEOUT_S = 600.0
PATIENCE_S = 120.0  # how long one request is offered again while the service says that it is full or not ready


class Service:
    """A `Backend`. Raises ConfigError: nobody listens at `url`, no drafter, another model than `model`, or a key is missing."""

    def __init__(
        self, url: str, api_key: str | None = None, model: str | None = None, http: httpx.Client | None = None
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        self._http = http or httpx.Client(base_url=self._url, headers=headers, timeout=TIMEOUT_S, limits=limits)
        told = self._json(self._send("GET", "/server_info"))
        self.facts = Facts.of(self._url, told if isinstance(told, Mapping) else {})
        if model is not None and model != self.facts.model:
            raise ConfigError(f"{self._url}: serves {self.facts.model!r}, expected {model!r}")

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def num_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        def count(prompt: Prompt) -> int:
            body = {
                key: value
                for key, value in request_body(prompt, {}, True, None).items()
                if key in ("messages", "prompt")
            }
            response = self._send("POST", "/tokenize", body)
            return int(self._json(response)["count"]) if response.status_code == 200 else 0

        return _together(count, prompts, self.facts.max_num_seqs)

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
        def ask(prompt: Prompt) -> Answer:
            body = request_body(prompt, options, speculate, top_logprobs)
            body |= {"model": self.facts.model, "return_token_ids": True, "return_tokens_as_token_ids": True}
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            response = self._send("POST", "/v1/chat/completions" if prompt.chat else "/v1/completions", body)
            if response.status_code != 200:
                error = _error_of(response)
                return refusal(response.status_code, error.get("param"), str(error.get("message")))
            return read_answer(joined(_events(response.text)) if stream else self._json(response))

        return _together(ask, prompts, in_flight)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """The answer: 200 or a refusal of the request itself. Waits while the service is full."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                response = self._http.request(method, path, json=body)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise ConfigError(f"{self._url}: cannot be reached: {error or type(error).__name__}") from None
            if response.status_code not in (429, 503) or time.monotonic() > deadline:
                break
            time.sleep(_retry_after_s(response))
        if response.status_code in (401, 403):
            raise ConfigError(f"{self._url}: refuses the API key; give --api-key or set DFLASH2_API_KEY")
        if response.status_code not in (200, 400, 413, 422):
            raise ConfigError(
                f"{self._url}: {method} {path} answered {response.status_code}: {str(_error_of(response).get('message'))[:200]}"
            )
        return response

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise ConfigError(
                f"{self._url}: not a dflash2_ray service: {response.request.url.path} is not JSON"
            ) from None


def _together(call: Callable[[Prompt], Any], prompts: Sequence[Prompt], in_flight: int) -> list[Any]:
    """Results in order; the first failure keeps what has not started from starting."""
    with ThreadPoolExecutor(max_workers=in_flight) as pool:
        futures = [pool.submit(call, prompt) for prompt in prompts]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(30.0, max(0.05, float(response.headers.get("Retry-After", 1))))
    except ValueError:
        return 1.0


def _error_of(response: httpx.Response) -> Mapping[str, Any]:
    """The OpenAI error object; the bare text of one that is none."""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {"message": response.text}
    return error if isinstance(error, Mapping) else {"message": str(error)}


def read_answer(body: Mapping[str, Any]) -> Answer:
    """The answer in a response body."""
    choices, accepted = [], 0
    for one in body["choices"]:
        message = one.get("message", {})
        calls = tuple(
            (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
        )
        text = (message.get("content") or "") if message else one.get("text", "")
        choices.append(
            Choice(
                text,
                tuple(one["token_ids"]),
                one["finish_reason"],
                one.get("stop_reason"),
                calls,
                _logprobs(one.get("logprobs")),
            )
        )
        accepted += one.get("metrics", {}).get("speculative_decoding", {}).get("num_accepted_draft_tokens", 0)
    accepted += body.get("metrics", {}).get("speculative_decoding", {}).get("num_accepted_draft_tokens", 0)
    return Answer(tuple(choices), body.get("usage") or {}, accepted)


def _events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream. Raises ConfigError when it did not end, or told an error."""
    frames = [frame.removeprefix("data: ") for frame in text.split("\n\n") if frame.startswith("data: ")]
    events = [json.loads(frame) for frame in frames if frame != "[DONE]"]
    failed = next((event["error"] for event in events if "error" in event), None)
    if failed or not frames or frames[-1] != "[DONE]":
        raise ConfigError(
            f"the service failed in a stream: {failed['message'] if failed else 'it did not end with [DONE]'}"
        )
    return events


def joined(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole body that the chunks of a stream make up."""
    choices: dict[int, dict[str, Any]] = {}
    body: dict[str, Any] = {}
    for event in events:
        body |= {key: event[key] for key in ("usage", "metrics") if event.get(key)}
        for piece in event["choices"]:
            choice = choices.setdefault(
                piece["index"], {"token_ids": [], "finish_reason": None, "logprobs": None, "text": ""}
            )
            delta = piece.get("delta")
            if delta is None:
                choice["text"] += piece.get("text", "")
            else:
                message = choice.setdefault("message", {"content": "", "tool_calls": []})
                message["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(message["tool_calls"]):
                        message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
                    for key, value in call["function"].items():
                        message["tool_calls"][call["index"]]["function"][key] += value or ""
            choice["token_ids"] += piece.get("token_ids") or []
            choice |= {key: piece[key] for key in ("finish_reason", "stop_reason") if piece.get(key) is not None}
            for key, values in (piece.get("logprobs") or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                if values is not None:
                    choice["logprobs"].setdefault(key, []).extend(values)
    return {**body, "choices": [choices[index] for index in sorted(choices)]}


def _logprobs(told: Mapping[str, Any] | None) -> tuple[TokenLogprobs, ...] | None:
    """Of either route, tokens written `token_id:N`."""
    if told is None:
        return None
    if "content" in told:
        return tuple(
            (entry["logprob"], tuple((_id(other["token"]), other["logprob"]) for other in entry["top_logprobs"]))
            for entry in told["content"]
        )
    pairs = zip(told["token_logprobs"], told["top_logprobs"], strict=True)
    return tuple((own, tuple((_id(token), value) for token, value in (top or {}).items())) for own, top in pairs)


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))
