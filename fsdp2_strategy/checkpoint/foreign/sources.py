"""Define what is known of a checkpoint of another system from names alone: its kind, its sources, its step.

Input: the names that `folders` found. Output: `Foreign`, which `recognise` returns. This module imports no torch.

[Note: sources] A checkpoint of another system consists of sources: folders of `torch.distributed.checkpoint`, files of
``torch.save``, one file per rank, safetensors and JSON files. The role of a source says where its content stands:
"model", "optimizer", "scheduler", "client" (values of the trainer), or "" if it has several parts, which `contents`
tells apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from fsdp2_strategy.checkpoint.paths import names_in

Role = Literal["", "model", "optimizer", "scheduler", "client"]
Form = Literal["dcp", "pickle", "ranks", "weights", "json"]

HUGGING_FACE = "a Hugging Face folder"
ACCELERATE = "a checkpoint of accelerate"
TRAINER = "a checkpoint of transformers' Trainer"
LIGHTNING = "a checkpoint of Lightning"
LIGHTRFT = "a checkpoint of LightRFT"
VITRA = "a checkpoint of VITRA"
VERL = "a checkpoint of verl"
PRIME_RL = "a checkpoint of prime-rl"
TORCHTITAN = "a checkpoint of torchtitan"
DCP = "a folder of torch.distributed.checkpoint"
PER_RANK = "a checkpoint with one file of torch.save per rank"
FILES = "a folder with files of torch.save"
FILE = "a file of torch.save"

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_STEP = re.compile(r"(?:^|[^a-z])(?:steps?|iter(?:ation)?s?|it)[=_-]?(\d+)(?!.*(?:step|iter)[=_-]?\d)", re.IGNORECASE)
_TRAINER_STEP = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True)
class Source:
    """Files of a checkpoint that are read together; see [Note: sources]."""

    role: Role
    form: Form
    paths: tuple[Path, ...]
    """The folder or file; of the form "ranks", the file of each rank."""


@dataclass(frozen=True)
class Foreign:
    """The checkpoint of another system."""

    kind: str
    """A noun phrase for messages, such as "a checkpoint of accelerate"."""
    path: Path
    sources: tuple[Source, ...]
    named_step: int | None = None
    """The step in a JSON file, or in a name that says that it is one; None if only the content of pickles can tell."""

    @property
    def processes(self) -> int:
        """The number of processes whose random states accelerate saved; 0 without such files."""
        return sum(re.fullmatch(r"random_states_\d+\.pkl", name) is not None for name in names_in(self.path))

    @property
    def model(self) -> Path:
        """The folder or file with the weights; of files per rank, that of rank 0."""
        return next(source.paths[0] for source in self.sources if source.role in ("model", ""))

    @property
    def optimizer(self) -> Path | None:
        """The folder or file with only the optimizer's state; None if there is none, or it is with the weights."""
        return next((source.paths[0] for source in self.sources if source.role == "optimizer"), None)

    @property
    def step(self) -> int:
        """The step as far as names and JSON tell, else 0."""
        return self.named_step or 0

    @property
    def order(self) -> tuple[int, int]:
        """The step, then the number at the end of the name: by these, checkpoints in one directory are ordered."""
        match = re.search(r"(\d+)$", self.path.stem if self.path.suffix in PICKLES else self.path.name)
        return self.step, int(match[1]) if match else 0

    @property
    def needs_trust(self) -> bool:
        """Whether a load reads pickles, which can run any code."""
        return any(source.form not in ("weights", "json") for source in self.sources)

    @cached_property
    def is_hugging_face(self) -> bool:
        """Whether it has weights only, in safetensors files."""
        return all(source.form == "weights" for source in self.sources)


def step_of(path: Path) -> int | None:
    """Return the step in a name that says that it is one, such as ``step-100`` or ``epoch=1-step=3.ckpt``."""
    match = _TRAINER_STEP.match(path.name) or _STEP.search(path.name.replace("global", ""))
    return int(match[1]) if match else None
