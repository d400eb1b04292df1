"""The published SGLang, without an accelerator: its sessions, serializer and weight updater take our streams.

Runs in the environment of `make engines`. The model is one of transformers, whose ``load_weights`` is ours. SGLang's
scheduler, its tokenizer manager and its models do not run.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.engines.fakes import SIGNATURES
from helpers.engines.record import METHODS, classes, parameters
from helpers.models import build
from torch import nn
from torch.multiprocessing import reductions

from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.rollout import SGLangEngine, stream_weights, weight_checksums
from fsdp2_strategy.rollout.weight_loader import WeightLoader

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: needs the environment of `make engines`", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("default")


class Nothing:
    """What torchvision would have: its package needs a torch that is built for CUDA."""


def pretend_torchvision():
    from transformers import AutoProcessor  # noqa: F401  (before: it would use torchvision, if there were one)

    parts = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")
    for name in (f"torchvision{part}" for part in parts):
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        module.__getattr__ = lambda attribute: getattr(object, attribute) if attribute[:2] == "__" else Nothing
        sys.modules.setdefault(name, module)


if importlib.util.find_spec("torchvision") is None:
    pretend_torchvision()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its kernels say that they need an accelerator
    import sglang
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.scheduler_components import weight_updater as sessions
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.utils import MultiprocessingSerializer


class Model(nn.Module):
    """A model that counts how often its layers are restored and converted, as a quantized model of SGLang's."""

    def __init__(self):
        super().__init__()
        self.inner = build("llama").to(torch.bfloat16)
        self.received = {}

    def load_weights(self, weights):
        self.received |= {name: tensor.clone() for name, tensor in weights}


class Offline:
    """SGLang's ``Engine`` as far as it updates weights, without its processes."""

    def __init__(self, monkeypatch, group):
        self.model, self.flushed = Model(), 0
        # SGLang's handles of tensors have the UUID of an accelerator, and it serializes no tensor without one.
        monkeypatch.setattr(weight_updater, "monkey_patch_torch_reductions", lambda: None)
        if hasattr(reductions, "_reduce_tensor_original"):
            monkeypatch.setattr(reductions, "reduce_tensor", reductions._reduce_tensor_original)
            reductions.init_reductions()
        parallel = types.SimpleNamespace(tp_group=types.SimpleNamespace(cpu_group=group), tp_rank=0, tp_size=1)
        for module in (sessions, weight_updater):
            monkeypatch.setattr(module, "get_parallel", lambda: parallel)
            monkeypatch.setattr(module, "get_model", lambda: types.SimpleNamespace(weight_cache_mode="off"))
        updater = weight_updater.WeightUpdater(
            tp_rank=0, device="cpu", gpu_id=0, model_config=None, custom_weight_loaders={}, update_model_fields=None,
            get_model=lambda: self.model, recapture_cuda_graph=None, get_model_runner=None,
        )  # fmt: skip
        runner = types.SimpleNamespace(weight_updater=updater)
        worker = types.SimpleNamespace(
            weight_update_runners=lambda: [("target", runner)],
            deserialize_own_rank=lambda payloads: MultiprocessingSerializer.deserialize(payloads[0]),
        )
        self.manager = sessions.SchedulerWeightUpdaterManager(
            tp_worker=worker, draft_worker=None, memory_saver_adapter=None, flush_cache=None, is_fully_idle=None,
            scheduler=types.SimpleNamespace(record_weight_version_change=lambda **_: None),
        )  # fmt: skip

    def begin_weight_update(self, selector="all"):
        return self._pair(self.manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector=selector)))

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        payload = MultiprocessingSerializer.serialize(named_tensors)
        request = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload], load_format=load_format, flush_cache=flush_cache
        )
        return self._pair(self.manager.update_weights_from_tensor(request))

    def end_weight_update(self):
        return self._pair(self.manager.end_weight_update(io_struct.EndWeightUpdateReqInput()))

    def flush_cache(self):
        self.flushed += 1
        return io_struct.FlushCacheReqOutput(success=True)

    def _pair(self, output):
        return output.success, output.message


@pytest.fixture
def engine(monkeypatch, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    made = SGLangEngine.__new__(SGLangEngine)
    made.llm_engine, made._bucket_bytes = Offline(monkeypatch, dist.group.WORLD), 20_000
    yield made
    dist.destroy_process_group()


def test_sglang_takes_our_stream_in_sessions(engine):
    model, theirs = build("llama", seed=3), engine.llm_engine.model
    for _ in range(2):
        next(model.parameters()).data.mul_(1.5)
        engine.update_weights(stream_weights(model))
        WeightLoader(theirs.inner, takes_sent_dtype=True).load(iter(theirs.received.items()))
        assert weight_checksums(stream_weights(theirs.inner)) == weight_checksums(stream_weights(model))
    assert engine.llm_engine.flushed == 2


def test_sglang_refuses_weights_outside_of_a_session(engine):
    success, message = engine.llm_engine.update_weights_from_tensor([("a", torch.ones(1))], flush_cache=False)
    assert not success and "begin_weight_update" in message


def test_after_an_error_the_next_session_begins(engine):
    def broken():
        yield "a", torch.ones(1)
        raise RolloutError("cannot go on")

    with pytest.raises(RolloutError, match="cannot go on"):
        engine.update_weights(broken())
    engine.update_weights(stream_weights(build("llama")))


def test_the_recorded_signatures_are_those_of_the_installed_version():
    if sglang.__version__ != SIGNATURES["sglang"]["version"]:
        pytest.skip(f"the installed SGLang is {sglang.__version__}, recorded is {SIGNATURES['sglang']['version']}")
    (path, methods) = METHODS["sglang"]["Engine"]  # parsed: importing it would need the packages of its server
    source = Path(sglang.__file__).parents[1] / path
    (engine,) = classes({path: source.read_bytes()}, path, "Engine")
    own = {node.name: parameters(node) for node in engine.body if isinstance(node, ast.FunctionDef)}
    assert {method: own[method] for method in methods} == SIGNATURES["sglang"]["methods"]["Engine"]
