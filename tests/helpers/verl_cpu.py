"""Run verl's workers on CPU ranks: a platform for verl's registry, and the worker of a tiny Llama with its batches.

Input: options of verl's configurations. Output: verl's ``TrainingWorker`` with an engine, and batches as verl's trainer
passes them. verl has no platform of its own for the CPU, and none of its engines are registered for it.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of ray, tensordict and hydra
    from tensordict import NonTensorData
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine import EngineRegistry  # noqa: F401  warns of engines that are not installed
    from verl.workers.engine.fsdp import transformer_impl as verl_engine
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import sft_loss
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

VOCABULARY = 64
STUBS = {
    "pinned memory": "pages are pinned for a GPU only; verl's own engine of the reference model pins none",
    "rollout": "vLLM and SGLang need a GPU; the worker's rollout is a `RecordingRollout`, which keeps what it is sent",
    "platform `cpu`": "verl knows the platforms nvidia, amd and huawei only; the tests use one for the CPU, a subclass "
    "of verl's `PlatformBase`",
}
"""What the tests put in place of something that is not there, and why."""


def _values(**values: Any) -> dict[str, Any]:
    return {name: (lambda self, *_, value=value, **__: value) for name, value in values.items()}


_MEMORY = SimpleNamespace(
    get_device_name=lambda: "CPU",
    empty_cache=lambda: None,
    synchronize=lambda: None,
    is_available=lambda: True,
    mem_get_info=lambda: (1, 1),
    **dict.fromkeys(["max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"], lambda: 0),
)

CPUPlatform = type(
    "CPUPlatform",
    (PlatformBase,),
    _values(
        is_available=True,
        current_device="cpu",
        device_count=1,
        set_device=None,
        synchronize=None,
        manual_seed=None,
        manual_seed_all=None,
        set_allocator_settings=None,
        empty_cache=None,
        get_device_capability=(None, None),
        communication_backend_name="gloo",
        visible_devices_envvar="CUDA_VISIBLE_DEVICES",
        nvtx_range=contextlib.nullcontext(),
        profiler_start=None,
        profiler_stop=None,
        ray_resource_name="CPU",
        ray_noset_envvars=[],
        is_ipc_supported=False,
        cudart=None,
    )
    | {name: property(lambda self, value=value: value) for name, value in
       {"device_name": "cpu", "vendor_name": "cpu", "device_module": _MEMORY}.items()},
)  # fmt: skip


@contextlib.contextmanager
def on_cpu(**variables: str) -> Iterator[None]:
    """Run a block on the platform of the CPU, with the variables that a launcher sets."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    names |= variables
    with (
        patch.object(platform_manager, "_current_platform", CPUPlatform()),
        patch.dict(os.environ, names),
        patch.object(verl_engine, "CPUOffloadPolicy", lambda pin_memory: CPUOffloadPolicy(pin_memory=False)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def write_model(folder: Path, **config: Any) -> Path:
    """Write a tiny Llama and its tokenizer on rank 0."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from helpers.trainers import tokenizer

    size = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**size | config)).save_pretrained(folder)
        words = tokenizer()
        words.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
        words.save_pretrained(folder)
    dist.barrier()
    return folder


def write_conversations(path: Path) -> None:
    """Write a data set of conversations, as verl's trainer for supervised fine-tuning reads it, on rank 0."""
    import pandas

    from helpers.trainers import text

    if dist.get_rank() == 0:
        rows = [
            [{"role": "user", "content": text(i)}, {"role": "assistant", "content": text(100 + i)}] for i in range(24)
        ]
        pandas.DataFrame({"messages": rows}).to_parquet(path)
    dist.barrier()


def configuration(
    folder: Path,
    *,
    strategy: str = "fsdp2_strategy",
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
) -> Any:
    """Return verl's configuration of a worker, as its actors make it: the strategy is set after the checks."""
    dtypes = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    settings = {"mixed_precision": dtypes, "use_torch_compile": False, "max_token_len_per_gpu": 40}
    settings |= {"infer_max_token_len_per_gpu": 40} | (engine or {})
    engine_config = FSDPEngineConfig(**settings)
    object.__setattr__(engine_config, "strategy", strategy)
    options = {"enable_gradient_checkpointing": False, "use_remove_padding": False} | (model or {})
    options["fused_kernel_options"] = {"impl_backend": "torch"}
    options["override_config"] = {"attn_implementation": "eager"}
    steps = {"lr": 1e-2, "total_training_steps": 8, "lr_warmup_steps": 2, "clip_grad": 1.0} | (optimizer or {})
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=str(folder), external_lib="fsdp2_strategy.integrations.verl", **options),
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(**steps),
        checkpoint_config=CheckpointConfig(**(checkpoint or {})),
    )


