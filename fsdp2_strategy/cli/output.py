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
        document = _encodable(json.dumps(self.values, indent=2, ensure_ascii=False)) + "\n" if self.as_json else ""
        self._write(document, is_last=True)

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


def time_text(seconds: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """Return a local time as text; "unknown" after the year 9999."""
    try:
        return time.strftime(form, time.localtime(seconds))
    except (OverflowError, ValueError):
        return "unknown"


def _encodable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
