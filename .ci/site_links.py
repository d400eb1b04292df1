"""Hook of mkdocs: add the files that pages link to, and that mkdocs does not copy, to the site.

Input: the links of the pages under docs/. They are written for a view of the repository, so some lead out of docs/
(charts, sources, the changelog), and some to programs. Output: the same links within the site. A linked file is added
under ``repository/`` with its own path: Markdown as a page, images as they are, and source files as a page with their
text, because a browser would download them.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FOLDER = "repository"
IMAGES = {".png", ".svg", ".gif", ".jpg", ".jpeg", ".webp"}
LANGUAGES = {
    ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json", ".sh": "bash",
    ".slurm": "bash", ".txt": "text", "": "text",
}  # fmt: skip
"""Suffixes of the files that become a page with their text, and the languages to highlight."""

_CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[`~]* *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=[)\s])")
_PAGES_OF_NAV = ("CHANGELOG.md", "CONTRIBUTING.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked files, and those that they link to in turn."""
    docs = Path(config.docs_dir)
    root = docs.parent
    todo = [Path(file.abs_src_path) for file in files.documentation_pages()]
    todo += [root / name for name in _PAGES_OF_NAV]
    seen = set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.is_relative_to(docs) or path.suffix != ".md":
            _add(path, root, files, config)
        if path.suffix == ".md":
            for target in _targets(path.read_text()):
                linked = _linked_file(path, target)
                if linked and not (linked.is_relative_to(docs) and linked.suffix in IMAGES | {".md"}):
                    if not linked.is_relative_to(root):
                        raise PluginError(f"{path}: the link {target} leads out of the repository")
                    todo.append(linked)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Rewrite the links of a page to the files that `on_files` has added."""
    docs = Path(config.docs_dir)
    if page.file.src_uri.startswith(f"{FOLDER}/"):
        path = docs.parent / page.file.src_uri.removeprefix(f"{FOLDER}/")
        if not path.exists():  # a page with the text of a source file has no links
            return markdown
    else:
        path = Path(page.file.abs_src_path or docs / page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        linked = _linked_file(path, match[2])
        if linked is None:
            return match[0]
        uri = posixpath.relpath(_uri(linked, docs), posixpath.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{quote(uri)}{match[3] or ''}"

    return _outside_code(markdown, lambda text: _LINK.sub(rewrite, text))


def on_post_page(output: str, *, page: Page, **_: object) -> str:
    """Raise if a page of the site would load something from the network."""
    loaded = re.findall(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="?(?:https?:)?//[^">]*', output)
    loaded += re.findall(r'<link\b[^>]*rel="?(?:stylesheet|preconnect|preload)[^>]*href="?(?:https?:)?//[^">]*', output)
    if loaded:
        raise PluginError(f"{page.file.src_uri} loads from the network: {', '.join(loaded)}. Add the file to docs/.")
    return output


def _add(path: Path, root: Path, files: Files, config: MkDocsConfig) -> None:
    uri = _uri(path, Path(config.docs_dir))
    if files.get_file_from_path(uri) is not None:
        return
    if path.suffix == ".md":
        files.append(File.generated(config, uri, content=path.read_text()))
    elif path.suffix in IMAGES:
        files.append(File.generated(config, uri, content=path.read_bytes()))
    elif path.is_file() and path.suffix in LANGUAGES:
        name = path.relative_to(root).as_posix()
        code = f"~~~~~{LANGUAGES[path.suffix]}\n{path.read_text()}~~~~~\n"
        files.append(File.generated(config, uri, content=f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n{code}"))
    else:
        raise PluginError(
            f"cannot add {path} to the site: it is not a file with a suffix of {sorted(LANGUAGES.keys() | IMAGES)}. "
            "Link to a file, or add its suffix."
        )


def _uri(path: Path, docs: Path) -> str:
    """Return the path within the site's source of a file, which `_add` may have added."""
    if path.is_relative_to(docs) and path.suffix in IMAGES | {".md"}:
        return path.relative_to(docs).as_posix()
    uri = f"{FOLDER}/{path.relative_to(docs.parent).as_posix()}"
    return uri if path.suffix in IMAGES | {".md"} else f"{uri}.md"


def _linked_file(page: Path, target: str) -> Path | None:
    """Return the file that a link of a page leads to; None for URLs, and for missing files, which mkdocs reports."""
    if re.match(r"[a-z]+:|/", target):
        return None
    path = Path(posixpath.normpath(page.parent / unquote(target)))
    return path if path.exists() else None


def _targets(markdown: str) -> list[str]:
    found: list[str] = []
    _outside_code(markdown, lambda text: (found.extend(match[2] for match in _LINK.finditer(text)), text)[1])
    return found


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Return the text with its parts outside code blocks and code spans changed."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])
