"""Hook of mkdocs: put the version into the header of the site, and the repository's address, if one was given.

Input: ``__version__`` of the package; the variable REPOSITORY of `make docs`, which mkdocs.yml reads. Output: the name
of the site with the version; a link to the repository, without the script of the theme that asks the host for the
numbers of its stars, because nothing in the site is loaded from the network.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the version to the name of the site."""
    package = Path(config.docs_dir).parent / "fsdp2_strategy" / "__init__.py"
    version = re.search(r'^__version__ = "(.+)"', package.read_text(), re.MULTILINE)
    config.site_name = f"{config.site_name} {version[1]}"
    return config


def on_post_page(output: str, **_: object) -> str:
    """Remove the mark by which the theme finds the link to the repository, and asks its host."""
    return output.replace(' data-md-component="source"', "")
