"""Random models, sizes and ways to save: what is loaded, streamed and exported is what was saved, to the bit.

One seed is one case. A seed that fails fails again: ``pytest tests/test_random.py -k "seed-17]" -m ''``.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models import batch_of, build, loss_of
from helpers.reference import full
from helpers.training import assert_same, full_state, strategy_for
from helpers.worlds import some
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp2_strategy import EMA, stream_weights, verify_checkpoint
from fsdp2_strategy.cli import main

ARCHITECTURES = ["llama", "llama_tied", "mixtral", "qwen3_moe", "gpt2", "gpt_oss", "deepseek_v3"]

RANGES = {
    "BLOCK_BYTES": (64, 1 << 16),
    "CACHED_BYTES": (64, 1 << 14),
    "SMALL_WRITE_BYTES": (16, 1 << 14),
    "SCRATCH_BYTES": (64, 1 << 14),
    "SMALL_READ_BYTES": (16, 1 << 12),
    "SHORTEST_RUN_BYTES": (4, 1 << 13),
    "COMPUTED_BYTES": (64, 1 << 14),
    "FILE_BYTES": (512, 1 << 20),
    "COPY_BYTES": (64, 1 << 14),
    "BROADCAST_BYTES": (64, 1 << 14),
    "STAGING_BYTES": (256, 1 << 18),
    "OFFLOAD_BYTES": (256, 1 << 16),
    "BUCKET_BYTES": (64, 1 << 18),
    "LARGE_BYTES": (64, 1 << 15),
}
"""Of `fsdp2_strategy.sizes`: from the least to the most that a case draws, evenly in the logarithm."""


class Block(nn.Module):
    """Parameters of any shapes, and buffers of integers."""

    def __init__(self, shapes, draw):
        super().__init__()
        self.each = nn.ParameterList(_parameter(shape) for shape in shapes)
        self.register_buffer("count", torch.zeros(draw.choice([(), (3,), (2, 5)]), dtype=torch.int64))
        self.register_buffer("bytes", torch.zeros(draw.randrange(4), dtype=torch.uint8))
        self.register_buffer("table", torch.zeros(7), persistent=draw.random() < 0.5)

    def forward(self, x):
        return x + sum((p.float() * (i + 1)).square().sum() * 1e-3 for i, p in enumerate(self.each))


def _parameter(shape):
    """Return one that trains, unless it is empty: fully_shard reduces no empty gradients."""
    return nn.Parameter(torch.zeros(shape), requires_grad=math.prod(shape) > 0)


class Shapes(nn.Module):
    """Blocks of random shapes: of 0 to 4 dimensions, odd, empty, with fewer rows than ranks, one larger than others."""

    def __init__(self, draw):
        super().__init__()
        shapes = [self._shape(draw) for _ in range(draw.randrange(2, 6))]
        own = [self._shape(draw) for _ in range(draw.randrange(3))]
        self.blocks = nn.ModuleList(Block(shapes, draw) for _ in range(draw.randrange(1, 4)))
        self.own = nn.ParameterList([_parameter(shape) for shape in own])
        self.tied = nn.ParameterList([self.own[0]] if own and draw.random() < 0.5 else [])

    @staticmethod
    def _shape(draw):
        kind = draw.random()
        if kind < 0.1:
            return ()
        if kind < 0.2:
            return (draw.randrange(1, 5000),)
        if kind < 0.3:
            return (0, 3)
        if kind < 0.4:
            return (draw.randrange(100, 400), draw.randrange(30, 60))
        return tuple(draw.randrange(1, 12) for _ in range(draw.randrange(1, 5)))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + sum(p.float().square().sum() for p in [*self.own, *self.tied])


class Drawn:
    """One case."""

    def __init__(self, seed):
        self.seed = seed
        draw = random.Random(seed)
        self.name = draw.choice(ARCHITECTURES) if draw.random() < 0.6 else None
        self.config = draw.choice([{}, {"bf16": True}, {"bf16": True, "use_mp_opt": True}])
        self.shard_size = draw.choice([-1, -1, 1])
        self.sync = draw.random() < 0.4
        self.offloaded = draw.random() < 0.4
        self.average = draw.random() < 0.5
        self.loaded_at = {n: draw.choice([-1, 1]) for n in (1, 2, 3)}
        self.file_bytes = int(math.exp(draw.uniform(math.log(2000), math.log(1 << 20))))
        self._shapes_seed = draw.random()
        self.sizes = [
            {name: int(math.exp(draw.uniform(math.log(low), math.log(high)))) for name, (low, high) in RANGES.items()}
            for _ in range(5)
        ]

    def __repr__(self):
        return f"seed {self.seed}: {vars(self)}"

    def build(self, seed):
        if self.name:
            return build(self.name, seed)
        model = Shapes(random.Random(self._shapes_seed))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * (1 if tensor.is_floating_point() else 50))

        return model

    def start(self, seed, shard_size):
        strategy = strategy_for(**self.config, block_class_names=() if self.name else ("Block",))
        model = strategy.prepare_model(self.build(seed), is_training=True, shard_size=shard_size)
        optimizer = strategy.create_optimizer(model, lr=1e-2, weight_decay=0.1)
        return strategy, model, optimizer

    def train(self, strategy, model, optimizer, step):
        if self.name:
            loss = loss_of(self.name, model, batch_of(self.name, step, dist.get_rank()))
        else:
            loss = model(torch.full((), step + dist.get_rank() + 1.0)) * (step + 1)
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model)


def state_of(model, optimizer, ema):
    """Return all that a checkpoint holds, whole."""
    state = full_state(model, optimizer)
    persistent = {name: tensor for name, tensor in model.state_dict().items() if name not in state}
    state |= {f"buffer {name}": full(tensor).clone() for name, tensor in persistent.items()}
    if ema is not None:
        state |= {f"average {name}": full(tensor).clone() for name, tensor in ema.averages.items()}
    return state


def save(seed, folder):
    case = Drawn(seed)
    strategy, model, optimizer = case.start(0, case.shard_size)
    ema = EMA(model, 0.5) if case.average else None
    for step in range(2):
        case.train(strategy, model, optimizer, step)
        if ema:
            ema.update(model)
    expected = state_of(model, optimizer, ema)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")
    with patch.multiple("fsdp2_strategy.sizes", **case.sizes[0]):
        if case.offloaded:
            strategy.offload_model(model)
            strategy.maybe_offload_optimizer(optimizer)
        strategy.save_ckpt(model, folder / "ckpts", "t", optimizer=optimizer, ema=ema, async_save=not case.sync)
        if case.offloaded:
            strategy.reload_model(model)
            strategy.maybe_load_optimizer(optimizer)
        case.train(strategy, model, optimizer, 2)  # what is changed now is not in the checkpoint
        with torch.no_grad():
            for tensor in [*model.buffers(), *(ema.averages.values() if ema else ())]:
                tensor.zero_()
        strategy.close()
    if dist.get_rank() == 0:
        report = verify_checkpoint(folder / "ckpts/t")
        assert report.ok, report.problems
    dist.barrier()


def load(seed, folder):
    case, ranks = Drawn(seed), dist.get_world_size()
    expected = torch.load(folder / "expected.pt")
    strategy, model, optimizer = case.start(1, case.loaded_at[ranks])
    ema = EMA(model, 0.5) if case.average else None
    with patch.multiple("fsdp2_strategy.sizes", **case.sizes[ranks]):
        strategy.load_ckpt(model, folder / "ckpts", optimizer=optimizer, ema=ema)
        assert_same(state_of(model, optimizer, ema), expected)
        out = folder / f"out{ranks}"
        strategy.save_model(model, None, out, max_shard_size=case.file_bytes)
        dist.barrier()
        written = weights_in(out)
        streamed = {name: tensor.clone() for name, tensor in stream_weights(model, dtype=None)}
        assert_same(streamed, written)
        strategy.close()
    if dist.get_rank() == 0:
        holds(case, out, written, expected)
        if ranks == 1:  # what is in the checkpoint opens without a run, too
            with patch.multiple("fsdp2_strategy.sizes", **case.sizes[4]):
                assert main(["export", str(folder / "ckpts/t"), str(folder / "copy")]) == 0
            assert_same(weights_in(folder / "copy"), weights_in(folder / "ckpts/t/model"))
            for path in (folder / "copy", folder / "ckpts/t/model"):
                holds(case, path, weights_in(path), expected)
    dist.barrier()


def weights_in(folder):
    """Return the tensors of a folder's files; each has a name of its own, and an index names its file."""
    files = {path: load_file(path) for path in sorted(Path(folder).glob("*.safetensors"))}
    merged = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    assert len(merged) == sum(map(len, files.values()))
    return merged


