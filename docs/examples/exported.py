"""Check an exported folder: open it with plain transformers, and compare it with the model that was trained.

Input: a trained model and its exported folder. Output: the model that ``from_pretrained`` returns, on rank 0.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsdp2_strategy import token_log_probs
from fsdp2_strategy.distributed import all_or_none
from fsdp2_strategy.errors import CheckpointError

LARGEST_DIFFERENCE = 0.05  # nats per token: rounding to bf16 changes log-probabilities by about 0.01
CHECKED_TOKENS = 64


def check_export(model: nn.Module, folder: Path, ids: torch.Tensor) -> PreTrainedModel | None:
    """Compare log-probabilities of the exported causal language model and of the trained one; collective.

    Args:
        model: the trained model.
        folder: the folder that ``save_model`` wrote.
        ids: the tokens to compare, [1, length], the same on ranks that share sequences or layers.

    Returns:
        The exported model in host memory on rank 0, None on the others.

    Raises:
        CheckpointError: on every rank: rank 0 cannot open the folder, or it is another model.
    """
    ids = ids[:, :CHECKED_TOKENS]
    is_training, device = model.training, next(model.parameters()).device
    with torch.no_grad():
        expected = token_log_probs(model.eval(), ids.to(device)).cpu()
    model.train(is_training)
    exported = None
    with all_or_none("check the export", CheckpointError):
        if not dist.is_initialized() or dist.get_rank() == 0:
            exported = AutoModelForCausalLM.from_pretrained(folder).eval()
            with torch.no_grad():
                found = token_log_probs(exported, ids)
            difference = (found.float() - expected.float()).abs().mean().item()
            if not difference <= LARGEST_DIFFERENCE:
                raise CheckpointError(
                    f"the export is another model: log-probabilities of {folder} differ by {difference:.3g} nats per "
                    f"token from those of the trained model, expected at most {LARGEST_DIFFERENCE}."
                )
            print(f"exported to {folder}: from_pretrained opens it, and its log-probabilities differ by "
                  f"{difference:.1e} nats per token from the trained model's", flush=True)  # fmt: skip
    return exported
