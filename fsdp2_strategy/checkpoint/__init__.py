"""Save and load sharded checkpoints: components of a model, commit, rotation and verification of directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from fsdp2_strategy.checkpoint.data_position import LATER as LATER
    from fsdp2_strategy.checkpoint.data_position import Loader as Loader
    from fsdp2_strategy.checkpoint.listing import Checkpoint as Checkpoint
    from fsdp2_strategy.checkpoint.listing import list_checkpoints as list_checkpoints
    from fsdp2_strategy.checkpoint.load import load_checkpoint as load_checkpoint
    from fsdp2_strategy.checkpoint.random_state import seed_everything as seed_everything
    from fsdp2_strategy.checkpoint.save import save_checkpoint as save_checkpoint
    from fsdp2_strategy.checkpoint.save import wait_for_checkpoint as wait_for_checkpoint
    from fsdp2_strategy.checkpoint.training_state import LoadedCheckpoint as LoadedCheckpoint
    from fsdp2_strategy.checkpoint.verify import VerifyReport as VerifyReport
    from fsdp2_strategy.checkpoint.verify import verify_checkpoint as verify_checkpoint

_MODULE_OF = {
    "Checkpoint": "listing",
    "LATER": "data_position",
    "LoadedCheckpoint": "training_state",
    "Loader": "data_position",
    "VerifyReport": "verify",
    "list_checkpoints": "listing",
    "load_checkpoint": "load",
    "save_checkpoint": "save",
    "seed_everything": "random_state",
    "verify_checkpoint": "verify",
    "wait_for_checkpoint": "save",
}
"""The module of each public name."""

__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_imports(__name__, _MODULE_OF)
