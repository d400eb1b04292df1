"""Generate with SGLang, whose workers are separate processes that the first rank of each engine starts.

Input: a trainer's arguments, and weights under Hugging Face names. Output: SGLang's outputs.

The calls are those of the version in tests/helpers/engines/signatures.json. They have not been run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import current_device, local_rank
from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.rollout.protocol import Engine, Weights
from fsdp2_strategy.rollout.trainer_arguments import (
    check_allows_sleep,
    dtype_name,
    import_package,
    option,
    position_in_engine,
)

_FREED_IN_SLEEP = ["kv_cache", "cuda_graph"]
"""SGLang's names of the memory that `sleep` frees. The weights stay, because an engine must keep them."""


class SGLangEngine(Engine):
    """Generate with SGLang on the accelerators of this rank and of the next ``tp_size - 1`` ranks; not collective.

    Args:
        model: folder or name of the model.
        dtype: dtype of the weights, for example "bfloat16".
        tp_size: number of tensor-parallel workers.
        memory_fraction: share of an accelerator's memory for weights and cache, from 0 to 1.
        allows_sleep: whether `sleep` can be called, which makes SGLang reserve its memory differently.
        bucket_bytes: size of the batches in which weights are sent to the workers; by default 512 MiB.
        **options: further arguments of ``sglang.Engine``.

    Raises:
        RolloutError: SGLang is not installed.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "bfloat16",
        tp_size: int = 1,
        memory_fraction: float = 0.5,
        allows_sleep: bool = True,
        bucket_bytes: int | None = None,
        **options: Any,
    ) -> None:
        sglang = import_package("sglang")
        with _without_store_of_torchrun():
            self.llm_engine: Any = sglang.Engine(
                model_path=model,
                dtype=dtype,
                tp_size=tp_size,
                mem_fraction_static=memory_fraction,
                enable_memory_saver=allows_sleep,
                **options,
            )
        self.dtype = dtype
        self._allows_sleep = allows_sleep
        self._bucket_bytes = sizes.BUCKET_BYTES if bucket_bytes is None else bucket_bytes

    @classmethod
    def from_args(cls, args: Any, dtype: torch.dtype | None) -> SGLangEngine | None:
        """Build the engine of LightRFT's arguments; None on ranks whose engine is on an earlier rank.

        Args:
            args: ``pretrain``, ``engine_tp_size`` (1), ``engine_mem_util`` (0.5), ``enable_engine_sleep`` (true),
                ``seed`` (42; each engine adds its number), ``bf16``, ``trust_remote_code`` (false), which lets SGLang
                run code that is in the model's folder.
            dtype: dtype of the weights that will be sent; None for that of ``bf16``.

        Raises:
            RolloutError: see `option` and `position_in_engine`; or SGLang is not installed.
        """
        size = option(args, "engine_tp_size", 1)
        engine, position = position_in_engine(size)
        if position:
            return None
        return cls(
            option(args, "pretrain"),
            dtype=dtype_name(args, dtype),
            tp_size=size,
            memory_fraction=option(args, "engine_mem_util", 0.5),
            allows_sleep=option(args, "enable_engine_sleep", True),
            base_gpu_id=current_device().index or 0,
            port=40000 + local_rank(),
            random_seed=option(args, "seed", 42) + engine,
            trust_remote_code=bool(option(args, "trust_remote_code", False)),
        )

    def update_weights(self, weights: Weights) -> None:
        """Send all weights to the workers, in a session: SGLang restores the layout of the files, and converts again.

        Raises:
            RolloutError: the engine is asleep, or SGLang reports a failure. After a failure, `generate` raises until an
                update succeeds.
        """
        self._check_awake("update its weights")
        self._has_weights = False
        with self._session():
            for bucket in _buckets(weights, self._bucket_bytes):
                _check(
                    self.llm_engine.update_weights_from_tensor(named_tensors=bucket, flush_cache=False),
                    f"SGLang did not load {bucket[0][0]} and the {len(bucket) - 1} after it",
                    "that it loads weights under the names of the model's files. Check that both have the same model.",
                )
        _check(
            self.llm_engine.flush_cache(),
            "SGLang did not clear the cache of the old weights",
            "no requests during an update. Finish all requests first, and update again.",
        )
        self._has_weights = True

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Open SGLang's session of an update, and close it also after an error; versions without sessions need none."""
        if not hasattr(self.llm_engine, "begin_weight_update"):
            yield
            return
        _check(
            self.llm_engine.begin_weight_update(),
            "SGLang did not begin it",
            "no other update at the same time. Finish that first.",
        )
        try:
            yield
        except BaseException:
            self.llm_engine.end_weight_update()  # else it refuses to begin the next
            raise
        _check(
            self.llm_engine.end_weight_update(),
            "SGLang did not end it",
            "that it converts the weights for its kernels. Update again.",
        )

    def sleep(self) -> None:
        """Free the memory of cache and graphs, but not the weights; raise RolloutError without ``allows_sleep``."""
        check_allows_sleep(self._allows_sleep)
        self.llm_engine.release_memory_occupation(tags=list(_FREED_IN_SLEEP))
        self.is_asleep = True

    def wake_up(self) -> None:
        """Allocate the memory of cache and graphs again."""
        if self.is_asleep:
            self.llm_engine.resume_memory_occupation(tags=list(_FREED_IN_SLEEP))
        self.is_asleep = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``sglang.Engine.generate`` with the same arguments and result; raise RolloutError if asleep."""
        self._check_ready("generate")
        return self.llm_engine.generate(*args, **kwargs)

    def close(self) -> None:
        """End the workers."""
        self.llm_engine.shutdown()


def _check(result: Any, failure: str, expected: str) -> None:
    """Raise if SGLang reports a failure, as a pair or as an object; versions that return nothing raise themselves."""
    success, message = result if isinstance(result, tuple) else (getattr(result, "success", True), "")
    if not success:
        message = message or getattr(result, "message", "")
        raise RolloutError(f"cannot update weights: {failure}: {message.rstrip('.')}. Expected {expected}")


def _buckets(weights: Weights, size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group successive weights into lists of at least ``size`` bytes; the last may be smaller."""
    bucket: list[tuple[str, torch.Tensor]] = []
    held = 0
    for name, tensor in weights:
        bucket.append((name, tensor))
        held += tensor.nbytes
        if held >= size:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


@contextmanager
def _without_store_of_torchrun() -> Iterator[None]:
    """Hide torchrun's store from SGLang's workers, which would otherwise join the trainer's process group."""
    store = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        yield
    finally:
        if store is not None:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = store
