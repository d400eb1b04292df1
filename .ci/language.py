"""Check the language of the package: run by `make lint`.

Docstrings, comments, error and log texts, and identifiers use the terms of the field; see docs/glossary.md. The words
below were used for something else in earlier versions, and nobody could guess for what.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

WORDS = {
    r"twins?|tapes?": "meta skeleton, recorded initialisation",
    r"wish(es)?": "read request",
    r"slabs?": "host buffer",
    r"trips?": "offload",
    r"towers?": "vision encoder",
    r"stands? in|stand-ins?": "placeholder",
    r"settles?|settled": "reset",
    r"lets? go|letting go": "release",
    r"knocks?|knocked": "connect",
    r"beats?": "heartbeat",
    r"stretch(es)?": "span",
    r"had again": "reloadable",
    r"behind the trainer": "in the background",
    r"to the (last )?bit": "bitwise equal",
    r"alike": "equal, the same",
    r"without a word": "silently",
    r"of (theirs|ours)": "their own, our own",
    r"anew": "again",
    r"beside": "next to, in addition to",
    r"it is none|is no one": "it is not one",
    r"goes away|went away|go away|gone away": "is offloaded, is freed",
    r"(is|are|what is|while) away": "offloaded",
    r"comes? back|came back": "is reloaded, returns",
    r"damaged?": "corrupt, unusable",
}
"""Patterns of words, and what to write instead."""
_ANY_WORD = re.compile(rf"(?<![-\w])(?:{'|'.join(WORDS)})(?![-\w])")

IDENTIFIERS = {
    "twin": "skeleton",
    "tape": "recording",
    "wish": "request",
    "slab": "buffer",
    "trip": "offload",
    "tower": "vision_encoder",
    "settle": "reset",
    "knock": "connect",
    "stretch": "span",
    "away": "offloaded",
    "alike": "equal",
    "beside": "sidecars",
    "whole": "full",
    "room": "space",
}
"""Words that no identifier contains, and what to write instead."""

FIRST_WORDS = {"Let": "an imperative verb that names the mechanism", "Have": "an imperative verb", "Say": "Return"}
"""Words that no docstring begins with."""


def docstrings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the string literals that are statements, with their lines."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def messages(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the string literals of several words that are not docstrings, with their lines: error and log texts."""
    own = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own
        if is_text and node.value.strip().count(" ") >= 2:
            yield node.lineno, node.value


def identifiers(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the names that a module defines, with their lines."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def problems(path: Path) -> Iterator[str]:
    """Yield what is wrong with the language of a file."""
    source = path.read_text()
    nodes = list(ast.walk(ast.parse(source)))
    texts = list(docstrings(nodes))
    for line, text in texts:
        first = text.split(maxsplit=1)[0] if text.split() else ""
        if first in FIRST_WORDS:
            yield f"{path}:{line}: a docstring begins with {first!r}: write {FIRST_WORDS[first]}"
    for line, name in identifiers(nodes):
        for word in IDENTIFIERS.keys() & set(name.lower().strip("_").split("_")):
            yield f"{path}:{line}: {name!r}: write {IDENTIFIERS[word]}"
    for line, text in (*texts, *comments(source), *messages(nodes)):
        prose = re.sub(r"``.+?``|`.+?`|\[Note: .+?\]|^ +\w+:", "", text, flags=re.DOTALL | re.MULTILINE)
        if not _ANY_WORD.search(prose):
            continue
        for words, instead in WORDS.items():
            for found in re.finditer(rf"(?<![-\w])(?:{words})(?![-\w])", prose):
                yield f"{path}:{line + prose[: found.start()].count(chr(10))}: {found.group()!r}: write {instead}"


def main() -> int:
    """Write all problems; return 1 if there is one."""
    found = [text for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py")) for text in problems(path)]
    sys.stdout.write("\n".join(found or ["The language is that of the field"]) + "\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
