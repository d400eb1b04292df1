"""The files of a release: their metadata, the links of their README, and what stops the build."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from helpers.worlds import some

PROJECT = Path(__file__).resolve().parents[1]
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "fsdp2_strategy", "docs")
ADDRESS = "https://git.example.org/group/name"
REFUSED = ["git.example.org/name", "https://name", "git@example.org:group/name"]


@pytest.fixture
def release(tmp_path):
    """Return a repository with the sources of the project, whose HEAD has the tag of its version."""
    root = tmp_path / "repository"
    (root / ".ci").mkdir(parents=True)
    shutil.copy(PROJECT / ".ci/dist.py", root / ".ci")
    for name in FILES:
        copy = shutil.copytree if (PROJECT / name).is_dir() else shutil.copy
        copy(PROJECT / name, root / name)
    git(root, "init", "--quiet")
    commit(root)
    git(root, "tag", f"v{version()}")
    return root


def git(root, *arguments):
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def commit(root):
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "Release")


def version():
    return re.search(r'__version__ = "(.+)"', (PROJECT / "fsdp2_strategy/__init__.py").read_text())[1]


def build(root, *arguments):
    command = [sys.executable, str(root / ".ci/dist.py"), "--out", str(root.parent / "dist")]
    command += arguments or ("--repository", ADDRESS)
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.full
def test_a_release_has_addresses_and_absolute_links(release):
    result = build(release)
    assert result.returncode == 0, result.stderr
    name = f"fsdp2_strategy-{version()}"
    assert {path.name for path in (release.parent / "dist").iterdir()} == {f"{name}.tar.gz", f"{name}-py3-none-any.whl"}
    with zipfile.ZipFile(release.parent / f"dist/{name}-py3-none-any.whl") as wheel:
        metadata = Parser().parsestr(wheel.read(f"{name}.dist-info/METADATA").decode())
        assert "fsdp2_strategy/strategy.py" in wheel.namelist()
    tag = f"v{version()}"
    assert metadata["Version"] == version()
    assert set(metadata.get_all("Project-URL")) == {
        f"Documentation, {ADDRESS}/tree/{tag}/docs",
        f"Source, {ADDRESS}",
        f"Changelog, {ADDRESS}/blob/{tag}/CHANGELOG.md",
        f"Issues, {ADDRESS}/issues",
    }
    readme = metadata.get_payload()
    targets = re.findall(r"\]\(([^)\s]+)\)|^\[\w+\]: (\S+)", readme, re.MULTILINE)
    addresses = [one or other for one, other in targets]
    assert len(addresses) > 30
    assert [address for address in addresses if not address.startswith(("https://", "#"))] == []
    assert f"{ADDRESS}/raw/{tag}/docs/images/demo_loss.png" in addresses
    assert f"{ADDRESS}/blob/{tag}/docs/benchmarks.md#checkpoints" in addresses


def test_a_commit_without_the_tag_of_its_version_is_not_built(release):
    git(release, "tag", "--delete", f"v{version()}")
    assert f"HEAD has the tags [], expected v{version()}" in build(release).stderr


def test_uncommitted_changes_are_not_built(release):
    (release / "README.md").write_text("changed")
    assert " M README.md" in build(release).stderr


@pytest.mark.full
def test_a_version_without_changes_in_the_changelog_is_not_built(release):
    (release / "CHANGELOG.md").write_text("# Changelog\n")
    assert "CHANGELOG.md has no heading" in build(release).stderr


@pytest.mark.full
def test_a_broken_link_of_the_readme_stops_the_build(release):
    with (release / "README.md").open("a") as file:
        file.write("[broken](docs/missing.md)\n")
    commit(release)
    git(release, "tag", "--force", f"v{version()}")
    assert "docs/missing.md absolute: the release has no such file" in build(release).stderr


@pytest.mark.parametrize("address", some(REFUSED, REFUSED[:1]))
def test_an_address_that_no_reader_can_open_is_refused(release, address):
    assert f"cannot use {address!r} as an address" in build(release, "--repository", address).stderr
