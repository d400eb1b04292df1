"""Generate with vLLM, whose workers are the trainer's ranks themselves.

Input: a trainer's arguments, and weights under Hugging Face names. Output: vLLM's outputs.

The calls are those of the version in tests/helpers/engines/signatures.json. They have not been run on a GPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from fsdp2_strategy.rollout.protocol import Engine, Weights
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
        **options: further arguments of ``vllm.LLM``.

    Raises:
        RolloutError: vLLM is not installed.
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
        """Load all weights into this rank's worker, which keeps its part of each; raise RolloutError if asleep."""
        self._check_awake("update its weights")
        self.llm.apply_model(lambda model: len(model.load_weights(weights)))
        self.llm.reset_prefix_cache()

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
        self._check_awake("generate")
        if isinstance(prompts, list | tuple):
            prompts = [
                {"prompt_token_ids": list(prompt)} if isinstance(prompt, list | tuple) else prompt for prompt in prompts
            ]
        return self.llm.generate(prompts, *args, **kwargs)
