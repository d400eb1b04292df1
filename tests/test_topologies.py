"""Checkpoints, exports and streams do not depend on how a model's tensors are divided: by data, layers or experts."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.folders import tensors_in
from helpers.models import build
from helpers.placed import differing, locals_of
from helpers.versions import needs_split_layers
from helpers.worlds import some
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from fsdp2_strategy import (
    StrategyConfig,
    build_mesh,
    build_optimizer,
    init_on_meta,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    save_model,
    shard_model,
    stream_weights,
)
from fsdp2_strategy.checkpoint.training_state import optimizer_tensors
from fsdp2_strategy.distributed.torch_internals import local_of
from fsdp2_strategy.model.names import named_parameters, persistent_buffers
from fsdp2_strategy.model.shards import local_shard, sharded_like
from fsdp2_strategy.storage.verified_read import Reader

pytestmark = [needs_split_layers, pytest.mark.filterwarnings("ignore::FutureWarning:transformers")]

# ranks, shard size, tensor- and expert-parallel sizes
DENSE = {
    "one": (1, -1, 1, 1),
    "shard 2": (2, -1, 1, 1),
    "tp 2": (2, -1, 2, 1),
    "shard 3": (3, -1, 1, 1),
    "tp 2 x shard 2": (4, -1, 2, 1),
    "tp 2 x 2 replicas": (4, 1, 2, 1),
}
EXPERTS = {
    "one": (1, -1, 1, 1),
    "shard 3": (3, -1, 1, 1),
    "ep 2": (2, -1, 1, 2),
    "ep 2 x shard 2": (4, -1, 1, 2),
    "ep 4": (4, -1, 1, 4),
    "tp 2 x shard 2": (4, -1, 2, 1),
    "tp 2 and ep 4": (4, -1, 2, 4),
    "ep 2 x 2 replicas": (4, 2, 1, 2),
}
NAMES = {
    **dict.fromkeys(("llama_tied", "phi3"), DENSE),
    **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"), EXPERTS),
}
IN_CI = ("llama_tied", "phi3", "mixtral", "gpt_oss")


def sharded(model, topology):
    _, shard_size, tensor, experts = topology
    mesh = build_mesh(shard_size, tensor_parallel_size=tensor)
    return shard_model(model, mesh, StrategyConfig(bf16=False, expert_parallel_size=experts), is_training=True)


def with_state(name, topology, seed):
    """Return a model and an optimizer after a step whose gradients follow from the seed, in this topology."""
    model = sharded(build(name, seed), topology)
    optimizer = build_optimizer(model, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    fulls = named_parameters(build(name, seed + 1))
    for key, parameter in named_parameters(model).items():
        parameter.grad = sharded_like(parameter, local_shard(parameter).of(fulls[key].detach()).clone())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save(folder, name, topology):
    model, optimizer = with_state(name, topology, 0)
    save_checkpoint(model, folder, "t", step=1, optimizer=optimizer)


def load(folder, name, topology):
    model, optimizer = with_state(name, topology, 5)
    load_checkpoint(model, folder, optimizer=optimizer)
    expected, its_optimizer = with_state(name, topology, 0)
    assert not differing(locals_of(named_parameters(model)), locals_of(named_parameters(expected)))
    found, wanted = optimizer_tensors(model, optimizer), optimizer_tensors(expected, its_optimizer)
    assert not differing(locals_of(found), locals_of(wanted))


def digests(folder):
    files = sorted(path for path in Path(folder).rglob("*.safetensors") if "rng" not in path.parts)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("name", some(NAMES, (), IN_CI))
def test_each_topology_saves_the_files_of_one_rank_and_loads_those_of_any(name, run_on, tmp_path):
    topologies = NAMES[name]
    for kind, topology in topologies.items():
        run_on(topology[0], save, folder=tmp_path / kind, name=name, topology=topology)
        assert digests(tmp_path / kind) == digests(tmp_path / "one"), kind
    for number, topology in enumerate(topologies.values()):
        # The files are equal, and only the checksum manifests differ: each topology loads those of the next two.
        for saved in (list(topologies) * 2)[number + 1 : number + 3]:
            run_on(topology[0], load, folder=tmp_path / saved, name=name, topology=topology)


def export_and_stream(folder, name, topology):
    model = sharded(build(name), topology)
    save_model(model, None, folder)
    plain = dict(stream_weights(build(name), dtype=torch.bfloat16))
    assert not differing(dict(stream_weights(model, dtype=torch.bfloat16)), plain)
    stream = stream_weights(model, dtype=torch.bfloat16, since="")
    held = {key: tensor.clone() for key, tensor in stream}
    with torch.no_grad():
        for parameter in model.parameters():
            full = torch.zeros(parameter.shape)
            full.view(-1)[::37] = 1.0
            local_of(parameter).add_(local_shard(parameter).of(full))
    for key, change in stream_weights(model, dtype=torch.bfloat16, since=stream.version):
        if isinstance(change, torch.Tensor):
            held[key] = change.clone()
        else:
            change.apply_(held[key])
    assert not differing(held, dict(stream_weights(model, dtype=torch.bfloat16)))


def load_own_part(folder, name, topology):
    """Build on meta, and read the bytes of this rank's rows, columns and experts only."""
    replicas = 2 if topology in (DENSE["tp 2 x 2 replicas"], EXPERTS["ep 2 x 2 replicas"]) else 1
    with init_on_meta():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sharded(model, topology)
    readers, original = [], Reader.__init__

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        readers.append(self)

    with patch.object(Reader, "__init__", remember), patch("fsdp2_strategy.sizes.SHORT_READ_BYTES", 1):
        load_weights(model)
    expected = sharded(build(name), topology)
    assert not differing(locals_of(named_parameters(model)), locals_of(named_parameters(expected)))
    of_buffers = sum(buffer.nbytes for buffer in persistent_buffers(model).values())  # each rank reads all of them
    read = sum(reader.bytes_read for reader in readers) - of_buffers
    total = torch.tensor([read, sum(local_of(p).nbytes for p in model.parameters())])
    dist.all_reduce(total)
    read, held = total.tolist()
    assert read * replicas == held  # replicas divide the reads


