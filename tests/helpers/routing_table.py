"""Write the table of docs/rollout.md: which models replay the experts of an engine, and why others are refused.

Input: the model types of transformers' causal language models, and `plan_routers`. Output: the part of the page between
two comments. Run it with ``PYTHONPATH=tests .venv/bin/python -m helpers.routing_table``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fsdp2_strategy.parallel.routing.plan import plan_routers
from fsdp2_strategy.parallel.routing.routers import NO_EXPERTS
from helpers.split import tiny_model
from helpers.split_table import NAMES

PAGE = Path(__file__).parents[2] / "docs" / "rollout.md"
_BEGIN, _END = "<!-- begin: generated -->", "<!-- end: generated -->"

_WITH_EXPERTS = {
    "doge": {"is_moe": True},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
}
"""Model types whose default configuration has no experts, or only one."""

Entry = tuple[bool, str]
"""Whether the model type is supported; the class names of its routers, or the reason of refusal."""


def model_with_experts(name: str) -> Any:
    """Build a tiny model of a model type, with experts if it can have some."""
    return tiny_model(name, **_WITH_EXPERTS.get(name, {}))


def entry_of(model: Any) -> Entry | None:
    """Return the entry of a model; None if it has no experts."""
    plan = plan_routers(model)
    if plan.refused == NO_EXPERTS:
        return None
    return (not plan.refused, plan.refused or ", ".join(sorted(plan.kinds)))


def written_table(entries: dict[str, Entry]) -> str:
    """Return the generated part of the page."""
    lines = ["| Model type | Routers |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, (is_supported, text) in entries.items() if is_supported]
    lines += ["", "| Refused | Because it |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, (is_supported, text) in entries.items() if not is_supported]
    return "\n".join(lines)


def rows_of(page: str) -> dict[str, Entry]:
    """Return the entries of the page."""
    part = page[page.index(_BEGIN) : page.index(_END)]
    supported, refused = part.split("| Refused |")
    return {
        name: (part is supported, text)
        for part in (supported, refused)
        for name, text in re.findall(r"^\| `([^`]+)` \| (.*) \|$", part, re.MULTILINE)
    }


def table_version() -> str:
    """Return the version of transformers that the table is about."""
    found = re.search(r"with experts in transformers (\S+),", PAGE.read_text())
    assert found is not None
    return found[1]


def main() -> None:
    """Rewrite the generated part of the page."""
    found = {name: entry_of(model_with_experts(name)) for name in NAMES}
    entries = {name: entry for name, entry in found.items() if entry is not None}
    page = PAGE.read_text()
    before, after = page[: page.index(_BEGIN)], page[page.index(_END) :]
    PAGE.write_text(f"{before}{_BEGIN}\n{written_table(entries)}\n{after}")


if __name__ == "__main__":
    main()
