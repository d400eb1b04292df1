"""Runs at a real size: from meta init over SIGKILL and resume to rollout, on 2 ranks and then on 3 or 1.

Tensors here are larger than every block, buffer and file size of the library (`fsdp2_strategy.sizes`), unlike those of
all other tests. The cases cover every pair of options, not every combination. ``make big`` runs them one after the
other: they need up to 16 GB of memory and write several GB to pytest's temporary directory.
"""

from __future__ import annotations

import filecmp
import itertools
import json
import shutil
import time
import traceback
from dataclasses import astuple, dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import xxhash
from helpers.models import next_token_loss
from helpers.placed import mesh_of, place
from helpers.pool import processes
from safetensors import safe_open
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from fsdp2_strategy import (
    EMA,
    FSDPV2Strategy,
    StrategyConfig,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    sizes,
    verify_checkpoint,
    weight_checksums,
)
from fsdp2_strategy.checkpoint.directory import partial_path
from fsdp2_strategy.checkpoint.paths import CheckpointPaths
from fsdp2_strategy.checkpoint.training_state import optimizer_tensors
from fsdp2_strategy.distributed.torch_internals import local_of
from fsdp2_strategy.integrations.lerobot import LeRobotLayout
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.rollout.engine import ENGINES, TransformersEngine

VOCAB = 150_001  # odd and no multiple of 3: shards are uneven on 2 ranks and on 3
MOST_BYTES = 16 * 10**9
PHASE_SECONDS = 400
FIRST_BYTES = 64 << 20
"""Of a checkpoint that are on disk when its ranks are killed: a few per cent of it."""

CONFIGS = {
    "tied": lambda: LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=3,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "untied": lambda: LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=3,
        num_attention_heads=10,
        tie_word_embeddings=False,
    ),
    "experts": lambda: MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=4608,  # one expert's gate and up projections: 18 MiB in bf16
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=5,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    ),
}


@dataclass(frozen=True)
class Case:
    """One run; the average of its weights is an extra of one case."""

    model: str
    dtype: str
    layout: str
    ranks: int
    """That load what 2 ranks have saved."""
    save: str

    def __str__(self):
        return "-".join(map(str, astuple(self)))

    @property
    def has_average(self):
        return self.model == "untied" and self.dtype == "masters"

    def layout_options(self):
        return {"layout": LeRobotLayout(total_steps=3, batch_size=1)} if self.layout == "lerobot" else {}

    def tag(self, step):
        return f"{step:06d}" if self.layout == "lerobot" else f"global_step{step}"


CASES = [
    Case("tied", "fp32", "ours", 3, "sync"),
    Case("tied", "masters", "lerobot", 1, "async"),
    Case("untied", "fp32", "ours", 1, "async"),
    Case("untied", "masters", "lerobot", 3, "sync"),
    Case("experts", "fp32", "lerobot", 3, "async"),
    Case("experts", "masters", "ours", 1, "sync"),
]


def test_the_cases_cover_every_pair_of_options():
    options = [sorted(set(values)) for values in zip(*map(astuple, CASES), strict=True)]
    for (i, first), (j, second) in itertools.combinations(enumerate(options), 2):
        covered = {(astuple(case)[i], astuple(case)[j]) for case in CASES}
        assert covered == set(itertools.product(first, second))


@pytest.mark.big
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_goes_on_from_a_kill_and_its_weights_arrive(case, tmp_path):
    ckpts, peaks = tmp_path / "ckpts", {}
    try:
        peaks["begin"] = run(begin, case, 2, tmp_path, killed_in=partial_path(ckpts, case.tag(2)))
        [checkpoint] = list_checkpoints(ckpts)
        assert checkpoint.step == 1
        report = verify_checkpoint(checkpoint.path)
        assert report.ok, report.problems
        peaks["resume"] = run(resume, case, 2, tmp_path)
        [checkpoint] = list_checkpoints(ckpts)
        assert checkpoint.step == 2
        peaks["roll out"] = run(roll_out, case, case.ranks, tmp_path)
        opens_with_from_pretrained(case, tmp_path)
    finally:
        shutil.rmtree(ckpts, ignore_errors=True)
    for phase, (seconds, peak_bytes) in peaks.items():
        print(f"{case} {phase}: {seconds:.0f} s, at most {peak_bytes / 1e9:.1f} GB")  # noqa: T201  for `make big`
    assert max(peak_bytes for _, peak_bytes in peaks.values()) < MOST_BYTES


