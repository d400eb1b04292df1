"""Upload the Trainer's folder to the Hub without the lock and the uncommitted saves in it.

Input: the uploads of the Trainer, which take every file of its output directory. Output: the same uploads, which ignore
these files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import transformers.trainer

from fsdp2_strategy.checkpoint.directory import NOT_CHECKPOINTS


@contextlib.contextmanager
def uploads_of_saved_files() -> Iterator[None]:
    """Make the uploads of the Trainer that this block starts ignore the lock and uncommitted saves; not collective."""
    trainer: Any = transformers.trainer
    api = trainer.hf_api() if hasattr(trainer, "hf_api") else trainer  # before transformers 5.24, functions
    upload = api.upload_folder

    def upload_folder(*args: Any, ignore_patterns: Sequence[str] | None = None, **options: Any) -> Any:
        return upload(*args, ignore_patterns=[*(ignore_patterns or ()), *NOT_CHECKPOINTS], **options)

    with patch.object(api, "upload_folder", upload_folder):
        yield
