"""How a worker process writes its log: lines of text, or one JSON object per line with the keys of Serve's own JSON lines.

Replicas write through Serve's logger, which knows both forms already. It must not know ray.
"""

import json
import logging
from typing import Literal

LogFormat = Literal["text", "json"]
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_TEXT = "%(levelname)s %(asctime)s {role} %(process)d -- %(message)s"


class JsonLines(logging.Formatter):
    """asctime, levelname, message, filename, lineno, process, exc_text where there is an exception, then `fields` and what the line
    was given as `extra`; timestamp_ns where Ray stamps records."""

    def __init__(self, **fields: str) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
        }
        if record.exc_info:
            line["exc_text"] = self.formatException(record.exc_info)
        given = {name.removeprefix("_ray_"): value for name, value in vars(record).items() if name not in _STANDARD}
        line |= self._fields | given
        return json.dumps(line, ensure_ascii=False, default=str)


def write_logs(log_format: LogFormat, role: str) -> None:
    """Send this package's lines of this process, from INFO up, to standard error. `role`: who writes them."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(role=role) if log_format == "json" else logging.Formatter(_TEXT.format(role=role)))
    package = logging.getLogger("dflash2_ray")
    package.setLevel(logging.INFO)
    package.propagate = False
    package.handlers = [handler]
