"""Describe a checkpoint in the layout of transformers' ``Trainer``.

Input: the files that a trainer writes next to the weights. Output: the same, for `save_checkpoint`, which writes them
into the checkpoint's directory. `checkpoint.paths` defines the paths of all other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLayout:
    """The layout of transformers' ``Trainer``: the directory of a checkpoint is itself a Hugging Face folder.

    So ``from_pretrained("output/checkpoint-500")`` loads the model. For a PEFT model, the directory contains the
    adapters instead of the weights. ``training_state/`` contains the rest of the state that a run resumes from.
    """

    kind: ClassVar[Literal["trainer"]] = "trainer"
    files: Mapping[str, str] = field(default_factory=dict)
    """Text files to write next to the weights, such as ``trainer_state.json``: content by name."""