def worker_of(folder: Path, **options: Any) -> Any:
    """Return verl's worker with a built engine, and the loss of supervised fine-tuning."""
    worker = TrainingWorker(configuration(folder, **options))
    worker.reset()
    worker.set_loss_fn(loss)
    return worker


def loss(**values: Any) -> Any:
    """Return verl's loss of supervised fine-tuning, and its metrics."""
    return sft_loss(config=None, **values)


def samples(step: int, count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return token ids and loss masks of unequal lengths; the same on every rank."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 20, (count,), generator=draw).tolist()
    ids = [torch.randint(4, VOCABULARY, (length,), generator=draw) for length in lengths]
    return [(each, (torch.arange(len(each)) >= 2).long()) for each in ids]


def batch(step: int, *, count: int = 8, **extra: Any) -> Any:
    """Return this rank's part of the samples of a step, as verl's trainer passes it to a worker."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ids, masks = zip(*samples(step, count)[rank::world], strict=True)
    jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tensors = {
        "input_ids": jagged(list(ids)),
        "loss_mask": jagged(list(masks)),
        "position_ids": jagged([torch.arange(len(each)) for each in ids]),
    }
    lengths = [len(each) for each, _ in samples(step, count)]
    known = {"temperature": 1.0, "global_token_num": NonTensorData(lengths), "update_lr_scheduler": True}
    return tu.get_tensordict(tensors, known | extra)


class RecordingRollout:
    """Keep the weights that verl's worker sends to its rollout, in place of an inference engine."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        self.updates: list[tuple[dict[str, torch.Tensor], Any, bool]] = []

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: there is no memory to map."""

    async def update_weights(self, weights: Any, *, peft_config: Any, base_sync_done: bool, global_steps: int) -> None:
        """Keep the weights."""
        self.updates.append(({name: tensor.clone() for name, tensor in weights}, peft_config, base_sync_done))


def rollouts(step: int, count: int = 8) -> Any:
    """Return this rank's part of a batch of prompts and responses with advantages, padded on both sides."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 7, (count, 2), generator=draw)
    ids = torch.randint(4, VOCABULARY, (count, 12), generator=draw)
    place = torch.arange(6)
    mask = torch.cat([place >= 6 - lengths[:, :1], place < lengths[:, 1:]], dim=1).long()
    response_mask = mask[:, 6:]
    tensors = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": (ids * mask)[:, :6],
        "responses": (ids * mask)[:, 6:],
        "response_mask": response_mask,
        "advantages": torch.randn(count, 1, generator=draw) * response_mask,
    }
    rank, world = dist.get_rank(), dist.get_world_size()
    return tu.get_tensordict({name: tensor[rank::world] for name, tensor in tensors.items()}, {"temperature": 1.0})


def ppo_step(worker: Any, step: int) -> dict[str, Any]:
    """Call a worker for one step as verl's trainer does: log-probabilities, reference, update; return the metrics."""
    data = rollouts(step)
    for method, name in ((worker.compute_log_prob, "old_log_probs"), (worker.compute_ref_log_prob, "ref_log_prob")):
        unpadded = left_right_2_no_padding(rollouts(step))
        tu.assign_non_tensor(unpadded, calculate_entropy=False, compute_loss=False)
        data[name] = no_padding_2_padding(tu.get(method(unpadded), "log_probs"), unpadded).float()
    data = left_right_2_no_padding(data)
    options = {"calculate_entropy": True, "global_batch_size": 4, "mini_batch_size": 4, "epochs": 1, "seed": 1}
    tu.assign_non_tensor(data, compute_loss=True, dataloader_kwargs={"shuffle": False}, **options)
    found: dict[str, Any] = tu.get(worker.update_actor(data), "metrics")
    return found
