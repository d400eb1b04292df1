"""Ordinary mistakes in the arguments of public functions: each is named, none ends in torch's internals."""

from __future__ import annotations

import os

import pytest
import torch
from helpers.models import build
from torch import nn
from torch.utils.data import ConcatDataset

import fsdp2_strategy.model
import fsdp2_strategy.optim
import fsdp2_strategy.rollout
from fsdp2_strategy import (
    EMA,
    FSDP2StrategyError,
    FSDPadaptOptimizer,
    FSDPV2Strategy,
    ResumableLoader,
    StrategyConfig,
    backward,
    build_mesh,
    build_optimizer,
    build_scheduler,
    clip_grad_norm,
    errors,
    linear_log_probs,
    list_checkpoints,
    optimizer_step,
    shard_model,
    token_log_probs,
    verify_checkpoint,
)
from fsdp2_strategy.checkpoint import seed_everything
from fsdp2_strategy.data import EpisodeOrder, GlobalOrder, MixtureOrder
from fsdp2_strategy.errors import LogProbError, OptimizerError
from fsdp2_strategy.optim import get_constant_schedule_with_freeze_warmup

DATA = list(range(20))


class Everything:
    """What a mistaken call may get."""

    def __init__(self):
        self.strategy = FSDPV2Strategy(bf16=False)
        self.model = self.strategy.prepare_model(build("llama"), is_training=True)
        self.optimizer = self.strategy.create_optimizer(self.model, lr=1e-3)
        self.schedule = self.strategy.create_scheduler(self.optimizer, "linear", num_training_steps=9)
        self.ids = torch.randint(3, 96, (2, 6))
        self.logits = self.model(input_ids=self.ids).logits.detach()

    @property
    def loss(self):
        return self.model(input_ids=self.ids, labels=self.ids).loss


OPTIONS = [
    {"lr": "1e-4"},
    {"lr": -1.0},
    {"lr": float("nan")},
    {"lr": [1e-3]},
    {"betas": (0.9,)},
    {"betas": 0.9},
    {"betas": (0.9, "0.95")},
    {"betas": (0.9, 1.5)},
    {"eps": "1e-8"},
    {"weight_decay": "0.1"},
    {"optimizer_cls": "adamw"},
    {"optimizer_cls": None},
    {"optimizer_cls": torch.optim.SGD, "momentum": "0.9"},
    {"optimizer_cls": torch.optim.Adagrad, "lr_decay": "0.9"},
    {"no_decay": "bias"},
    {"no_decay": 3},
    {"no_decay": [3]},
    {"param_groups": "lm_head"},
    {"param_groups": ["lm_head"]},
    {"param_groups": {"params": ["lm_head"]}},
    {"param_groups": 3},
    {"param_groups": [{"params": 3}]},
    {"param_groups": [{"params": ["lm_head"], "lr": "1e-4"}]},
]
SCHEDULES = [
    {"num_training_steps": "10"},
    {"num_training_steps": None},
    {"num_training_steps": -5},
    {"num_training_steps": 10, "num_warmup_steps": "2"},
    {"num_training_steps": 10, "num_warmup_steps": -2},
    {"num_training_steps": 10, "warmup_ratio": "0.1"},
]
LOADERS = [
    {"global_batch_size": "4"},
    {"global_batch_size": 4.0},
    {"global_batch_size": 0},
    {"seed": "1"},
    {"num_workers": "1"},
    {"num_workers": -1},
    {"prefetch_factor": "2"},
    {"dp_rank": "0", "dp_size": "1"},
    {"collate_fn": "x"},
    {"shuffle": "no"},
    {"weights": ["1"]},
]
ORDERS = [
    lambda: MixtureOrder([3, 4], ["1", "1"]),
    lambda: MixtureOrder(["3", "4"], [1, 1]),
    lambda: MixtureOrder([3.5, 4], [1, 1]),
    lambda: MixtureOrder(3, [1]),
    lambda: MixtureOrder([3, 4], 1.0),
    lambda: MixtureOrder([3, 4], None),
    lambda: MixtureOrder([3, 4], [1, 1], seed="x"),
    lambda: MixtureOrder([3, 4], [1, 1], n="x"),
    lambda: MixtureOrder([3, 4], [1, 1], epoch=-1),
    lambda: GlobalOrder("3"),
    lambda: GlobalOrder(None),
    lambda: GlobalOrder(3, seed="x"),
    lambda: EpisodeOrder("3"),
    lambda: EpisodeOrder(["3"]),
    lambda: EpisodeOrder(None),
    lambda: EpisodeOrder([3, 4], pool="2"),
    lambda: ResumableLoader(ConcatDataset([DATA, DATA]), 4, weights=["1", "1"]),
    lambda: ResumableLoader(ConcatDataset([DATA, DATA]), 4, weights=1.0),
]
TAKE_A_MODEL = {
    "build_optimizer": (),
    "shard_model": (),
    "unwrap_model": (),
    "explain": (),
    "accumulation_of": (),
    "discard_gradients": (),
    "offload": (),
    "reload": (),
    "save_checkpoint": ("c",),
    "load_checkpoint": ("c",),
    "save_model": (None, "o"),
    "load_weights": ("o",),
    "find_blocks": (),
    "EMA": (),
}


