"""Write the table of architectures in docs/sequence_parallel.md: which models can split sequences, and how.

Input: the model types of transformers' causal language models, and `plan_split` for 2 ranks. Output: the part of the
page between two comments. Run it with ``PYTHONPATH=tests .venv/bin/python -m helpers.split_table``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fsdp2_strategy.parallel.sequence.split import SplitPlan
from fsdp2_strategy.parallel.sequence.split_plan import plan_split
from helpers.split import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "sequence_parallel.md"
_BEGIN, _END = "<!-- begin: generated -->", "<!-- end: generated -->"

NOT_BUILT = ("gemma3n", "gemma4_assistant", "musicgen", "musicgen_melody")
"""Model types whose default configuration transformers rejects, or that need other packages."""

NAMES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_BUILT))

Entry = tuple[str, ...]
"""Empty if attention is split by heads without exceptions; (full modules, exceptions) or (reason of refusal,)."""


def entry_of(name: str, plan: SplitPlan) -> Entry:
    """Return what the table says of a model type; reasons without the numbers in parentheses."""
    refused = {kind: reason.split(" (")[0] for kind, reason in plan.refused}
    if "plain" in refused:
        return (refused["plain"],)
    modules = sorted({f"`{module or 'block'}` ({cls})" for module, cls in plan.full})
    modules += [f"`{module}`" for module in sorted(plan.outside)]
    exceptions = [f"{_KINDS[kind]}: {reason}" for kind, reason in refused.items()]
    return (", ".join(modules), ", ".join(exceptions)) if modules or exceptions else ()


_KINDS = {"loss": "labels", "padded": "padding", "packed": "packed documents"}


def written_table(entries: dict[str, Entry]) -> str:
    """Return the generated part of the page."""
    return "\n".join(_lines(entries))


def _lines(entries: dict[str, Entry]) -> Iterator[str]:
    refused = [name for name, entry in entries.items() if len(entry) == 1]
    others = [name for name, entry in entries.items() if len(entry) == 2]
    split = [name for name, entry in entries.items() if not entry]
    yield f"Of the {len(entries)} model types of transformers {transformers.__version__} with a causal language model,"
    yield f"{len(entries) - len(refused)} can split sequences."
    yield ""
    yield f"**Attention is split by heads** ({len(split)} types), for plain, padded and packed sequences:"
    yield from _wrapped(split)
    yield ""
    yield f"**With exceptions** ({len(others)} types). The rest of each model computes parts:"
    yield ""
    yield "| Type | Class | Modules that compute full sequences | Not supported |"
    yield "|---|---|---|---|"
    for name in sorted(others):
        yield f"| `{name}` | {_class_of(name)} | {' | '.join(part or '-' for part in entries[name])} |"
    yield ""
    yield f"**Refused** ({len(refused)} types):"
    yield ""
    yield "| Type | Class | Why |"
    yield "|---|---|---|"
    for name in sorted(refused):
        yield f"| `{name}` | {_class_of(name)} | {entries[name][0]} |"


def _wrapped(names: list[str]) -> Iterator[str]:
    line = ""
    for i, name in enumerate(sorted(names)):
        word = f"`{name}`" + ("." if i == len(names) - 1 else ",")
        if len(line) + len(word) > 118:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


def _class_of(name: str) -> str:
    cls = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    return cls if isinstance(cls, str) else cls[0]


def rows_of(page: str) -> dict[str, Entry]:
    """Return the entry of each model type on the page."""
    part = page[page.index(_BEGIN) : page.index(_END)]
    split = part[part.index("**Attention") : part.index("**With")]
    entries: dict[str, Entry] = dict.fromkeys(re.findall("`([^`]+)`", split), ())
    for name, rest in re.findall(r"^\| `([^`]+)` \| [^|]* \| (.*) \|$", part, re.MULTILINE):
        entries[name] = tuple("" if cell == "-" else cell for cell in rest.split(" | "))
    return entries


def table_version() -> str:
    """Return the version of transformers that the page is about."""
    found = re.search(r"model types of transformers (\S+) ", PAGE.read_text())
    assert found is not None
    return found[1]


def main() -> None:
    """Rewrite the generated part of the page."""
    entries = {name: entry_of(name, plan_split(tiny_model(name), 2)) for name in NAMES}
    entries |= dict.fromkeys(NOT_BUILT, ("not tested: transformers cannot build its default configuration",))
    page = PAGE.read_text()
    before, after = page[: page.index(_BEGIN)], page[page.index(_END) :]
    PAGE.write_text(f"{before}{_BEGIN}\n{written_table(entries)}\n{after}")


if __name__ == "__main__":
    main()
