"""Make the mistakes of new users on two ranks; run as a script, write docs/troubleshooting.md from their table."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch.distributed as dist
from helpers.mistakes import MISTAKES, page

PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"


def make(name, folder):
    """Make a mistake on this rank, and compare what the user gets with the table."""
    entry, logged = MISTAKES[name], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("fsdp2_strategy").addHandler(handler)
    begin = time.monotonic()
    try:
        if entry.error is None:
            entry.make(folder)
            assert dist.get_rank() or any(entry.message in text for text in logged), logged
        else:
            with pytest.raises(entry.error) as caught:
                entry.make(folder)
            assert entry.message in str(caught.value), str(caught.value)
    finally:
        logging.getLogger("fsdp2_strategy").removeHandler(handler)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("name", MISTAKES)
def test_every_rank_hears_of_a_mistake(name, tmp_path, run_on):
    run_on(2, make, name=name, folder=tmp_path)


def test_the_page_on_troubleshooting_is_the_table():
    assert PAGE.read_text() == page(), "run: python tests/test_mistakes.py"


if __name__ == "__main__":
    PAGE.write_text(page())