# --- what ranks do ---------------------------------------------------------------------------------------------------


def begin(case, folder):
    """Train a step and save, train another and be killed while that is saved."""
    strategy, model, optimizer, ema = start(case, AutoModelForCausalLM.from_config, CONFIGS[case.model](), seed=1)
    is_big(case, model)
    states, steps = [], []
    for _ in range(2):
        steps.append(train(strategy, model, optimizer, ema))
        states.append(checksums_of(model, optimizer, ema))
        (folder / f"steps{dist.get_rank()}.json").write_text(json.dumps(steps))
        if dist.get_rank() == 0:
            (folder / "states.json").write_text(json.dumps(states))
        save(case, strategy, model, ema, folder)
    strategy.wait_for_checkpoint()
    raise AssertionError("the save was through before its ranks were killed")


def resume(case, folder):
    """Go on from the first checkpoint: the second step is the one that was lost."""
    states = json.loads((folder / "states.json").read_text())
    steps = json.loads((folder / f"steps{dist.get_rank()}.json").read_text())
    strategy, model, optimizer, ema = load(case, folder, 1, states[0])
    assert train(strategy, model, optimizer, ema) == steps[1]
    assert_same(checksums_of(model, optimizer, ema), states[1])
    save(case, strategy, model, ema, folder, max_num=1)
    strategy.close()


def roll_out(case, folder):
    """Load on another number of ranks, and bring the weights into an engine."""
    states = json.loads((folder / "states.json").read_text())
    strategy, model, *_ = load(case, folder, 2, states[1])
    with patch.dict(ENGINES, {"on rank 0": engine_on_rank_0}):
        engine = strategy.setup_inference_engine(engine_type="on rank 0", actor=model)
    if dist.get_rank() == 0:
        assert_same(engine.weight_checksums(), checksums_in(case, weights_path(case, folder, 2)))
        sequence = engine.generate(torch.tensor([[1, VOCAB - 1]]), max_new_tokens=2, do_sample=False)
        assert sequence.shape == (1, 4)
    strategy.close()


def engine_on_rank_0(_args, actor, dtype):
    return TransformersEngine(actor, dtype=dtype) if dist.get_rank() == 0 else None


def load(case, folder, step, state):
    """Build the model on meta with a checkpoint's weights, then forget these and load the checkpoint."""
    build = AutoModelForCausalLM.from_pretrained
    strategy, model, optimizer, ema = start(case, build, weights_path(case, folder, step), seed=2)
    assert_same(row_checksums(named_parameters(model)), weights_of(state))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    path, _ = strategy.load_ckpt(model, folder / "ckpts", ema=ema)
    assert Path(path).name == case.tag(step)
    assert_same(checksums_of(model, optimizer, ema), state)
    return strategy, model, optimizer, ema


def start(case, build, source, seed):
    options = {"bf16": True, "use_mp_opt": True} if case.dtype == "masters" else {"bf16": False}
    strategy = FSDPV2Strategy(config=StrategyConfig(seed=seed, max_norm=1.0, **options))
    with strategy.init_model_context(meta_init=True):
        model = build(source, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    model = strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3, weight_decay=0.1)
    return strategy, model, optimizer, EMA(model, 0.5) if case.has_average else None


