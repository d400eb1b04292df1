"""Generate with vLLM, whose workers are the trainer's ranks themselves.

Input: a trainer's arguments, and weights under Hugging Face names. Output: vLLM's outputs.

The calls are those of the version in tests/helpers/engines/signatures.json. They have not been run on a GPU. Weights
are transferred in the steps that vLLM documents for trainers; see `vllm_transfer`.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from fsdp2_strategy.errors import RolloutError, some
from fsdp2_strategy.rollout import vllm_transfer
from fsdp2_strategy.rollout.protocol import Changes, Engine, Weights
from fsdp2_strategy.rollout.trainer_arguments import (
    check_allows_sleep,
    dtype_name,
    import_package,
    option,
    position_in_engine,
)


class VLLMEngine(Engine):
    """Generate with vLLM, in this process. Collective over the ``tp_size`` successive ranks that share an engine.

    These ranks must call `generate` with the same prompts, and each of them gets all outputs.

    Args:
        model: folder or name of the model.
        dtype: dtype of the weights, for example "bfloat16".
        tp_size: number of ranks that share an engine.
        memory_fraction: share of an accelerator's memory for weights and cache, from 0 to 1.
        allows_sleep: whether `sleep` can be called, which makes vLLM reserve its memory differently.
        **options: further arguments of ``vllm.LLM``, but not ``weight_transfer_config``.

    Raises:
        RolloutError: vLLM is not installed, or its version has no documented way to update weights.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "bfloat16",
        tp_size: int = 1,
        memory_fraction: float = 0.5,
        allows_sleep: bool = True,
        **options: Any,
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the weights of its worker must be in this process
        vllm = import_package("vllm")
        if "weight_transfer_config" in options:
            raise RolloutError(
                "cannot build an engine: weight_transfer_config was passed, expected none, because the engine "
                "transfers weights itself. For another transfer, use vllm.LLM, and send it vllm_weight_source(model)."
            )
        self._transfers = vllm_transfer.register(vllm)
        if self._transfers:
            options["weight_transfer_config"] = {"backend": vllm_transfer.BACKEND}
        self.llm: Any = vllm.LLM(
            model=model,
            dtype=dtype,
            tensor_parallel_size=tp_size,
            gpu_memory_utilization=memory_fraction,
            enable_sleep_mode=allows_sleep,
            distributed_executor_backend="external_launcher",  # the ranks are its workers
            **options,
        )
        self.dtype = dtype
        self.weights_version: str | None = None
        self._allows_sleep = allows_sleep

    @classmethod
    def from_args(cls, args: Any, dtype: torch.dtype | None) -> VLLMEngine:
        """Build the engine of LightRFT's arguments.

        Args:
            args: ``pretrain``, ``engine_tp_size`` (1), ``engine_mem_util`` (0.5), ``enable_engine_sleep`` (true),
                ``seed`` (42; each engine adds its number), ``bf16``, ``prompt_max_len`` and ``generate_max_len`` (the
                model's own limit), ``text_only`` (true), ``limit_mm_image_per_prompt``, ``limit_mm_video_per_prompt``,
                ``trust_remote_code`` (false), which lets vLLM run code that is in the model's folder.
            dtype: dtype of the weights that will be sent; None for that of ``bf16``.

        Raises:
            RolloutError: see `option` and `position_in_engine`; or vLLM is not installed.
        """
        size = option(args, "engine_tp_size", 1)
        engine, _ = position_in_engine(size)
        options: dict[str, Any] = {}
        lengths = [option(args, name, 0) for name in ("prompt_max_len", "generate_max_len")]
        if all(lengths):
            options["max_model_len"] = sum(lengths)
        if not option(args, "text_only", True):
            limits = {kind: option(args, f"limit_mm_{kind}_per_prompt", None) for kind in ("image", "video")}
            if given := {kind: limit for kind, limit in limits.items() if limit is not None}:
                options["limit_mm_per_prompt"] = given
        return cls(
            option(args, "pretrain"),
            dtype=dtype_name(args, dtype),
            tp_size=size,
            memory_fraction=option(args, "engine_mem_util", 0.5),
            allows_sleep=option(args, "enable_engine_sleep", True),
            seed=option(args, "seed", 42) + engine,
            trust_remote_code=bool(option(args, "trust_remote_code", False)),
            **options,
        )

    @property
    def llm_engine(self) -> Any:
        """The engine inside of vLLM's ``LLM``, with its ``model_config``."""
        return self.llm.llm_engine

    def update_weights(self, weights: Weights) -> None:
        """Load all weights into this rank's worker, which keeps its part of each.

        vLLM converts each layer for its kernels when all weights of the layer have been received, and holds them until
        then.

        Raises:
            RolloutError: the engine is asleep, or has requests. After a failure, `generate` raises until an update
                succeeds.
        """
        self._check_awake("update its weights")
        self._transfer(weights=weights)

    def update_changed_weights(self, changes: Changes, *, since: str, version: str) -> None:
        """Write the weights that have changed since a version in place; see `RolloutEngine`.

        vLLM writes differences into a model whose layers are in the layout of the files: without quantization, without
        latent attention (MLA), and with experts only for the kernels in Triton.

        Raises:
            RolloutError: as `update_weights`; or vLLM, or its model, takes no differences; the engine has another
                version than ``since``; or a weight is not a floating-point tensor.
        """
        self._check_awake("update its weights")
        self._check_takes_differences()
        if since and since != self.weights_version:
            raise RolloutError(
                f"cannot update weights: the engine has version {self.weights_version}, expected {since}, since which "
                "changes were sent. Send all weights."
            )
        self._transfer(**{"changes" if since else "weights": changes})
        self.weights_version = version

    def _check_takes_differences(self) -> None:
        if not self._transfers:
            raise RolloutError(
                "cannot update weights by difference: this version of vLLM reloads weights layer by layer, expected "
                "one that transfers weights in steps. Install vllm 0.33, or update without by_difference."
            )
        (converted,) = self.llm.apply_model(vllm_transfer.converted_layers)
        if converted:
            raise RolloutError(
                f"cannot update weights by difference: vLLM converts {some(converted, 'layer')} for its kernels, "
                "expected layers in the layout of the files, in which differences are sent. Update without "
                "by_difference."
            )

    def _transfer(self, **update: Any) -> None:
        self._has_weights, self.weights_version = False, None
        if self._transfers:
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": update})
            self.llm.finish_weight_update()
            self.llm.llm_engine.reset_encoder_cache()
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": update["weights"]})
        if not self.llm.reset_prefix_cache():
            raise RolloutError(
                "cannot update weights: vLLM did not clear the cache of the old weights, expected no requests during "
                "an update. Finish all requests first, and update again."
            )
        self._has_weights = True

    def sleep(self) -> None:
        """Move the weights to host memory, and free the cache; raise RolloutError without ``allows_sleep``."""
        check_allows_sleep(self._allows_sleep)
        self.llm.sleep(level=1)
        self.is_asleep = True

    def wake_up(self) -> None:
        """Move the weights back to the accelerator, and allocate the cache again."""
        if self.is_asleep:
            self.llm.wake_up()
        self.is_asleep = False

    def generate(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``vllm.LLM.generate`` with the same arguments and result; raise RolloutError if asleep.

        ``prompts`` may contain lists of token ids, as LightRFT passes them; vLLM expects a mapping.
        """
        self._check_ready("generate")
        if isinstance(prompts, list | tuple):
            prompts = [
                {"prompt_token_ids": list(prompt)} if isinstance(prompt, list | tuple) else prompt for prompt in prompts
            ]
        return self.llm.generate(prompts, *args, **kwargs)
