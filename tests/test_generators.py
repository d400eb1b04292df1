"""A call of this package leaves random generators as they are, unless its documentation says that it draws."""

from __future__ import annotations

import ast
import contextlib
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.models import build
from helpers.split import tiny_model
from helpers.training import strategy_for

import fsdp2_strategy
from fsdp2_strategy import init_on_meta, load_weights, stream_weights, token_log_probs
from fsdp2_strategy.checkpoint import random_state
from fsdp2_strategy.distributed import generators
from fsdp2_strategy.distributed.generators import restored_generators
from fsdp2_strategy.parallel import record_routing, replay_routing
from fsdp2_strategy.rollout import TransformersEngine

PACKAGE = Path(fsdp2_strategy.__file__).parent
CHANGES = {"fork_rng", "manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"}
CHANGES |= {"setstate", "set_state"}
OF_PROCESS = re.compile(r"(torch|torch\.(?!Generator\().*|random|np\.random|numpy\.random|.*device_module\(.*)")
REPLAYS = "hf/meta/recorded_init.py"
"""The only other module that names such functions: it records a constructor's calls, and replays them."""


def changes_in(source):
    """Return the expressions of a module that change, or could change, a generator of the process."""
    found = []
    for node in ast.walk(ast.parse(source)) if any(name in source for name in CHANGES) else ():
        if isinstance(node, ast.Attribute) and node.attr in CHANGES and OF_PROCESS.fullmatch(ast.unparse(node.value)):
            found.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and node.module in ("random", "torch.random", "numpy.random", "torch"):
            found += [alias.name for alias in node.names if alias.name in CHANGES]
    return found


def test_one_module_seeds_and_sets_generators():
    assert changes_in("torch.random.fork_rng(); torch.cuda.manual_seed(1); np.random.seed(2); random.setstate(3)") == [
        "torch.random.fork_rng",
        "torch.cuda.manual_seed",
        "np.random.seed",
        "random.setstate",
    ]
    assert changes_in("torch.get_device_module(x).set_rng_state(s); from torch.random import fork_rng")
    assert not changes_in("torch.Generator().manual_seed(0); generator.manual_seed(1); store.set_state(2)")
    found = {str(p.relative_to(PACKAGE)): changes_in(p.read_text()) for p in sorted(PACKAGE.rglob("*.py"))}
    found = {name: changes for name, changes in found.items() if changes}
    assert len(found.pop("distributed/generators.py")) > 5
    assert found == {REPLAYS: ["torch.manual_seed", "torch.set_rng_state"]}


@pytest.fixture
def accelerator(monkeypatch):
    """Give this process a generator that torch.manual_seed seeds too, as it does those of accelerators."""
    generator = torch.Generator().manual_seed(5)
    module = SimpleNamespace(
        get_rng_state=lambda *_: generator.get_state(),
        set_rng_state=lambda state, *_: generator.set_state(state),
        manual_seed=generator.manual_seed,
    )
    for owner in (generators, random_state):
        monkeypatch.setattr(owner, "accelerator_type", lambda: "fake")
    monkeypatch.setattr(generators, "device_module", lambda _type: module)
    seed_cpu = torch.manual_seed

    def seed_all(seed):
        generator.manual_seed(seed)
        return seed_cpu(seed)

    for owner in (torch, torch.random):
        monkeypatch.setattr(owner, "manual_seed", seed_all)
    return generator


def states(accelerator):
    (_, words, gauss), of_numpy, of_torch = generators.host_states()
    of_numpy = (of_numpy["state"]["key"].tolist(), of_numpy["state"]["pos"], of_numpy["gauss"])
    return words, gauss, of_numpy, of_torch.tolist(), accelerator.get_state().tolist()


@contextlib.contextmanager
def unchanged(accelerator, call):
    """Check that a block changes no generator."""
    random.random(), np.random.rand(), torch.rand(3), torch.rand(3, generator=accelerator)  # noqa: NPY002
    before = states(accelerator)
    yield
    names = ("python", "python's gauss", "numpy", "torch on the CPU", "the accelerator")
    changed = [n for n, old, new in zip(names, before, states(accelerator), strict=True) if old != new]
    assert not changed, f"{call} changed the generators {changed}"


def test_a_block_is_seeded_and_restored_also_after_an_error(accelerator):
    drawn = []
    for _ in range(2):
        with unchanged(accelerator, "restored_generators"), contextlib.suppress(ZeroDivisionError):
            with restored_generators(3):
                numbers = [random.random(), np.random.rand()]  # noqa: NPY002
                numbers += [torch.rand(()), torch.rand((), generator=accelerator)]
                drawn.append([float(number) for number in numbers])
                raise ZeroDivisionError
    assert drawn[0] == drawn[1]
    with unchanged(accelerator, "restored_generators without a seed"), restored_generators():
        torch.manual_seed(1)
        random.gauss(0, 1)