def train(strategy, model, optimizer, ema):
    """Take a step; return this rank's loss, and the gradient norm."""
    generator = torch.Generator().manual_seed(100 * strategy.global_step(model) + dist.get_rank())
    ids = torch.randint(0, VOCAB, (1, 8), generator=generator)
    loss = next_token_loss(model(input_ids=ids).logits, ids)
    strategy.backward(loss, model, optimizer)
    result = strategy.optimizer_step(optimizer, model)
    if ema is not None:
        ema.update(model)
    return [loss.item(), result.grad_norm]


def weights_path(case, folder, step):
    return CheckpointPaths.found_in(folder / "ckpts" / case.tag(step)).model


def save(case, strategy, model, ema, folder, **options):
    options |= case.layout_options()
    strategy.save_ckpt(model, folder / "ckpts", ema=ema, async_save=case.save == "async", **options)


def is_big(case, model):
    """Check that the model is one whose like no other test has."""
    shards = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    assert 0.2e9 < sum(parameter.numel() for parameter in model.parameters()) < 0.5e9
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert max(shard.nbytes for shard in shards.values()) > 4 * sizes.BLOCK_BYTES
    if case.model == "experts":
        assert max(shard[0].nbytes for shard in shards.values() if shard.dim() == 3) > sizes.BLOCK_BYTES


# --- checksums -------------------------------------------------------------------------------------------------------


def checksums_of(model, optimizer, ema):
    """Return a checksum of each tensor of the state; collective."""
    tensors = {**named_parameters(model), **optimizer_tensors(model, optimizer)}
    return row_checksums(
        tensors | {f"average {name}": tensor for name, tensor in (ema.averages if ema else {}).items()}
    )


def row_checksums(tensors):
    """Return the sum of the checksums of each tensor's rows: the same on any number of ranks; collective if sharded."""
    own = {name: sum_of_rows(tensor) for name, tensor in tensors.items()}
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return own
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return {name: sum(sums[name] for sums in of_ranks) % (1 << 64) for name in own}


