"""Checkpoints: `layout` (names, manifest, commit), `storage` (tensors), `state` and `rng` (what is saved), `rotation`.

`save` and `load` tie them together; both are collective, and end alike on every rank.
"""

from fsdp2_strategy.checkpoint.layout import Checkpoint, list_checkpoints
from fsdp2_strategy.checkpoint.load import LoadedCheckpoint, load_checkpoint
from fsdp2_strategy.checkpoint.save import save_checkpoint

__all__ = ["Checkpoint", "LoadedCheckpoint", "list_checkpoints", "load_checkpoint", "save_checkpoint"]
