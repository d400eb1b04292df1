"""Arguments in host memory are moved to the device that a model computes on, or refused by a named error.

On a CPU these tests compare equal calls; on an accelerator, also a simulated one, the arguments are on another device.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models import build
from helpers.reference import full_parameters

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, load_weights, token_log_probs
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.errors import LogProbError
from fsdp2_strategy.logprob import linear_log_probs
from fsdp2_strategy.model.fsdp_state import device_of
from fsdp2_strategy.rollout import importance_inputs
from fsdp2_strategy.storage import replicated_reads

IDS = torch.tensor([[0, 0, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]])
MASK = (torch.arange(6) >= torch.tensor([[2], [0]])).long()


def prepared(**settings):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, **settings))
    return strategy, strategy.prepare_model(build("llama"), is_training=False)


@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.ranks(2)
def test_log_probs_and_generation_take_ids_in_host_memory(cpu_offload):
    _, model = prepared(cpu_offload=cpu_offload)
    device = current_device()
    assert device_of(model) == device
    with torch.no_grad():
        from_host, from_device = (token_log_probs(model, IDS.to(to), MASK.to(to)) for to in ("cpu", device))
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        sequences = [
            model.generate(input_ids=IDS.to(to), attention_mask=MASK.to(to), **options).cpu() for to in ("cpu", device)
        ]
    assert from_host.device == device
    assert torch.equal(from_host, from_device)
    assert torch.equal(*sequences)


@pytest.mark.ranks(2)
def test_engines_generate_and_are_compared_with_ids_in_host_memory():
    strategy, model = prepared()
    engine = strategy.setup_inference_engine(None, "transformers", model)
    strategy.update_engine_weights(model)
    answers, options = torch.ones(2, 3, dtype=torch.bool), {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    sequences, figures = [], []
    for to in ("cpu", current_device()):
        ids, mask = IDS.to(to), MASK.to(to)
        sequences.append(engine.generate(ids, attention_mask=mask, **options))
        figures.append(strategy.check_engine_agreement(model, ids, mask, answer_mask=answers, on_disagreement="raise"))
    assert sequences[0].device == current_device()
    assert torch.equal(*sequences)
    assert figures[0] == figures[1]


@pytest.mark.ranks(2)
def test_parts_of_sequences_in_host_memory_are_computed_on_the_device():
    strategy, model = prepared(sequence_parallel_size=2)
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}
    parts = [
        strategy.shard_sequence({name: value.to(to) for name, value in batch.items()})
        for to in ("cpu", current_device())
    ]
    losses = [model(**part).loss.detach() for part in parts]
    assert losses[0].device == current_device()
    assert torch.equal(*losses)
    assert torch.equal(*(token_log_probs(model, IDS.to(to), MASK.to(to)).detach() for to in ("cpu", current_device())))


def test_weights_of_another_device_are_named_and_other_arguments_are_moved():
    with pytest.raises(LogProbError, match=r"the weight is on cpu, expected meta"):
        linear_log_probs(torch.zeros(2, 3, device="meta"), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(LogProbError, match=r"the bias is on meta, expected cpu"):
        linear_log_probs(
            torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(5, device="meta")
        )


@pytest.mark.ranks(1)
def test_importance_inputs_are_on_the_device_of_the_new_log_probs():
    new = -torch.rand(2, 3, device=current_device())
    found = importance_inputs(new, new.cpu(), new.cpu() - 0.5, torch.ones(2, 3))
    assert {value.device for value in (found.weights, found.mask, found.old_log_probs)} == {new.device}


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.ranks(2)
def test_replicas_in_host_memory_are_loaded_through_the_device_by_a_group_without_a_cpu_backend(
    tmp_path, bucket_bytes, monkeypatch
):
    strategy, model = prepared(shard_size=1, cpu_offload=True)
    saved = {name: tensor.cpu() for name, tensor in full_parameters(model).items()}
    strategy.save_model(model, None, tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    sent = []
    with patch.object(replicated_reads, "has_backend", lambda _group, device_type: device_type != "cpu"):
        broadcast = dist.broadcast
        monkeypatch.setattr(dist, "broadcast", lambda tensor, **k: (sent.append(len(tensor)), broadcast(tensor, **k)))
        monkeypatch.setattr("fsdp2_strategy.sizes.BROADCAST_BYTES", bucket_bytes)
        load_weights(model, tmp_path)
    loaded = full_parameters(model)
    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in saved.items())
    assert max(sent) <= bucket_bytes
    assert sum(sent) == sum(tensor.nbytes for tensor in saved.values())