@pytest.mark.parametrize("name", some(NAMES, (), IN_CI))
def test_each_topology_exports_the_folder_of_one_rank_and_loads_its_own_part(name, run_on, tmp_path):
    for kind, topology in NAMES[name].items():
        run_on(topology[0], export_and_stream, folder=tmp_path / kind, name=name, topology=topology)
        assert digests(tmp_path / kind) == digests(tmp_path / "one"), kind
        run_on(topology[0], load_own_part, folder=tmp_path / "one", name=name, topology=topology)


def adapted(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = get_peft_model(
            build(name), LoraConfig(r=2, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"])
        )
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return model


@pytest.mark.ranks(4)
@pytest.mark.full
@pytest.mark.parametrize("kind", ["tp 2 x shard 2", "tp 2 x 2 replicas"])
def test_adapters_of_split_layers_are_merged_and_saved_as_on_one_rank(kind, tmp_path):
    plain, model = adapted("qwen3"), sharded(adapted("qwen3"), DENSE[kind])
    expected = dict(stream_weights(plain, dtype=None))
    assert not differing(dict(stream_weights(model, dtype=None)), expected)
    save_model(model, None, tmp_path / "merged")
    save_model(model, None, tmp_path / "adapters", merge_adapters=False)
    assert not differing(tensors_in(tmp_path / "merged"), expected)
    adapters = tensors_in(tmp_path / "adapters")
    full = {key: p for key, p in plain.state_dict().items() if "lora_" in key}
    assert not differing(adapters, {key.replace(".default", ""): p for key, p in full.items()})


@pytest.mark.ranks(2)
@pytest.mark.full
@pytest.mark.parametrize(("name", "topology"), [("qwen3", DENSE["tp 2"]), ("mixtral", EXPERTS["ep 2"])], ids=str)
def test_frozen_weights_that_have_not_changed_are_left_out(name, topology, tmp_path):
    def partly_frozen():
        model = build(name)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_("self_attn" in key)
        return sharded(model, topology)

    model = partly_frozen()
    trained = {key for key, parameter in named_parameters(model).items() if parameter.requires_grad}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                local_of(parameter).add_(1)
    save_checkpoint(model, tmp_path, "t", step=1, only_trainable=True)
    files = [path for path in (tmp_path / "t").rglob("*.safetensors") if "rng" not in path.parts]
    saved = [key for folder in {path.parent for path in files} for key in tensors_in(folder)]
    assert sorted(saved) == sorted(trained)
    loaded = partly_frozen()
    load_checkpoint(loaded, tmp_path)
    assert not differing(locals_of(named_parameters(loaded)), locals_of(named_parameters(model)))