def holds(case, folder, written, expected):
    """Compare a folder with what was saved: as `from_pretrained` opens it, or by name."""
    if case.name:
        dtype = next(iter(expected.values())).dtype
        opened = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        parameters = dict(opened.named_parameters())
        assert_same(parameters, {name: expected[name] for name in parameters})
    else:
        of_model = {name: t for name, t in expected.items() if not name.startswith(("state.", "average "))}
        of_model = {name.removeprefix("buffer "): tensor for name, tensor in of_model.items()}
        assert written.keys() - {"tied.0"} == of_model.keys() - {"tied.0"}
        for name in written:
            assert torch.equal(written[name], of_model[name]), name


def try_seed(seed, folder, run_on):
    print(Drawn(seed))  # noqa: T201  what failed
    run_on(2, save, seed=seed, folder=folder)
    for ranks in (2, 3, 1):
        run_on(ranks, load, seed=seed, folder=folder)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1), ids=lambda seed: f"seed-{seed}")
def test_what_is_saved_is_what_is_loaded_streamed_and_exported(seed, tmp_path, run_on):
    try_seed(seed, tmp_path, run_on)


@pytest.mark.parametrize("seed", some(range(1, 60), (), range(1, 20)), ids=lambda seed: f"seed-{seed}")
def test_what_is_saved_is_what_is_loaded_streamed_and_exported_of_many_more(seed, tmp_path, run_on):
    try_seed(seed, tmp_path, run_on)