def test_a_checkpoint_has_the_state_of_the_accelerator_by_its_type(accelerator, monkeypatch, tmp_path):
    content = random_state.rng_content()
    random_state.check_rng(content, tmp_path)
    before = states(accelerator)
    random_state.seed_everything(11)
    assert states(accelerator) != before
    random_state.load_rng(content)
    assert states(accelerator) == before
    monkeypatch.setattr(random_state, "accelerator_type", lambda: "other")
    accelerator.manual_seed(4)
    of_other_type = accelerator.get_state()
    random_state.load_rng(content)
    assert torch.equal(accelerator.get_state(), of_other_type), "states of another type of device are not its own"


def routed(model, ids):
    with torch.no_grad(), record_routing(model) as routing:
        model(ids)
    with torch.no_grad(), replay_routing(model, routing):
        model(ids)


def generated(model, ids):
    """Generate greedily: sampling draws, as its purpose is."""
    engine = TransformersEngine(model)
    engine.update_weights(stream_weights(model))
    engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)


IDS = torch.arange(3, 15).view(2, 6)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "settings",
    [{}, {"sequence_parallel_size": 2}, {"tensor_parallel_size": 2}, {"expert_parallel_size": 2}],
    ids=["plain", "sequence", "tensor", "expert"],
)
def test_calls_leave_generators_as_they_are(settings, accelerator, tmp_path):
    name = "mixtral" if "expert_parallel_size" in settings else "llama"
    with strategy_for(**settings) as strategy:
        own = build(name)
        with unchanged(accelerator, "explain"):
            strategy.explain(own)
        with unchanged(accelerator, "prepare_model"):
            model = strategy.prepare_model(own, is_training=True)
        with unchanged(accelerator, "create_optimizer"):
            optimizer = strategy.create_optimizer(model, lr=1e-3)
        with unchanged(accelerator, "a step"):
            batch = (
                strategy.shard_sequence({"input_ids": IDS})
                if "sequence_parallel_size" in settings
                else {"input_ids": IDS}
            )
            loss = model(**batch).logits.float().square().mean()
            strategy.backward(loss, model, optimizer)
            strategy.optimizer_step(optimizer, model)
        with unchanged(accelerator, "token_log_probs"):
            token_log_probs(model, IDS)
        with unchanged(accelerator, "stream_weights"):
            for _ in stream_weights(model):
                pass
        for asynchronous in (False, True):
            with unchanged(accelerator, "save_ckpt"):
                strategy.save_ckpt(model, tmp_path / str(asynchronous), async_save=asynchronous)
                strategy.wait_for_checkpoint()


def test_routing_is_recorded_and_replayed_without_a_change_of_generators(accelerator):
    with strategy_for() as strategy:
        model = strategy.prepare_model(tiny_model("mixtral").float(), is_training=True)
        with unchanged(accelerator, "record_routing"):
            routed(model, IDS)
        with unchanged(accelerator, "generate"):
            generated(model, IDS)


@pytest.mark.ranks(2)
def test_ranks_sample_other_tokens_after_routing_was_recorded(accelerator):
    with strategy_for() as strategy:
        strategy.set_seed(3, per_rank=True)
        model = strategy.prepare_model(tiny_model("mixtral").float(), is_training=True)
        accelerator.manual_seed(100 + dist.get_rank())
        routed(model, IDS)
        own = torch.randint(1 << 30, (4,), generator=accelerator).tolist()
        of_ranks = [None, None]
        dist.all_gather_object(of_ranks, own)
        assert of_ranks[0] != of_ranks[1]


class Seeded(torch.nn.Module):
    """A module whose constructor seeds the generators."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(42)
        self.head = torch.nn.Linear(4, 4)


@pytest.mark.ranks(2)
def test_a_replayed_constructor_does_not_seed_the_trainer_again(accelerator):
    with init_on_meta():
        model = Seeded()
    fsdp2_strategy.shard_model(model, config=fsdp2_strategy.StrategyConfig(bf16=False))
    torch.manual_seed(9)
    with unchanged(accelerator, "load_weights"):
        load_weights(model, strict=False)
    torch.manual_seed(42)
    expected = torch.nn.Linear(4, 4)
    assert torch.equal(model.head.weight.full_tensor(), expected.weight)
