"""Build the sdist and the wheel of a release, which a package index can show.

Input: the address of the public repository, and HEAD, which must have the tag v<version> and no changes. Output: two
files in dist/. Their metadata name the addresses of the project, and their README has absolute links to the files of
this tag, because a package index knows no other files. The addresses are not in pyproject.toml, so a fork can build
its own. Run by `make dist`.
"""

from __future__ import annotations

import argparse
import json
import mimetypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )(?![a-z]+:|#)([^)\s#]+)", re.MULTILINE)


def main() -> None:
    """Build the release of HEAD."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", required=True, help="https://github.com/OWNER/NAME, or a server with its paths")
    parser.add_argument("--docs", help="address of the docs site; default: the folder docs of the repository")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the two files; default: dist")
    parsed = parser.parse_args()
    for address in filter(None, (parsed.repository, parsed.docs)):
        if not re.match(r"https://[^/\s]+\.[^/\s]+/?\S*$", address):
            raise SystemExit(f"cannot use {address!r} as an address: expected https://HOST/PATH")
    tag = tag_of_release()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x"], cwd=tree, input=archive, check=True)
        write_addresses(tree, parsed.repository.rstrip("/"), parsed.docs, tag)
        subprocess.run([sys.executable, "-m", "build", "--outdir", str(parsed.out), str(tree)], check=True)


def tag_of_release() -> str:
    """Return the tag of HEAD; raise SystemExit unless HEAD is the release that the package and the CHANGELOG name."""
    source = (ROOT / "fsdp2_strategy/__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"', source, re.MULTILINE)[1]
    heading = re.compile(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", re.MULTILINE)
    if not heading.search((ROOT / "CHANGELOG.md").read_text()):
        raise SystemExit(f'cannot build {version}: CHANGELOG.md has no heading "## {version} - DATE"')
    if changes := git("status", "--porcelain"):
        raise SystemExit(f"cannot build {version}: these files have changes, commit them first:\n{changes}")
    tags = git("tag", "--points-at", "HEAD").split()
    if f"v{version}" not in tags:
        raise SystemExit(
            f"cannot build {version}: HEAD has the tags {tags}, expected v{version}. Its README links to the files of "
            f"this tag. Run git tag --annotate v{version} at the commit of the release, and push it."
        )
    return f"v{version}"


def git(*arguments: str) -> str:
    """Return the output of a git command in the repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.rstrip()


def write_addresses(tree: Path, repository: str, docs: str | None, tag: str) -> None:
    """Make the README's links absolute, and add the project's addresses to pyproject.toml, in a copy of the sources."""
    readme = tree / "README.md"
    readme.write_text(absolute_links(readme.read_text(), tree, repository, tag))
    addresses = {
        "Documentation": docs or f"{repository}/tree/{tag}/docs",
        "Source": repository,
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    lines = [f"{name} = {json.dumps(address)}\n" for name, address in addresses.items()]
    with (tree / "pyproject.toml").open("a") as file:
        file.writelines(["\n[project.urls]\n", *lines])


def absolute_links(markdown: str, tree: Path, repository: str, tag: str) -> str:
    """Return the text with links to the files of a tag in place of relative links; raise if one is broken."""

    def absolute(match: re.Match[str]) -> str:
        path = Path(match[2])
        if not (tree / path).exists():
            raise SystemExit(f"cannot make the README's link {match[2]} absolute: the release has no such file")
        is_image = (mimetypes.guess_type(path.name)[0] or "").startswith("image/")
        kind = "raw" if is_image else "blob" if (tree / path).is_file() else "tree"
        return f"{match[1]}{repository}/{kind}/{tag}/{path.as_posix()}"

    return _LINK.sub(absolute, markdown)


if __name__ == "__main__":
    main()
