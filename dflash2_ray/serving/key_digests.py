"""API keys as SHA-256 digests: from a file and the environment, read at the deployment; each ingress replica follows its copy of the file."""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash2_ray.errors import ConfigError

logger = logging.getLogger("ray.serve")
KEYS_VARIABLE = "DFLASH2_API_KEYS"
CHECK_PERIOD_S = 3.0


@dataclass(frozen=True)
class KeyDigests:
    """What the deployment read; it travels to the replicas. path: the file, None where only the environment has keys."""

    environment: tuple[bytes, ...] = ()
    file: tuple[bytes, ...] = ()
    path: str | None = None

    @classmethod
    def read(cls, path: str | None, environment: Mapping[str, str] = os.environ) -> "KeyDigests":
        """Keys of the file and of the variable DFLASH2_API_KEYS (separated by commas). Raises ConfigError for a file that cannot be
        read or holds no key."""
        file = () if path is None else _file_digests(path)
        return cls(_digests(environment.get(KEYS_VARIABLE, "").split(",")), file, path)

    def all(self) -> tuple[bytes, ...]:
        """Each digest once; none: no key is asked for."""
        return tuple(dict.fromkeys((*self.environment, *self.file)))


class CurrentKeys:
    """The keys of this replica: the deployment's, until the file here says otherwise.

    The file is looked at when a request comes, at most once in CHECK_PERIOD_S. One that is not there was never mounted on this node. One
    that cannot be read or holds no key changes nothing and is logged once.
    """

    def __init__(self, deployed: KeyDigests, clock: Callable[[], float] = time.monotonic) -> None:
        self._deployed, self._clock = deployed, clock
        self._digests = deployed.all()
        self._looked_at = float("-inf")
        self._seen: tuple[int, ...] | None = None  # what tells one version of the file from another; None: no file yet

    def digests(self) -> tuple[bytes, ...]:
        """What a request may hold now."""
        now = self._clock()
        if self._deployed.path is not None and now - self._looked_at >= CHECK_PERIOD_S:
            self._looked_at = now
            self._look(self._deployed.path)
        return self._digests

    def _look(self, path: str) -> None:
        version = _version(path)
        if version == self._seen:
            return
        self._seen = version
        try:
            file = _file_digests(path)
        except ConfigError as error:
            logger.error("%s; the keys from before stay", error)
            return
        digests = KeyDigests(self._deployed.environment, file).all()
        if digests != self._digests:
            self._digests = digests
            logger.info("api_keys_file: %s changed: %d keys", path, len(digests))


def _version(path: str) -> tuple[int, ...] | None:
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


def _file_digests(path: str) -> tuple[bytes, ...]:
    """One key per line; a line that begins with # is a comment. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys_file: {path!r} cannot be read: {type(error).__name__}") from None
    found = _digests(line for line in lines if not line.strip().startswith("#"))
    if not found:
        raise ConfigError(f"api_keys_file: expected one key per line in {path!r}, got none")
    return found


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(hashlib.sha256(key.strip().encode()).digest() for key in keys if key.strip()))
