"""Export a sharded policy to a folder that LeRobot's ``from_pretrained`` loads, for example on a robot.

Input: a policy, and the objects for its sidecar files. Output: a folder with the content of ``pretrained_model/``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.export import save_adapters, save_all_weights
from fsdp2_strategy.hf.peft.files import ADAPTER_WEIGHTS
from fsdp2_strategy.hf.peft.merge import Merged, is_peft_model, without_adapter_modules
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.transformers_models import write_configuration
from fsdp2_strategy.integrations.lerobot.layout import PolicySidecars
from fsdp2_strategy.model.ranks import on_model_ranks
from fsdp2_strategy.model.wrappers import unwrap_model


@collective
@on_model_ranks
def save_policy(
    policy: nn.Module,
    output_dir: str | Path,
    *,
    preprocessor: Any = None,
    postprocessor: Any = None,
    train_config: Any = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a policy as one ``model.safetensors``, with sidecar files; collective.

    Each rank writes its own byte ranges. For a PEFT model, write only the adapters, which ``PeftModel.from_pretrained``
    loads, and the configuration of the base model. If the policy builds adapters itself, in one of its modules, write
    all weights with the policy's own names.

    Args:
        policy: a policy, sharded or not, or a wrapper of one.
        output_dir: a folder that every rank can access. Files of an earlier export are replaced. Adapters and full
            weights need separate folders, because a robot would load both.
        preprocessor: an object with ``save_pretrained``, or None.
        postprocessor: an object with ``save_pretrained``, or None.
        train_config: content of ``train_config.json``: an object with ``save_pretrained``, a mapping, a dataclass, or
            None.
        dtype: dtype of the floating-point parameters in the files; by default the dtype of the shards. After
            mixed-precision training, this is fp32, the dtype of the master weights.

    Raises:
        CheckpointError: on every rank, if an object cannot be saved; if the policy has adapters and the folder contains
            full weights, or the reverse; or if `save_model` would raise.
    """
    folder = Path(output_dir).expanduser()
    with all_or_none("export a policy", CheckpointError):
        root = unwrap_model(policy)
        adapted = is_peft_model(root)
        if is_rank_0():
            _check_folder(folder, adapted=adapted)
        base = meta_skeleton(without_adapter_modules(root) if adapted else root)
        sidecars = PolicySidecars.of(base, train_config, preprocessor, postprocessor)

    def write_sidecars(staged: Path) -> None:
        if adapted:
            write_configuration(staged, base, {})
        sidecars.write(staged)

    if adapted:
        save_adapters(policy, None, folder, dtype=dtype, further=write_sidecars)
    else:
        save_all_weights(policy, None, folder, Merged, dtype=dtype, max_shard_size=sys.maxsize, further=write_sidecars)


def _check_folder(folder: Path, *, adapted: bool) -> None:
    found = folder.glob("model*.safetensors*" if adapted else f"{ADAPTER_WEIGHTS}*")
    other = sorted(path for path in found if path.exists())  # a link without a target is of an export that was killed
    if other:
        exported, excluded = ("adapters", "full weights") if adapted else ("a full policy", "adapters")
        raise CheckpointError(
            f"cannot export {exported}: {folder} contains {other[0].name}, expected a folder without {excluded}. "
            "Choose another folder, or delete its files."
        )
