"""A sharded policy -> the folder that a robot loads, as LeRobot's ``from_pretrained`` reads it.

Input: a policy, and what goes beside its weights. Output: what ``pretrained_model/`` of a checkpoint holds, by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.export import save_model
from fsdp2_strategy.hf.peft.files import ADAPTER_WEIGHTS
from fsdp2_strategy.hf.peft.merge import base_of, has_adapters
from fsdp2_strategy.hf.save_plan import write_configuration
from fsdp2_strategy.hf.skeleton import twin
from fsdp2_strategy.lerobot.checkpoint_layout import BesidePolicy
from fsdp2_strategy.model.ranks import on_its_ranks
from fsdp2_strategy.model.wrappers import unwrap_model


@on_its_ranks
def save_policy(
    policy: nn.Module,
    output_dir: str | Path,
    *,
    preprocessor: Any = None,
    postprocessor: Any = None,
    train_config: Any = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the folder that a robot loads: one ``model.safetensors``, or adapters, and what goes beside; collective.

    All ranks write, each its own ranges. A model of peft is written as its adapters alone, which
    ``PeftModel.from_pretrained`` loads, with the configuration of its base.

    Args:
        policy: sharded or not, or a wrapper.
        output_dir: the folder, seen by every rank; files of an earlier export are replaced. One with weights takes no
            adapters, and the other way round, for a robot would load both.
        preprocessor: with ``save_pretrained``, or None.
        postprocessor: with ``save_pretrained``, or None.
        train_config: for ``train_config.json``: an object with ``save_pretrained``, a mapping or a dataclass, or None.
        dtype: of the floating parameters in the files; by default that of the shards: after training the fp32 masters.

    Raises:
        CheckpointError: on every rank: an object cannot be saved, the folder holds an export of the other kind, or see
            `save_model`.
    """
    folder, adapted = Path(output_dir), has_adapters(policy)
    with all_or_none("export a policy", CheckpointError):
        if is_rank_0():
            _check_of_one_kind(folder, adapted=adapted)
        base = twin(base_of(unwrap_model(policy)))
        beside = BesidePolicy.of(base, train_config, preprocessor, postprocessor)
    save_model(policy, None, folder, dtype=dtype, max_shard_size=sys.maxsize, merge_adapters=not adapted)
    with all_or_none("export a policy", CheckpointError):
        if is_rank_0():
            if adapted:
                write_configuration(folder, base, {})
            beside.write(folder)


def _check_of_one_kind(folder: Path, *, adapted: bool) -> None:
    other = sorted(folder.glob("model*.safetensors*" if adapted else f"{ADAPTER_WEIGHTS}*"))
    if other:
        kinds = ("adapters", "a folder without weights") if adapted else ("a whole policy", "a folder without adapters")
        raise CheckpointError(
            f"cannot export {kinds[0]} into {folder}: it holds {other[0].name}, expected {kinds[1]}. Choose another "
            "folder, or remove what it holds."
        )
