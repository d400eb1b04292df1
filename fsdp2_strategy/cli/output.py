"""Write the output of a command: lines of text, or one JSON document.

Input: lines and values. Output: standard output.
"""

from __future__ import annotations

import json
import sys
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

    def line(self, text: str, *, is_problem: bool = False) -> None:
        """Write a line, unless the output is JSON, or is quiet and this is not a problem."""
        if not self.as_json and (is_problem or not self.is_quiet):
            sys.stdout.write(f"{printable(text)}\n")

    def finish(self) -> None:
        """Write the JSON document, and flush."""
        if self.as_json:
            sys.stdout.write(_encodable(json.dumps(self.values, indent=2, ensure_ascii=False)) + "\n")
        sys.stdout.flush()


def printable(text: str) -> str:
    """Return a text without control characters, which a checkpoint may contain and a terminal would act on."""
    return _encodable("".join(c if c.isprintable() or c in " \t\n" else repr(c)[1:-1] for c in text))


def _encodable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
