"""Provide the operations of which `memory.py` and tests/test_peaks.py measure the peak of host memory, with bounds.

A bound is the memory that an operation may need on a rank in addition to what the rank holds before. It follows from
`fsdp2_strategy.sizes` and from what the rank holds; nothing in it grows with the full model, except the largest tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import harness
import torch
from torch import nn
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, init_on_meta, load_weights, sizes, stream_weights
from fsdp2_strategy.checkpoint import background_save
from fsdp2_strategy.checkpoint.training_state import optimizer_tensors
from fsdp2_strategy.model import offload, offloading, reload
from fsdp2_strategy.sharding.shard import shard_model
from fsdp2_strategy.storage import verified_read, write

SLACK_BYTES = 16 << 20
"""Memory of Python and of the allocator that the bounds do not count."""


@dataclass(frozen=True)
class Operation:
    """An operation on a rank, the bound of its peak, and a text for the bound's formula."""

    call: Callable[[], object]
    bound_bytes: int
    formula: str
    check: Callable[[], object] = int
    """Raises ValuesError if values are wrong."""
    before: Callable[[], object] = int
    """Prepares the operation; not measured; collective."""
    after: Callable[[], object] = int
    """Undoes the operation; not measured; collective."""


@dataclass(frozen=True)
class Trained:
    """A Llama after one step of AdamW, in fp32."""

    strategy: FSDPV2Strategy
    model: nn.Module
    optimizer: Optimizer
    config: LlamaConfig

    @classmethod
    def of(cls, config: LlamaConfig) -> "Trained":
        """Build, shard and train a model; collective."""
        strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
        model = strategy.prepare_model(LlamaForCausalLM(config), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-3)
        ids = torch.zeros(1, 8, dtype=torch.long, device=strategy.device)
        strategy.backward(model(input_ids=ids, labels=ids).loss, model, optimizer)
        strategy.optimizer_step(optimizer, model)
        return cls(strategy, model, optimizer, config)

    @property
    def weights_bytes(self) -> int:
        """Bytes of this rank's shards of the weights."""
        return sum(harness.local_of(parameter).nbytes for parameter in self.model.parameters())

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's shards of the optimizer's state."""
        return sum(harness.local_of(tensor).nbytes for tensor in self.optimizer_state().values())

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the optimizer's state."""
        return optimizer_tensors(self.model, self.optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return weights and the optimizer's state."""
        return {**dict(self.model.named_parameters()), **self.optimizer_state()}

    def digests(self) -> dict[str, str]:
        """Return digests of this rank's parts of all tensors."""
        return harness.digests_of(self.tensors())


class Calls:
    """The calls of a trained model, and the checks of their values."""

    def __init__(self, trained: Trained, folder: Path) -> None:
        self._trained, self._saved, self._exported = trained, folder / "saved", folder / "exported"
        self._expected = trained.digests()
        self._empty: list[nn.Module] = []

    def save(self, *, async_save: bool) -> None:
        self._trained.strategy.save_ckpt(self._trained.model, self._saved, "tag", async_save=async_save, max_num=1)
        self._trained.strategy.wait_for_checkpoint()

    def load(self) -> None:
        self._trained.strategy.load_ckpt(self._trained.model, self._saved)

    def export(self) -> None:
        self._trained.strategy.save_model(self._trained.model, None, self._exported)

    def load_folder(self) -> None:
        load_weights(self._trained.model, self._exported)

    def build_empty(self) -> None:
        with init_on_meta():
            self._empty = [LlamaForCausalLM.from_pretrained(self._exported)]
        shard_model(self._empty[0], config=StrategyConfig(bf16=False))

    def load_empty(self) -> None:
        load_weights(self._empty[0], self._exported)

    def check_empty(self) -> None:
        weights = dict(self._empty[0].named_parameters())
        harness.check_values(harness.digests_of(weights), {name: self._expected[name] for name in weights})

    def drop_empty(self) -> None:
        self._empty = []

    def stream(self) -> None:
        names = {name for name, _ in stream_weights(self._trained.model, dtype=torch.bfloat16)}
        if names != {name for name, _ in self._trained.model.named_parameters()}:
            raise harness.ValuesError("the stream does not have the names of the weights")

    def move(self, call: Callable[[Optimizer], object]) -> None:
        """Offload or reload the optimizer, as with an accelerator that has memory of its own."""
        with patch.object(offloading, "_needs_copies", lambda: True):
            call(self._trained.optimizer)

    def clear(self) -> None:
        for tensor in self._trained.tensors().values():
            harness.local_of(tensor.detach()).zero_()

    def clear_weights(self) -> None:
        for parameter in self._trained.model.parameters():
            harness.local_of(parameter.detach()).zero_()

    def check(self) -> None:
        harness.check_values(self._trained.digests(), self._expected)

    def check_offloaded(self) -> None:
        if not offloading.is_offloaded(self._trained.optimizer):
            raise harness.ValuesError("the optimizer's state is not offloaded")


def operations(trained: Trained, folder: Path) -> dict[str, Operation]:
    """Return the operations by name, in the order in which they are to run; not collective.

    Loads read what the saves and the export before them have written.
    """
    calls, optimizer = Calls(trained, folder), trained.optimizer
    reading, writing = (module._THREADS * sizes.BLOCK_BYTES for module in (verified_read, write))
    blocks = f"{write._THREADS} blocks of {_mib(sizes.BLOCK_BYTES)}"
    largest = max(parameter.numel() for parameter in trained.model.parameters()) * torch.bfloat16.itemsize
    bucket_bytes = max(sizes.BUCKET_BYTES, largest)
    state = [harness.local_of(tensor).nbytes for tensor in trained.optimizer_state().values()]
    buffer_bytes = max(sizes.OFFLOAD_BYTES, *state)
    buffer = f"buffer of {_mib(buffer_bytes)}"
    copied, held = trained.state_bytes, trained.weights_bytes + trained.state_bytes
    offloaded = Operation(lambda: offload(optimizer), 0, "nothing", calls.check_offloaded)
    # Both keep the copy. Whether the allocator has given back the memory that the state had, differs between runs.
    moved = replace(offloaded, bound_bytes=copied + buffer_bytes, formula=f"state, a {buffer}")
    return {
        "save": Operation(partial(calls.save, async_save=False), writing, blocks, calls.check),
        "save, asynchronous": Operation(
            partial(calls.save, async_save=True),
            held + writing,
            f"weights and state, {blocks}",
            calls.check,
            after=background_save.staging().clear,
        ),
        "load": Operation(calls.load, reading, blocks, calls.check, calls.clear),
        "export": Operation(calls.export, writing, blocks, calls.check),
        "load, Hugging Face": Operation(calls.load_folder, reading, blocks, calls.check, calls.clear_weights),
        "load, Hugging Face, from meta": Operation(
            calls.load_empty,
            trained.weights_bytes + reading,
            f"weights, {blocks}",
            calls.check_empty,
            calls.build_empty,
            calls.drop_empty,
        ),
        "stream": Operation(calls.stream, 2 * bucket_bytes, f"2 buckets of {_mib(bucket_bytes)}", calls.check),
        "offload": offloaded,
        "reload": replace(offloaded, call=lambda: reload(optimizer), check=calls.check),
        "offload, copied": replace(moved, call=partial(calls.move, offload)),
        "reload, copied": replace(moved, call=partial(calls.move, reload), check=calls.check),
    }


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"


def run(operation: Operation) -> list[dict]:
    """Run an operation and check its values; return the outcome or error of every rank; collective."""
    operation.before()
    outcomes = harness.attempt(lambda: harness.turn(operation.call), operation.check)
    operation.after()
    return outcomes
