"""Write the output of a command: lines of text, or one JSON document.

Input: lines and values. Output: standard output.

[Note: closed pipes] The reader of a pipe, such as ``head``, may close it before a command ends. The exit status is that
of the complete command all the same: after ``diff A B | head -1``, a script with ``pipefail`` knows whether the
checkpoints differ. So a closed pipe is no error. The rest of the output is discarded, and the command continues until
its status is known.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Output:
    """The output of one command."""

    as_json: bool = False
    """Write `values` as one JSON document at the end, and no lines."""
    is_quiet: bool = False
    """Write lines about problems only, and show no progress."""
    values: list[Any] = field(default_factory=list)
    """The content of the JSON document."""
    is_closed: bool = False
    """Whether the reader has closed the output, so that nothing more needs to be written; see [Note: closed pipes]."""

    def line(self, text: str, *, is_problem: bool = False) -> None:
        """Write a line, unless the output is JSON, or is quiet and this is not a problem."""
        if not self.as_json and (is_problem or not self.is_quiet):
            self._write(f"{printable(text)}\n")

    def finish(self) -> None:
        """Write the JSON document, and flush."""
        text = json.dumps(self.values, indent=2, ensure_ascii=False, default=str) + "\n" if self.as_json else ""
        self._write(_encodable(text), is_last=True)

    def _write(self, text: str, *, is_last: bool = False) -> None:
        try:
            sys.stdout.write(text)
            if is_last:
                sys.stdout.flush()
        except BrokenPipeError:
            self.is_closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports the error at exit


def printable(text: str) -> str:
    """Return a text without control characters, which a checkpoint may contain and a terminal would act on."""
    return _encodable("".join(c if c.isprintable() or c in " \t\n" else repr(c)[1:-1] for c in text))


def line_of(name: str, text: str) -> str:
    """Return a line of a summary: a name and its value."""
    return f"{name:<16} {text}"


def time_text(seconds: float) -> str:
    """Return a local time in the format of ISO 8601; "unknown" after the year 9999."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))
    except (OverflowError, ValueError):
        return "unknown"


def to_minutes(text: str) -> str:
    """Return a time of `time_text` for a table, without seconds."""
    return text[: len("2026-01-01T00:00")].replace("T", " ")


def text_of_fact(name: str, value: object) -> str:
    """Return a fact on one line; "" if it is empty, or says that there is nothing."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ", ".join(value)
    return _value_text(value, _INTERNAL.get(name, ()))


_INTERNAL = {
    "scheduler": {"_is_initial", "_initial_step", "_get_lr_called_within_step", "_step_count", "verbose"},
    "data_position": {"anchor"},
}
"""Entries of facts that say nothing about a run."""


def _value_text(value: object, hidden: Collection[str]) -> str:
    """Return a value on one line; mappings as ``key=value``, without ``hidden`` keys and empty values."""
    if isinstance(value, Mapping):
        return _entries(value, hidden, _MAX_LEVELS)
    return _inner_text(value, hidden, _MAX_LEVELS)


_MAX_LEVELS = 20
"""Maximum nesting of lists and mappings that are printed in full."""


def _entries(value: Mapping[Any, Any], hidden: Collection[str], levels: int) -> str:
    texts = {key: _inner_text(inner, hidden, levels) for key, inner in value.items() if key not in hidden}
    return ", ".join(f"{key}={text}" for key, text in texts.items() if text)


def _inner_text(value: object, hidden: Collection[str], levels: int) -> str:
    if isinstance(value, Mapping | list | tuple) and not levels:
        return "…"
    if isinstance(value, Mapping):
        text = _entries(value, hidden, levels - 1)
        return f"{{{text}}}" if text else ""
    if isinstance(value, list | tuple):
        texts = [_inner_text(inner, hidden, levels - 1) for inner in value]
        return f"[{', '.join(text or '-' for text in texts)}]" if any(texts) else ""
    return "" if value is None else str(value)


def _encodable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
