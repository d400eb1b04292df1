"""Extension of griffe: adapt the docstrings of the package, which are written to be read in an editor, to the site.

Input: docstrings. Output: the same ones with one entry per parameter where several share one ("a, b: as for `f`"), with
examples as code, and with links from names in backticks to their place in the reference. Defaults that come from the
configuration are shown as values: of a constructor, those of its fields; of a method, the field that it reads.
"""

import ast
import re
from pathlib import Path
from typing import Any

import griffe

_SHARED = re.compile(r"^( +)(\w+(?:,\s+\w+)+):(?= |$)(.*(?:\n\1 +\S.*)*)", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example::?\n+((?:(?:    .*)?\n?)+)", re.MULTILINE)
_NAME = re.compile(r"(?<!`)`(\w+)((?:\.\w+)*)`(?!`)")


class SiteDocstrings(griffe.Extension):
    """Change docstrings when griffe has read the whole package."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Adapt all docstrings of the package, once."""
        self._shown = _shown_names(pkg)
        self._fields = pkg["config.strategy_config.StrategyConfig"].members
        self._aliases = ast.literal_eval(str(pkg["config.aliases._ALIASES"].value))
        self._adapt(pkg)

    def _adapt(self, subject: griffe.Object) -> None:
        for member in subject.members.values():
            if member.is_alias:
                continue
            if member.docstring:
                member.docstring.value = self._adapted(member.docstring.value, member)
            for parameter in member.parameters if member.is_function else ():
                if str(parameter.default) == "_UNSET":
                    parameter.default = self._configured(parameter.name, member)
            if member.is_module or member.is_class:
                self._adapt(member)

    def _configured(self, name: str, function: griffe.Function) -> str:
        field = self._aliases.get(name, name)
        return str(self._fields[field].value) if function.name == "__init__" else f"self.config.{field}"

    def _adapted(self, text: str, subject: griffe.Object) -> str:
        text = _SHARED.sub(_one_each, text)
        text = _EXAMPLE.sub(_examples, text)
        text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
        text = _NAME.sub(lambda match: self._link(match, subject), text)
        return "\n".join(_without_tags(line) for line in text.split("\n"))

    def _link(self, match: re.Match[str], subject: griffe.Object) -> str:
        scope = subject if subject.is_class else subject.parent
        head, rest = match[1], match[2]
        path = None
        if scope is not None and scope.is_class and head in scope.all_members:
            member = scope.all_members[head]
            owner = self._shown.get(_canonical_path(member).rpartition(".")[0])
            # a name without a docstring is not on the page
            path = f"{owner}.{head}" if owner and member.docstring and not head.startswith("_") else None
        elif scope is not None:
            module = scope.module
            found = module.members.get(head) or module.package.members.get(head)
            path = self._shown.get(_canonical_path(found)) if found is not None else None
            if path and rest:
                target = found.all_members.get(rest[1:]) if found.is_class else None
                path = f"{path}{rest}" if target is not None and target.docstring else None
        return f"[{match[0]}][{path}]" if path else match[0]


def _shown_names(package: griffe.Module) -> dict[str, str]:
    """Return the path under which a page shows each object, by the path of its definition."""
    pages = (Path(__file__).parents[1] / "docs" / "api").glob("*.md")
    paths = [path for page in pages for path in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)]
    return {package[path.partition(".")[2]].canonical_path: path for path in paths}


def _canonical_path(member: griffe.Object | griffe.Alias) -> str:
    try:
        return member.canonical_path
    except griffe.AliasResolutionError:  # of another package, which is not read
        return ""


def _without_tags(line: str) -> str:
    """Escape "<" outside code, so that Markdown does not read ``<name>`` in plain text as a tag."""
    if line.lstrip().startswith((">>>", "...")):
        return line
    parts = line.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _one_each(match: re.Match[str]) -> str:
    names = re.split(r",\s+", match[2])
    return "\n".join(f"{match[1]}{name}:{match[3]}" for name in names)


def _examples(match: re.Match[str]) -> str:
    body = match[1].rstrip()
    return f"Examples:\n{body}\n" if ">>>" in body else f"Examples:\n    ```python\n{body}\n    ```\n"