def sum_of_rows(tensor):
    """Return this rank's part of the sum; the number of a row seeds its checksum."""
    first, rows = 0, tensor.detach()
    if isinstance(tensor, DTensor):
        assert tensor.placements == (Shard(0),)
        first, rows = dist.get_rank() * -(-len(tensor) // dist.get_world_size()), rows.to_local()
    elif dist.is_initialized() and dist.get_rank():
        return 0
    if not rows.numel():
        return 0
    content = memoryview(rows.contiguous().reshape(-1).view(torch.uint8).numpy())
    count = len(rows) if rows.dim() else 1
    row_bytes = len(content) // count
    parts = (content[i * row_bytes : (i + 1) * row_bytes] for i in range(count))
    return sum(xxhash.xxh3_64_intdigest(part, seed=first + i) for i, part in enumerate(parts)) % (1 << 64)


def weights_of(state):
    return {name: checksum for name, checksum in state.items() if not name.startswith(("state.", "average "))}


def checksums_in(case, folder):
    """Return the checksums of the tensors in a folder's files."""
    paths = sorted(folder.glob("*.safetensors"))
    assert (len(paths) == 1) == (case.layout == "lerobot")
    checksums = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            checksums |= weight_checksums((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    return checksums


def opens_with_from_pretrained(case, folder):
    states = json.loads((folder / "states.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(weights_path(case, folder, 2))
    assert_same(row_checksums(dict(model.named_parameters())), weights_of(states[1]))


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    assert not [name for name in expected if actual[name] != expected[name]]


# --- processes -------------------------------------------------------------------------------------------------------


def run(phase, case, world_size, folder, *, killed_in=None):
    """Run a phase on ranks of their own, and return its seconds, and the sum of the peaks of all processes' memory.

    Args:
        phase: what each rank calls.
        case: its argument.
        world_size: ranks.
        folder: its argument, too.
        killed_in: directory of a save that is in flight when all ranks get a SIGKILL.
    """
    began, peaks = time.monotonic(), {"self": peak_bytes_of("self")}
    arguments = [(phase, case, rank, world_size, folder) for rank in range(world_size)]
    ranks = [processes.Process(target=be_rank, args=own, daemon=True) for own in arguments]
    for rank in ranks:
        rank.start()
    try:
        while any(rank.is_alive() for rank in ranks):
            peaks |= {rank.pid: peak_bytes_of(rank.pid) or peaks.get(rank.pid, 0) for rank in ranks}
            assert not any(rank.exitcode for rank in ranks), failures_in(folder)
            assert time.monotonic() - began < PHASE_SECONDS, f"{phase.__name__} hangs"
            if killed_in and allocated_bytes(killed_in) > FIRST_BYTES:
                break
            time.sleep(0.01 if killed_in else 0.05)
        else:
            assert not any(rank.exitcode for rank in ranks), failures_in(folder)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
    assert not killed_in or killed_in.exists(), failures_in(folder) or "the save was through before the kill"
    return time.monotonic() - began, sum(peaks.values())


def be_rank(phase, case, rank, world_size, folder):
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / f"{phase.__name__}.store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        phase(case, folder)
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{phase.__name__}-rank{rank}.failure").write_text(traceback.format_exc())
        raise


def failures_in(folder):
    time.sleep(1)  # other ranks may be about to fail, too
    return "\n".join(f"--- {path.stem}\n{path.read_text()}" for path in sorted(folder.glob("*.failure")))


def peak_bytes_of(pid):
    """Return the most memory that a process has ever had; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def allocated_bytes(folder):
    """Return what a folder's files take on disk: those of a save have their full length from the beginning."""
    try:
        return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    except FileNotFoundError:
        return 0


# --- columns ---------------------------------------------------------------------------------------------------------

LARGE = {
    "columns": ((20_011, 3072), Shard(1)),
    "rows": ((20_011, 1024), Shard(0)),
    "fused": ((3, 4096, 1024), _StridedShard(1, split_factor=2)),
    "experts": ((4, 1024, 4096), Shard(2)),
    "wide": ((4, 6_000_000), Shard(1)),
}
"""Shapes, and placements as tensor parallelism has them: of bf16, and of more bytes than a block of checksums."""


def large_model(shape, seed):
    draw = torch.Generator().manual_seed(seed)
    model = torch.nn.Module()
    for name, (size, _) in LARGE.items():
        values = torch.randint(-1000, 1000, size, dtype=torch.int16, generator=draw).view(torch.bfloat16)
        model.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    return place(model, mesh_of(shape), {f"^{name}$": placement for name, (_, placement) in LARGE.items()})


def save_large(folder, shape):
    save_checkpoint(large_model(shape, 0), folder, "t")


def load_large(folder, shape):
    model, expected = large_model(shape, 1), large_model(shape, 0)
    load_checkpoint(model, folder)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(local_of(a).view(torch.int16), local_of(b).view(torch.int16)) for a, b in pairs)


@pytest.mark.big
@pytest.mark.timeout(600)
def test_columns_of_large_weights_are_written_as_on_one_rank_and_load_on_any(tmp_path, run_on):
    run_on(1, save_large, folder=tmp_path / "one", shape=(1, 1, 1))
    run_on(4, save_large, folder=tmp_path / "many", shape=(1, 2, 2))
    files = sorted((tmp_path / "one" / "t" / "model").glob("*.safetensors"))
    assert len(files) > 1
    for path in files:
        other = tmp_path / "many" / path.relative_to(tmp_path / "one")
        assert filecmp.cmp(path, other, shallow=False), path.name
    assert verify_checkpoint(tmp_path / "many" / "t", progress=False).ok
    manifests = sum(path.stat().st_size for path in (tmp_path / "many" / "t").rglob("checksums/*"))
    assert manifests < 1e-4 * sum(path.stat().st_size for path in files)
    for world, shape in ((4, (1, 2, 2)), (4, (2, 1, 2)), (3, (1, 3, 1)), (2, (1, 1, 2)), (1, (1, 1, 1))):
        run_on(world, load_large, folder=tmp_path / "many", shape=shape)
    run_on(4, load_large, folder=tmp_path / "one", shape=(1, 2, 2))
