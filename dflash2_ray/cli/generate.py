"""`dflash2-ray generate` and `chat`: one answer on the terminal, as it is made."""

from typing import Annotated, Any

import typer

from dflash2_ray.cli.settings import SETTINGS_HELP, build_engine, messages
from dflash2_ray.core.generation import Generation, GenerationChunk

_Temperature = Annotated[float | None, typer.Option(help="0 is greedy. Default: the model's own, else 1.")]
_TopP = Annotated[float | None, typer.Option(help="Nucleus sampling.")]
_TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")]
_Seed = Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")]
_MaxTokens = Annotated[int | None, typer.Option(help="Most tokens of the answer.")]
_Width = Annotated[int | None, typer.Option("--num-speculative-tokens", help="Draft slots; 0 decodes plainly.")]
_Settings = Annotated[list[str] | None, typer.Argument(help=SETTINGS_HELP)]


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    settings: _Settings = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    seed: _Seed = None,
    max_tokens: _MaxTokens = 128,
    num_speculative_tokens: _Width = None,
) -> None:
    """Continue a text."""
    engine = build_engine(settings or [], max_num_seqs=1)
    options = _options(temperature, top_p, top_k, seed, max_tokens, num_speculative_tokens)
    _summary(_print_stream(engine.stream(prompt, **options)))


def chat(
    message: Annotated[str, typer.Argument(help="What to say; without it, a conversation starts.")] = "",
    settings: _Settings = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    seed: _Seed = None,
    max_tokens: _MaxTokens = None,
    num_speculative_tokens: _Width = None,
) -> None:
    """Ask a question, or hold a conversation (an empty line or Ctrl-D ends it)."""
    if message and not settings and "=" in message and " " not in message:
        message, settings = "", [message]
    engine = build_engine(settings or [], max_num_seqs=1)
    options = _options(temperature, top_p, top_k, seed, max_tokens, num_speculative_tokens)
    turns: list[dict[str, Any]] = []
    once = bool(message)
    while True:
        said = message or _ask()
        if not said:
            return
        turns.append({"role": "user", "content": said})
        generation = _print_stream(engine.stream(messages=turns, **options))
        _summary(generation)
        if once:
            return
        turns.append({"role": "assistant", "content": generation.text})


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _options(
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    max_tokens: int | None,
    width: int | None,
) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "max_tokens": max_tokens,
        "num_speculative_tokens": width,
    }


def _print_stream(chunks: Any) -> Generation:
    last: GenerationChunk | None = None
    for chunk in chunks:
        print(chunk.text, end="", flush=True)
        last = chunk
    print()
    assert last is not None, "a stream has a chunk"
    assert last.generation is not None, "a stream ends with its generation"
    return last.generation


def _summary(generation: Generation) -> None:
    timing, speculation = generation.metrics["timing"], generation.metrics["speculative_decoding"]
    count, pace = generation.usage.completion_tokens, timing["time_per_output_token_s"]
    length = speculation["mean_acceptance_length"]
    parts = [f"{count} tokens", f"first after {timing['time_to_first_token_s'] * 1000:.0f} ms"]
    if pace:
        parts.append(f"{1 / pace:.0f} tokens/s")
    parts.append(f"acceptance length {length:.2f}" if length else "plain decoding")
    messages.print(f"[dim]({', '.join(parts)})[/]", highlight=False)