def named(name):
    """Return a public function or class."""
    packages = fsdp2_strategy, fsdp2_strategy.model, fsdp2_strategy.optim, fsdp2_strategy.rollout
    return next(getattr(package, name) for package in packages if name in package.__all__)


def no_module(given):
    return [given.model.parameters(), list(given.model.parameters()), None, "model", dict(given.model.state_dict())]


CALLS = {
    "arguments of build_optimizer": lambda g: [lambda o=o: build_optimizer(g.model, **o) for o in OPTIONS],
    "arguments of create_scheduler": lambda g: [
        lambda o=o: g.strategy.create_scheduler(g.optimizer, "linear", **o) for o in SCHEDULES
    ],
    "swapped arguments of create_scheduler": lambda g: [
        lambda: g.strategy.create_scheduler("linear", g.optimizer),
        lambda: g.strategy.create_scheduler(g.model, "linear", num_training_steps=9),
        lambda: build_scheduler(None, "linear", num_training_steps=9),
        lambda: get_constant_schedule_with_freeze_warmup(g.model, 3),
        lambda: get_constant_schedule_with_freeze_warmup(g.optimizer, "3"),
    ],
    "no module": lambda g: [
        lambda name=name, rest=rest, wrong=wrong: named(name)(wrong, *rest)
        for name, rest in TAKE_A_MODEL.items()
        for wrong in no_module(g)
    ],
    "pairs of prepare": lambda g: [
        lambda pair=pair: g.strategy.prepare(pair)
        for pair in [
            (g.optimizer, g.model),
            (g.model, g.model),
            [g.model, g.model],
            (g.model, g.schedule),
            (g.model, "adamw"),
            (g.model,),
            (),
            (g.model, g.optimizer, "linear"),
            (g.model, g.optimizer, g.model),
        ]
    ],
    "log-probabilities": lambda g: [
        lambda: token_log_probs(g.logits, g.ids),
        lambda: token_log_probs(g.ids, g.model),
        lambda: token_log_probs(g.model, g.logits),
        lambda: token_log_probs(g.model, g.ids.tolist()),
        lambda: token_log_probs(g.model, None),
        lambda: token_log_probs(g.model, g.ids, [[1] * 6] * 2),
        lambda: token_log_probs(g.model, g.ids, last="2"),
        lambda: token_log_probs(g.model, g.ids, temperature="1"),
        lambda: token_log_probs(g.model, g.ids, chunk_bytes="1"),
        lambda: linear_log_probs(torch.ones(16, 8), torch.ones(2, 6, 8), g.ids),
        lambda: linear_log_probs(g.model, torch.ones(16, 8), g.ids),
        lambda: linear_log_probs(torch.ones(2, 6, 8), torch.ones(16, 8), None),
        lambda: linear_log_probs(torch.ones(2, 6, 8), torch.ones(16, 8), g.ids[:, :3]),
        lambda: linear_log_probs(torch.ones(2, 6, 8), torch.ones(16, 8), g.ids.float()),
    ],
    "steps": lambda g: [
        lambda: g.strategy.backward(g.loss, g.model, "adamw"),
        lambda: g.strategy.backward(g.loss, g.model, g.model),
        lambda: g.strategy.backward(g.loss, g.optimizer, g.model),
        lambda: g.strategy.backward({"loss": g.loss}, g.model),
        lambda: g.strategy.backward(g.loss, g.model, num_items_in_batch="7"),
        lambda: g.strategy.backward(g.loss, g.model, num_items_in_batch=[7]),
        lambda: g.strategy.backward(g.loss, g.model, num_items_in_batch=torch.ones(2)),
        lambda: backward(g.loss, g.model, accumulation_steps="4"),
        lambda: backward(g.loss, g.model, accumulation_steps=0),
        lambda: backward(g.loss, g.model, accumulation="step"),
        lambda: backward(g.loss, g.model, grad_sync="never"),
        lambda: backward(g.loss, g.model, loss_reduction="avg"),
        lambda: g.strategy.optimizer_step(g.optimizer, g.model, g.model),
        lambda: g.strategy.optimizer_step(g.optimizer, g.model, g.optimizer),
        lambda: g.strategy.optimizer_step(g.optimizer, g.model, "linear"),
        lambda: g.strategy.optimizer_step(g.schedule, g.model),
        lambda: optimizer_step(g.optimizer, g.model, max_norm="1"),
        lambda: optimizer_step(g.optimizer, g.model, max_norm=-1.0),
        lambda: optimizer_step(g.optimizer, g.model, accumulation_steps="2"),
        lambda: optimizer_step(g.optimizer, g.model, sync_buffers="x"),
        lambda: g.strategy.clip_grad_norm(g.model, "1"),
        lambda: clip_grad_norm(g.model, -1.0),
        lambda: clip_grad_norm(dict(g.model.named_parameters())),
    ],
    "data": lambda g: [
        *(lambda o=o: ResumableLoader(DATA, **{"global_batch_size": 4, **o}) for o in LOADERS),
        *ORDERS,
        lambda: ResumableLoader(4, DATA),
        lambda: g.strategy.setup_dataloader(None, 2),
        lambda: g.strategy.setup_dataloader(DATA, "2"),
        lambda: g.strategy.setup_dataloader(DATA, 2, consumed_samples="2"),
        lambda: g.strategy.shard_sequence([1]),
    ],
    "checkpoints": lambda g: [
        *(
            lambda o=o: g.strategy.save_ckpt(g.model, "ckpts", **o)
            for o in [
                {"client_state": [1]},
                {"client_state": "x"},
                {"meta": "x"},
                {"layout": "hf"},
                {"scheduler": g.optimizer},
                {"scheduler": "linear"},
                {"optimizer": g.schedule},
                {"optimizer": g.model},
                {"dataloader": DATA},
            ]
        ),
        lambda: g.strategy.save_ckpt(g.model, None),
        lambda: g.strategy.save_ckpt("ckpts", g.model),
        lambda: g.strategy.load_ckpt(g.model, None),
        lambda: g.strategy.load_ckpt(g.model, "ckpts", scheduler=g.optimizer),
        lambda: verify_checkpoint(None),
        lambda: list_checkpoints(3),
    ],
    "others": lambda g: [
        lambda: FSDPV2Strategy(process_group="x"),
        lambda: FSDPV2Strategy(rendezvous="x"),
        lambda: build_mesh(tensor_parallel_size="2"),
        lambda: shard_model(build("mlp"), 2),
        lambda: shard_model(build("mlp"), config=StrategyConfig(keep_fp32="norm")),
        lambda: shard_model(build("mlp"), config=StrategyConfig(block_class_names="Block")),
        lambda: seed_everything("1"),
        lambda: seed_everything(None),
        lambda: EMA(g.model, names="x"),
        lambda: EMA(g.model, "0.9"),
        lambda: EMA(g.model).update(g.model, "0.9"),
        lambda: EMA(g.model).update(g.model, 2.0),
        lambda: g.strategy.moving_average(g.model, EMA(g.model), 2.0),
        lambda: FSDPadaptOptimizer("x"),
        lambda: FSDPadaptOptimizer(g.model),
        lambda: FSDPadaptOptimizer(g.model.parameters(), "adamw"),
        lambda: g.strategy.prepare_models_and_optimizers(None, None, None, None),
    ],
}


