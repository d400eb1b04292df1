"""Methods of peft on sharded models: numbers, checkpoints and adapter files, or an error that names the method."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from helpers.models import batch_of, build
from helpers.reference import full_tensors
from helpers.worlds import some

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.errors import CheckpointError, ShardError

QV, QO = ["q_proj", "v_proj"], ["q_proj", "o_proj"]
LM = {"task_type": "CAUSAL_LM"}
VIRTUAL = {"num_virtual_tokens": 4, **LM}

WORKS = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=QV),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=QV, use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=QV),
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=QV),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, target_modules=QV),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=QV),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=QO),
    "VB-LoRA": lambda: peft.VBLoRAConfig(r=4, num_vectors=8, vector_length=8, topk=2, target_modules=["q_proj"]),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=10, target_modules=QV),
    "WaveFT": lambda: peft.WaveFTConfig(n_frequency=10, target_modules=QV),
    "LayerNorm tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "HRA": lambda: peft.HRAConfig(r=4, target_modules=QV),
    "MiSS": lambda: peft.MissConfig(r=4, target_modules=QV),
    "RandLoRA": lambda: peft.RandLoraConfig(r=4, target_modules=QO),
    "RoAd": lambda: peft.RoadConfig(target_modules=QV, group_size=4),
    "C3A": lambda: peft.C3AConfig(target_modules=["q_proj"], block_size=8),
    "DeLoRA": lambda: peft.DeloraConfig(r=4, target_modules=QV),
    "GraLoRA": lambda: peft.GraloraConfig(r=4, target_modules=["q_proj"], gralora_k=2),
    "HiRA": lambda: peft.HiraConfig(r=4, target_modules=QV),
    "OSF": lambda: peft.OSFConfig(target_modules=QV),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"]),
    "LLaMA-Adapter": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, **LM),
    "prompt tuning": lambda: peft.PromptTuningConfig(**VIRTUAL),
    "multitask prompt tuning": lambda: peft.MultitaskPromptTuningConfig(num_tasks=2, **VIRTUAL),
    "prefix tuning": lambda: peft.PrefixTuningConfig(**VIRTUAL),
}
ONLY_CHECKPOINTS = {
    "prefix tuning with a projection": lambda: peft.PrefixTuningConfig(
        prefix_projection=True, encoder_hidden_size=16, **VIRTUAL
    ),
    "p-tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=16, **VIRTUAL),
    "p-tuning with an LSTM": lambda: peft.PromptEncoderConfig(
        encoder_hidden_size=16, encoder_reparameterization_type="LSTM", **VIRTUAL
    ),
}
REFUSED = {
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=QV, init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2),
    "SHiRA": lambda: peft.ShiraConfig(r=2, target_modules=QV),
}


def adapted(make):
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(build("llama").double(), make()).double()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.any():  # so that the first step has a gradient everywhere
            parameter.data.normal_(std=0.02, generator=torch.Generator().manual_seed(len(name)))
    return model


def loss_of(name, model, batch):
    tasks = {"task_ids": torch.zeros(2, dtype=torch.long)} if name.startswith("multitask") else {}
    torch.manual_seed(5)  # of dropout
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"], **tasks).loss


def trained(name, make):
    """Train a sharded model and the unsharded one three steps, and compare losses and all parameters."""
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=0.0))
    model = adapted(make)
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1, optimizer_cls=torch.optim.SGD, weight_decay=0.0)
    for step in range(3):
        losses = [loss_of(name, reference, batch_of("llama", step, rank)) for rank in range(2)]
        (sum(losses) / 2).backward()
        plain.step()
        plain.zero_grad()
        loss = loss_of(name, model, batch_of("llama", step, dist.get_rank()))
        assert loss.item() == pytest.approx(losses[dist.get_rank()].item(), rel=1e-6)
        strategy.backward(loss, model)
        strategy.optimizer_step(optimizer, model)
    assert_equal_parameters(model, reference)
    return strategy, model, reference


def assert_equal_parameters(model, reference):
    full = full_tensors(dict(model.named_parameters()))
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(full[name], parameter.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(WORKS, ("prompt tuning", "prefix tuning", "IA3")))
def test_a_method_trains_is_saved_and_is_read_by_peft(tmp_path, name):
    strategy, model, reference = trained(name, WORKS[name])
    strategy.save_ckpt(model, tmp_path / "run")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    strategy.load_ckpt(model, tmp_path / "run")
    assert_equal_parameters(model, reference)
    strategy.save_model(model, None, tmp_path / "adapters", merge_adapters=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(build("llama").double(), tmp_path / "adapters").double().eval()
    batch = batch_of("llama", 9, 0)
    assert loss_of(name, again, batch).item() == pytest.approx(loss_of(name, reference.eval(), batch).item(), rel=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(ONLY_CHECKPOINTS, ("p-tuning",)))
def test_prompts_that_are_computed_are_in_checkpoints_and_refused_for_adapter_files(tmp_path, name):
    strategy, model, reference = trained(name, ONLY_CHECKPOINTS[name])
    with pytest.raises(CheckpointError, match=r"Encoder computes its prompts from other weights.*save_ckpt"):
        strategy.save_model(model, None, tmp_path / "adapters", merge_adapters=False)
    strategy.save_ckpt(model, tmp_path / "run")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    strategy.load_ckpt(model, tmp_path / "run")
    assert_equal_parameters(model, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_cannot_be_trained_is_refused_when_it_is_prepared(name):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    with pytest.raises(ShardError, match=rf"adapter 'default' is {name.upper()}, which .*expected another method"):
        strategy.prepare_model(adapted(REFUSED[name]), is_training=True)


def test_the_page_lists_the_methods_that_are_tested():
    page = (Path(__file__).parent.parent / "docs" / "rlhf.md").read_text()
    table = page.split("| Method of peft |", 1)[1].split("\n\n", 1)[0]
    rows = {row.split("|")[1].strip(): row.split("|")[2:5] for row in table.splitlines()[2:]}
    listed = {name.strip() for names in rows for name in names.split(",")}
    assert listed == {*WORKS, *ONLY_CHECKPOINTS, *REFUSED}
    for names, (training, checkpoints, files) in rows.items():
        for name in names.split(","):
            works = name.strip() not in REFUSED
            assert training.strip().startswith("yes") == checkpoints.strip().startswith("yes") == works
            assert files.strip().startswith("yes") == (name.strip() in WORKS)
