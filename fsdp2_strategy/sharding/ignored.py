"""Find the modules that the user names in a setting.

Input: a model, and regular expressions for the names of its modules. Output: modules, for `plan`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from fsdp2_strategy.errors import ShardError, did_you_mean
from fsdp2_strategy.model.names import clean


def matching_modules(model: nn.Module, patterns: Sequence[str], action: str) -> list[nn.Module]:
    """Return the modules whose full dotted name matches a pattern, without modules inside another match.

    ``action`` is the purpose of the setting, for the error if a pattern matches no module, or the model itself.
    """
    names = [(clean(name), module) for name, module in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        found = [name for name, _ in names if re.fullmatch(pattern, name)]
        if "" in found or not found:
            what = "the model itself" if found else f"no module of {type(model).__name__}"
            within = [name for name, _ in names if name]
            raise ShardError(
                f"cannot {action}: the pattern {pattern!r} matches {what}, expected a regular expression that "
                f"matches the full names of modules within it. The first names are {', '.join(within[:3])}."
                f"{did_you_mean(pattern, within)}"
            )
    matched = dict.fromkeys(m for name, m in names if any(re.fullmatch(pattern, name) for pattern in patterns))
    within_matched = {m for outer in matched for m in outer.modules() if m is not outer}
    return [module for module in matched if module not in within_matched]
