"""What the commands share: KEY=VALUE settings, prompts from files, progress bars, an engine."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from dflash2_ray.config import ServiceConfig
from dflash2_ray.errors import ConfigError

if TYPE_CHECKING:
    from dflash2_ray.llm import LLM

SETTINGS_HELP = "Settings as KEY=VALUE, e.g. target=smollm2 dtype=float32"
API_KEY_VARIABLES = ("DFLASH2_API_KEY", "OPENAI_API_KEY")
PROMPTS = Path(__file__).parent.parent / "assets" / "prompts.json"
console = Console()
messages = Console(stderr=True)  # progress and notes: standard output stays clean for results


def read_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words as a mapping. Raises ConfigError for a word that is none."""
    settings = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ConfigError(f"expected KEY=VALUE, got {pair!r}")
        settings[key] = value
    return settings


def read_config(pairs: Sequence[str]) -> ServiceConfig:
    """The validated configuration of the words. Raises ConfigError."""
    return ServiceConfig.from_keys(read_settings(pairs))


def progress_bars() -> Progress:
    """Bars with share and time on standard error, gone when they are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=messages, transient=True)


@contextmanager
def loading_bar() -> Iterator[Any]:
    """A progress callback (phase, done, total) that draws one bar per phase on standard error."""
    with progress_bars() as bars:
        tasks: dict[str, Any] = {}

        def show(phase: str, done: float, total: float) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done, total=total)

        yield show


def build_engine(pairs: Sequence[str], **fixed: Any) -> "LLM":
    """An engine with a loading bar. `fixed` settings yield to the user's. Raises ConfigError."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    settings = {**fixed, **read_settings(pairs)}
    ServiceConfig.from_keys(settings)  # a wrong key is told before anything heavy is imported
    with loading_bar() as progress:
        from dflash2_ray.llm import LLM

        return LLM(progress=progress, **settings)


def read_prompts(path: Path | None) -> list[tuple[str, str]]:
    """(kind, text) pairs; kind `chat` goes through the chat template. JSON {kind: [texts]}, a JSON list, or one per line."""
    source = PROMPTS if path is None else path
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"prompts: cannot read {source}: {error.strerror}") from None
    if source.suffix != ".json":
        return [("text", line) for line in text.splitlines() if line.strip()]
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"prompts: {source} is not JSON: {error}") from None
    groups = {"text": data} if isinstance(data, list) else data
    if not isinstance(groups, dict) or not all(
        isinstance(texts, list) and all(isinstance(one, str) for one in texts) for texts in groups.values()
    ):
        raise ConfigError(f"prompts: {source}: expected a list of strings or an object of such lists")
    return [(kind, one) for kind, texts in groups.items() for one in texts]


def prompt_ids(engine: "LLM", prompts: Sequence[tuple[str, str]], room: int) -> list[list[int]]:
    """Token ids, chat prompts in the chat template; prompts that leave less than `room` tokens are cut at the end."""
    most = engine.config.max_model_len - room
    ids = []
    for kind, text in prompts:
        one = engine.chat_ids([{"role": "user", "content": text}]) if kind == "chat" else engine.tokenizer.encode(text)
        if one:
            ids.append(list(one)[:most])
    return ids


def write_json(path: str, data: Any) -> None:
    """To a file, or to standard output for `-`."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")
