"""A Jinja sandbox with an end: a template runs for so long and writes so much, whatever messages make of it."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.sandbox

LIMIT_S = 2.0
LIMIT_CHARACTERS = 16 * 1024 * 1024


class TemplateLimit(Exception):
    """A template ran too long or wrote too much."""


class LimitedSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Every attribute, item and call of a template looks at the clock; a loop without any is bounded by the sandbox's own MAX_RANGE."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._running = threading.local()

    def run(
        self,
        template: jinja2.Template,
        variables: Mapping[str, Any],
        *,
        limit_s: float = LIMIT_S,
        limit_characters: int = LIMIT_CHARACTERS,
    ) -> str:
        """The template's text. Raises TemplateLimit, and whatever the template raises."""
        self._running.deadline = time.monotonic() + limit_s
        self._running.limit_s = limit_s
        try:
            pieces, size = [], 0
            for piece in template.generate(**variables):
                self._look()
                size += len(piece)
                if size > limit_characters:
                    raise TemplateLimit(f"it writes more than {limit_characters} characters")
                pieces.append(piece)
            return "".join(pieces)
        finally:
            self._running.deadline = None

    def _look(self) -> None:
        deadline = getattr(self._running, "deadline", None)
        if deadline is not None and time.monotonic() > deadline:
            raise TemplateLimit(f"it takes longer than {self._running.limit_s:g} s")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._look()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._look()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **keywords: Any) -> Any:
        self._look()
        return super().call(*args, **keywords)