@pytest.mark.ranks(1)
def test_mistakes_in_arguments_are_named(tmp_path):
    os.chdir(tmp_path)
    given, raw = Everything(), []
    for kind, calls in CALLS.items():
        for number, call in enumerate(calls(given)):
            try:
                call()
            except FSDP2StrategyError as error:
                if not str(error).startswith(("cannot ", "no unit")) or "expected" not in str(error):
                    raw.append((kind, number, str(error)))
            except Exception as error:  # noqa: BLE001  all of them are reported
                raw.append((kind, number, f"{type(error).__name__}: {error}"))
            else:
                raw.append((kind, number, "no error"))
    assert not raw, "\n".join(map(str, raw))
    given.strategy.close()


@pytest.mark.ranks(2)
def test_mistakes_that_the_docs_name_raise_the_named_class_on_every_rank():
    given = Everything()
    for error, message, call in (
        (OptimizerError, r"lr is '1e-4', expected a finite number at least 0.*YAML", lambda: created(lr="1e-4")),
        (OptimizerError, r"betas is \(0.9,\), expected a pair", lambda: created(betas=(0.9,))),
        (OptimizerError, r"optimizer_cls is 'adamw', expected a class", lambda: created(optimizer_cls="adamw")),
        (errors.ArgumentError, "it is a generator, expected an nn.Module", lambda: build_optimizer(parameters())),
        (LogProbError, "the model is a Tensor, expected", lambda: token_log_probs(given.logits, given.ids)),
        (errors.ShardError, "it is a AdamW, expected", lambda: given.strategy.prepare((given.optimizer, given.model))),
        (errors.DataError, "an element of weights is '1', expected", lambda: MixtureOrder([3, 4], ["1", "1"])),
    ):

        def created(**options):
            return given.strategy.create_optimizer(given.model, **options)

        def parameters():
            return given.model.parameters()

        with pytest.raises(error, match=message):
            call()
    # What remains possible: numbers of NumPy, tensors, generators of groups, and settings of one string.
    import numpy as np

    made = given.strategy.create_optimizer(
        given.model, lr=np.float64(1e-4), betas=[0.9, 0.95], param_groups=iter([{"params": "lm_head", "lr": 1e-5}])
    )
    assert {group["lr"] for group in made.param_groups} == {1e-4, 1e-5}
    assert isinstance(build_optimizer(nn.Linear(2, 2), lr=torch.tensor(0.1), fused=True), torch.optim.AdamW)
    given.strategy.close()
