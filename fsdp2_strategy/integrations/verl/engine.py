"""Define the engine that verl's workers train, infer, stream and save with.

Input: verl's configurations, and batches that are split into micro-batches by verl's own functions. Output: losses,
metrics and model outputs, as verl's engine of FSDP returns them. verl's code prepares the inputs and computes
log-probabilities, losses and schedules; this package shards, steps, offloads, streams and saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from fsdp2_strategy.integrations.verl import checkpoints, settings
from fsdp2_strategy.integrations.verl import names as verl
from fsdp2_strategy.model.fsdp_state import reshard
from fsdp2_strategy.optim.groups import split_groups
from fsdp2_strategy.optim.zero_grad import discard_gradients
from fsdp2_strategy.rollout.stream import stream_adapter, stream_weights
from fsdp2_strategy.strategy import FSDPV2Strategy

_DEVICES = sorted({"cpu", "cuda", verl.get_device_name()})
"""Keys of verl's registry, which it looks up by the name of the device."""


@verl.EngineRegistry.register(model_type="language_model", backend=settings.BACKEND, device=_DEVICES)
class StrategyEngine(verl.FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine of language models, on a `FSDPV2Strategy`; verl's registry constructs it on every rank.

    The arguments are verl's. Methods that ask for ranks and sizes are not collective.

    Raises:
        ConfigError: the configuration requests what this package lacks; the message names it.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        settings.check_supported(model_config, engine_config, optimizer_config, checkpoint_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._autocast_dtype = torch.float32  # the strategy casts; verl must not do so again
        self._is_offload_param &= not engine_config.offload_policy
        self._is_offload_optimizer &= not engine_config.offload_policy
        self.strategy = FSDPV2Strategy(config=settings.strategy_config(model_config, engine_config, optimizer_config))
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.mode: Literal["train", "eval"] | None = None
        self.saved_paths: list[Path] = []
        """Paths of the checkpoints that this engine has saved, oldest first; rank 0 removes those that it deletes."""

    # --- model and optimizer -----------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Build the model on meta, shard it, read this rank's weights, build optimizer and schedule; collective."""
        self.strategy.set_seed(self.engine_config.seed)  # the same adapters on every rank
        with self.strategy.init_model_context(meta_init=True):
            module = self._build_module()
            if self._is_lora:
                module = self._build_lora_module(module)
        self.module = self.strategy.prepare_model(module, is_training=not self.engine_config.forward_only)
        if not self.engine_config.forward_only:
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            self.optimizer = verl.build_optimizer(trained, self.optimizer_config)
            split_groups(self.optimizer)
            self.lr_scheduler = self._build_lr_scheduler(self.optimizer)
            self.strategy.prepare((module, self.optimizer, self.lr_scheduler))
        self.strategy.set_seed(self.engine_config.seed, per_rank=True)
        self._move(offloads=True, model=self._is_offload_param, optimizer=self._is_offload_optimizer)

    def _build_module(self) -> Any:
        """Build the model with verl's changes of its forward; on the meta device, where no weights are read."""
        config, is_trained = self.model_config, not self.engine_config.forward_only
        module = verl.get_hf_auto_model_class(hf_config=config.hf_config).from_pretrained(
            config.local_path,
            config=config.hf_config,
            dtype=torch.float32 if is_trained else settings.param_dtype(self.engine_config),
            trust_remote_code=config.trust_remote_code,
        )
        settings.check_full_model(module)
        verl.apply_monkey_patch(
            model=module,
            use_remove_padding=self.use_remove_padding,
            use_fused_kernels=config.use_fused_kernels,
            fused_kernels_backend=(config.fused_kernel_options or {}).get("impl_backend"),
        )
        self.pass_packed_cu_seqlens = "cu_seqlens" in signature(module.forward).parameters
        return module

    # --- offloading --------------------------------------------------------------------------------------------------

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """Return a context with model and optimizer on the device, in which the model trains; not collective."""
        return self._mode("train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """Return a context with the model on the device, in which the model infers; not collective."""
        return self._mode("eval", **kwargs)

    @contextmanager
    def _mode(
        self, mode: Literal["train", "eval"], disable_auto_offload: bool = False, zero_grad_on_exit: bool = True
    ) -> Iterator[None]:
        trains, moves = mode == "train", not disable_auto_offload
        is_done = False
        if moves:
            self._move(offloads=False, model=True, optimizer=trains)
        self.mode = mode
        self.module.train(trains)
        try:
            yield
            is_done = True
        finally:
            if trains and (zero_grad_on_exit or not is_done):
                self.optimizer_zero_grad()
            if not trains:
                reshard(self.module)
            if moves:
                self._move(offloads=True, model=self._is_offload_param, optimizer=trains and self._is_offload_optimizer)
            self.mode = None

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the model with its gradients, and the optimizer, to "cpu" or to verl's device; not collective.

        If verl's device is the CPU, nothing is offloaded, and what was offloaded is loaded again.
        """
        verl.BaseEngine.to(self, device=device, model=model, optimizer=optimizer, grad=grad)
        offloads = device == "cpu" and verl.get_device_name() != "cpu"
        self._move(offloads=offloads, model=model, optimizer=optimizer)

    def _move(self, *, offloads: bool, model: bool, optimizer: bool) -> None:
        """Offload or reload the model, the optimizer, or both."""
        strategy = self.strategy
        if model:
            (strategy.offload_model if offloads else strategy.reload_model)(self.module)
        if optimizer:
            (strategy.maybe_offload_optimizer if offloads else strategy.maybe_load_optimizer)(self.optimizer)

    # --- steps -------------------------------------------------------------------------------------------------------

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """Run all micro-batches of a batch, which verl splits by tokens or samples; collective.

        Returns:
            A dict of verl's: the outputs of the model in the order of the batch, and losses and metrics by micro-batch.
        """
        group = self.get_data_parallel_group()
        tokens = data["loss_mask"].sum().to(verl.get_device_id())
        dist.all_reduce(tokens, group=group)
        facts = {"sp_size": 1, "dp_size": self.get_data_parallel_size(), "batch_num_tokens": tokens.item()}
        verl.tensordict_utils.assign_non_tensor(data, **facts)  # verl's losses divide by these
        micro_batches, indices = verl.prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        keeps = forward_only or verl.tensordict_utils.get_non_tensor_data(
            data, key="return_model_output", default=False
        )
        outputs = []
        with torch.no_grad() if forward_only else self.strategy.accumulate(len(micro_batches)):
            for micro_batch in micro_batches:
                loss, output = self.forward_step(micro_batch, loss_function=loss_function, forward_only=forward_only)
                if not forward_only:
                    self.strategy.backward(loss, self.module)
                outputs.append(output if keeps else {k: v for k, v in output.items() if k != "model_output"})
        return verl.postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def optimizer_zero_grad(self) -> None:
        """Clear the gradients, and forget the micro-batches that computed them; not collective."""
        discard_gradients(self.module)

    def optimizer_step(self) -> float | None:
        """Clip the gradients and step, or skip if their norm is not finite, and return the norm; collective."""
        return self.strategy.optimizer_step(self.optimizer, self.module).grad_norm

    # --- weights and checkpoints -------------------------------------------------------------------------------------

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """Return a generator of names and full tensors, and the adapter's configuration; collective as it is iterated.

        The tensors have the compute dtype. A model without adapters, or with ``model.lora.merge``, yields its weights
        under Hugging Face names, and the configuration is None. Otherwise ``base_sync_done`` yields the adapter
        under peft's names; without it, the base model's weights under vLLM's names. ``layered_summon`` has no effect:
        the model is never gathered as a whole.
        """
        dtype = settings.param_dtype(self.engine_config)
        config = getattr(self.module, "peft_config", {}).get("default")
        if config is None or self.model_config.lora.get("merge", False):
            return stream_weights(self.module, dtype=dtype), None
        if base_sync_done:
            return stream_adapter(self.module), config.to_dict()
        base = stream_weights(self.module, dtype=dtype, merge_adapters=False)
        return ((verl.replace_lora_wrapper(name, config), tensor) for name, tensor in base), config.to_dict()

    def get_per_tensor_param_shard(self, **kwargs: Any) -> Any:
        """Raise, because a stream yields full tensors only; not collective.

        Raises:
            ConfigError: always.
        """
        raise settings.no_shards()

    get_per_tensor_param_delta_shard = get_per_tensor_param_shard

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save ``save_contents`` in exactly ``local_path``, delete this engine's older checkpoints; collective."""
        path = checkpoints.local_path(local_path, hdfs_path, kwargs)
        checkpoints.save(self, path, step=global_step, max_num=max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Load ``load_contents`` from ``local_path``, which is never deleted; None loads nothing; collective."""
        if local_path is not None:
            checkpoints.load(self, checkpoints.local_path(local_path, hdfs_path, kwargs))
