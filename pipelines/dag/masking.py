"""Secrets stay out of what is printed, logged or written for people: passwords in URIs, tokens in their query part,
and the values of environment variables whose names say that they are secret.

    mask("s3://KEY:SECRET@bucket/runs?session_token=T")   ->  "s3://***@bucket/runs?session_token=***"
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import IO, Any
from urllib.parse import urlsplit, urlunsplit

HIDDEN = "***"
_MIN_CHARS = 6  # of an environment variable's value: shorter ones are in every second word

# user:password@ (a password may hold a slash; what follows a port number is a path), or user@ alone.
_LOGIN = re.compile(r"\b([a-zA-Z][\w+.-]*://)(?:[^\s/@:'\"]*:(?!\d+(?:/|$))[^\s@'\"]*|[^\s/@?#'\"]+)@")
_QUERY = re.compile(
    r"([?&;](?:[\w.%-]*(?:token|secret|signature|passw|credential|access_?key|api_?key)[\w.%-]*|sig|key)=)[^&;\s'\"#]+",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(
    r"PASSW|SECRET|TOKEN(?!IZER)|CREDENTIAL|ACCESS_?KEY|API_?KEY|PRIVATE_?KEY|CONNECTION_STRING", re.IGNORECASE
)
_PLACE_NAME = re.compile(r"(_FILE|_PATH|_DIR|_URL|_URI|GOOGLE_APPLICATION_CREDENTIALS)$", re.IGNORECASE)


def mask_uris(text: str) -> str:
    """Logins and secret query values of all URIs in a text replaced. The same everywhere: it reads no environment."""
    return _QUERY.sub(rf"\1{HIDDEN}", _LOGIN.sub(rf"\1{HIDDEN}@", text))


def mask(text: str) -> str:
    """The text without secrets: those of `mask_uris`, and values of this process's secret environment variables."""
    for value in _secret_values():
        text = text.replace(value, HIDDEN)
    return mask_uris(text)


def plain_uri(uri: str) -> str:
    """An address for people and other programs: no login and no query, which is where credentials and options are."""
    if "://" not in uri:
        return uri
    parts = urlsplit(mask_uris(uri))  # masked first: a slash in a password would end the part that holds it
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class Masked:
    """A text stream that masks what is written to it, also into a copy; everything else is the stream's own."""

    def __init__(self, stream: IO[str], *, copy: IO[str] | None = None) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        masked = mask(text)
        if self._copy is not None and not self._copy.closed:  # a thread may print after its node has ended
            with contextlib.suppress(OSError):  # its disk is full: what it says still reaches the stream
                self._copy.write(masked)
        self._stream.write(masked)
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def masked_output() -> Iterator[None]:
    """Nothing secret reaches standard output and error while the block runs."""
    with contextlib.redirect_stdout(Masked(sys.stdout)), contextlib.redirect_stderr(Masked(sys.stderr)):
        yield


def _secret_values() -> list[str]:
    """Longest first, so that a value within another one does not cut it."""
    values = {
        value
        for name, value in os.environ.items()
        if len(value) >= _MIN_CHARS and _SECRET_NAME.search(name) and not _PLACE_NAME.search(name)
    }
    return sorted(values, key=len, reverse=True)
