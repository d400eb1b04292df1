"""Write docs/private_names.md: the private names of other libraries that the package reads, and the purpose of each.

Input: the functions and constants of the two modules that may read private names. Output: the page, a table for each
module; or its text, for the test that compares both. Run by a person after a change of these modules.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/private_names.md"
MODULES = {
    "torch": ROOT / "fsdp2_strategy/distributed/torch_internals.py",
    "transformers, peft and TRL": ROOT / "fsdp2_strategy/hf/library_internals.py",
}
WITHOUT_UNDERSCORE = {
    "active_gradient_reduction", "all_gather_state", "fsdp_params", "gradient_reduction_pending", "is_unsharded",
    "iter_forward_root", "manual_backward_finalization_active", "mesh_info", "offload_to_cpu", "orig_dtype",
    "post_backward", "post_backward_final_callback_queued", "post_forward", "post_forward_order", "pre_forward",
    "reduce_dtype", "reduce_grads", "reduce_scatter_state", "reduce_scatter_states", "reset_sharded_param",
    "sharded_param", "to_accumulated_grad_if_needed", "unshard_in_backward", "unsharded_accumulated_grad",
    "wait_for_unshard",
}  # fmt: skip
"""What FSDP2's internal classes call without an underscore; their modules are private."""
HEADER = """# Private names

Each name below may change in any release of its library. Other modules of this package use none of them, except
`_parameters`, `_buffers`, `_modules` and `_foreach_...` of torch (`tests/test_internals.py`). Where a version of a
library has a public call, the package uses that call. The tables are generated: `python .ci/private_names.py`.
"""


def is_private(name: str) -> bool:
    """Return whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def is_private_text(value: object) -> bool:
    """Return whether a constant is a private name, as in a call of ``getattr``."""
    return isinstance(value, str) and (bool(re.fullmatch(r"_[a-z]\w+", value)) or value in WITHOUT_UNDERSCORE)


def names_in(node: ast.AST, imported: set[str]) -> Iterator[str]:
    """Return the private names of other libraries that a definition reads or writes."""
    of_text = {id(part) for each in ast.walk(node) if isinstance(each, ast.JoinedStr) for part in each.values}
    for each in ast.walk(node):
        if id(each) in of_text:
            continue
        if isinstance(each, ast.Attribute) and (is_private(each.attr) or each.attr in WITHOUT_UNDERSCORE):
            yield each.attr
        elif isinstance(each, ast.Name) and each.id in imported:
            yield each.id
        elif isinstance(each, ast.keyword) and each.arg in WITHOUT_UNDERSCORE:
            yield each.arg
        elif isinstance(each, ast.Constant) and is_private_text(each.value):
            yield each.value


def private_imports(tree: ast.Module) -> set[str]:
    """Return the names that a module imports from private modules, or under a private name, and not for types only."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fsdp2_strategy"):
            is_of_private_module = any(map(is_private, (node.module or "").split(".")))
            found |= {alias.name for alias in node.names if is_of_private_module or is_private(alias.name)}
    return found


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, in one line."""
    line = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", line)[0].replace("``", "`").replace("|", "\\|")


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """Return the name, the code and the docstring of each function, class and constant of a module."""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node, ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield ast.unparse(target), node, str(after.value.value) if is_text else ""


def table(path: Path) -> str:
    """Return the table of a module."""
    tree = ast.parse(path.read_text())
    imported = private_imports(tree)
    own = {name for name, *_ in definitions(tree)}
    rows = ["| Function or constant | Private names | Purpose |", "|---|---|---|"]
    for name, node, text in definitions(tree):
        if found := sorted(set(names_in(node, imported)) - own):
            rows.append(f"| `{name}` | {', '.join(f'`{each}`' for each in found)} | {first_sentence(text)} |")
    return "\n".join(rows)


def page() -> str:
    """Return the text of the page."""
    sections = [f"## {library}\n\n`{path.relative_to(ROOT)}`\n\n{table(path)}\n" for library, path in MODULES.items()]
    return "\n".join([HEADER, *sections])


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
