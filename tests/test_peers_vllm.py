"""The published vLLM, without an accelerator: its models, loaders and worker take our streams; no kernel runs.

Runs in the environment of `make engines`. vLLM's model is built on the CPU by vLLM's own loader from a folder of ours.
What asks for an accelerator is replaced: the choice of kernels, the kernel of experts, and a cache of the allocator.
"""

from __future__ import annotations

import importlib.util
import types
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from helpers.engines.fakes import SIGNATURES, signature
from helpers.models import build

from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.rollout import stream_weights, vllm_patches, vllm_transfer, vllm_weight_source
from fsdp2_strategy.rollout.vllm_engine import VLLMEngine

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: needs the environment of `make engines`", allow_module_level=True)

import inspect

import vllm
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer import (
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerWeightTransferEngine
from vllm.entrypoints.rl.offline import RLOfflineMixin
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """vLLM's groups, of one rank."""
    store = f"file://{tmp_path_factory.mktemp('store') / 'store'}"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@contextmanager
def without_kernels(backend):
    """Replace what asks for an accelerator; ``backend`` is the layout of experts."""

    def no_kernel(self, layer):
        nothing = types.SimpleNamespace(process_weights_after_loading=lambda _: None)
        self.moe_kernel = types.SimpleNamespace(fused_experts=nothing)

    attention = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    with (
        patch.object(type(current_platform), "get_attn_backend_cls", classmethod(lambda *_, **__: attention)),
        patch.object(experts, "select_unquantized_moe_backend", lambda *_, **__: (backend, object)),
        patch.object(experts.UnquantizedFusedMoEMethod, "_init_moe_kernel", no_kernel),
        patch.object(torch.accelerator, "empty_cache", lambda: None),
        patch.object(torch.accelerator, "synchronize", lambda: None),
    ):
        yield


class Offline(RLOfflineMixin):
    """vLLM's ``LLM`` as far as it updates weights, over vLLM's worker in this process."""

    def __init__(self, model, vllm_config):
        worker = Worker.__new__(Worker)
        worker.vllm_config, worker._weight_update_active, worker._weight_update_is_draft = vllm_config, False, False
        worker.model_runner = types.SimpleNamespace(get_model=lambda: model, reset_lora_state=lambda: None)
        worker.model_runner.reload_weights = types.MethodType(GPUModelRunner.reload_weights, worker.model_runner)
        worker.model_runner.vllm_config = vllm_config
        worker.model_runner.reset_encoder_cache = worker.model_runner.reset_mm_cache = lambda: None
        config = types.SimpleNamespace(backend=vllm_transfer.BACKEND)
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config, vllm_config, torch.device("cpu"), model
        )
        worker.apply_model = lambda function: function(model)
        self.llm_engine = types.SimpleNamespace(
            collective_rpc=lambda method, args=(), kwargs=None: [getattr(worker, method)(*args, **(kwargs or {}))],
            reset_encoder_cache=lambda: None,
        )

    def collective_rpc(self, method, kwargs):
        return self.llm_engine.collective_rpc(method, kwargs=kwargs)

    def apply_model(self, function):
        return self.llm_engine.collective_rpc("apply_model", args=(function,))

    def reset_prefix_cache(self):
        return True


@contextmanager
def engine_of(model, folder, backend=UnquantizedMoeBackend.TRITON, *, transfers=True):
    """Yield a `VLLMEngine` over vLLM's own model, built from other weights than the given model's."""
    with without_kernels(backend):
        vllm_transfer.register(vllm)
        theirs, vllm_config = loaded_model(build_as(model), folder)
        engine = VLLMEngine.__new__(VLLMEngine)
        engine.llm, engine._transfers, engine.weights_version = Offline(theirs, vllm_config), transfers, None
        yield engine, theirs


def build_as(model):
    """Return a model of the same kind with other weights, in bfloat16."""
    torch.manual_seed(7)
    other = type(model)(model.config).to(torch.bfloat16)
    other.config.architectures = [type(model).__name__]
    return other


def held(theirs):
    return {name: tensor.clone() for name, tensor in theirs.state_dict().items()}


def loaded_model(model, folder):
    """Return vLLM's model, loaded from a folder with a model's weights and converted, and its configuration."""
    model.save_pretrained(folder)
    config = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
    vllm_config = VllmConfig(model_config=config, device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(vllm_config):
        return get_model(vllm_config=vllm_config), vllm_config


def loaded(model, folder, backend):
    """Return the weights that vLLM has after it has loaded a folder with the model's weights."""
    with without_kernels(backend):
        return held(loaded_model(model, folder)[0])


def step(model):
    for parameter in model.parameters():
        parameter.data.view(-1)[::7] *= -1.5


def assert_same(theirs, expected):
    for name, tensor in held(theirs).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", "TRITON"), ("mixtral", "TRITON"), ("mixtral", "FLASHINFER_CUTLASS")],
)
@pytest.mark.parametrize("transfers", [True, False])
def test_each_update_gives_vllm_what_it_loads_from_a_folder(name, backend, transfers, groups, tmp_path):
    backend, model = UnquantizedMoeBackend[backend], build(name).to(torch.bfloat16)
    with engine_of(model, tmp_path / "other", backend, transfers=transfers) as (engine, theirs):
        for number in range(3):
            step(model)
            engine.update_weights(stream_weights(model))
            assert_same(theirs, loaded(model, tmp_path / str(number), backend))


def test_without_the_layerwise_reload_the_second_update_would_mix_the_experts_of_vllm(groups, tmp_path):
    backend, model = UnquantizedMoeBackend.FLASHINFER_CUTLASS, build("mixtral").to(torch.bfloat16)
    with engine_of(model, tmp_path / "other", backend) as (_, theirs):
        theirs.load_weights(stream_weights(model))
        expected = loaded(model, tmp_path / "expected", backend)
        wrong = [name for name, tensor in held(theirs).items() if not torch.equal(tensor, expected[name])]
        assert wrong and all("w13_weight" in name for name in wrong)


def test_after_a_failed_update_the_next_one_is_complete(groups, tmp_path):
    backend, model = UnquantizedMoeBackend.FLASHINFER_CUTLASS, build("mixtral").to(torch.bfloat16)
    with engine_of(model, tmp_path / "other", backend) as (engine, theirs):

        def broken():
            for index, pair in enumerate(stream_weights(model)):
                if index == 7:
                    raise RolloutError("cannot go on")
                yield pair

        with pytest.raises(RolloutError, match="cannot go on"):
            engine.update_weights(broken())
        with pytest.raises(RolloutError, match="does not have all of its weights"):
            engine.generate([[1]])
        step(model)
        engine.update_weights(stream_weights(model))
        assert_same(theirs, loaded(model, tmp_path / "expected", backend))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_vllm_writes_our_differences_in_place(name, groups, tmp_path):
    model = build(name).to(torch.bfloat16)
    with engine_of(model, tmp_path / "other") as (engine, theirs):
        version = ""
        for number in range(3):
            step(model)
            stream = stream_weights(model, since=version)
            assert stream.is_full == (number == 0)
            engine.update_changed_weights(stream, since=version, version=stream.version)
            version = stream.version
            assert_same(theirs, loaded(model, tmp_path / str(number), UnquantizedMoeBackend.TRITON))


def test_differences_are_refused_where_vllm_has_converted_experts(groups, tmp_path):
    model = build("mixtral").to(torch.bfloat16)
    with engine_of(model, tmp_path / "other", UnquantizedMoeBackend.FLASHINFER_CUTLASS) as (engine, _):
        with pytest.raises(RolloutError, match=r"vLLM converts .* layers .*RoutedExperts"):
            engine.update_changed_weights(stream_weights(model, since=""), since="", version="1")


def test_the_trainers_side_of_vllm_takes_our_source_and_patches():
    model = build("llama")
    source = vllm_weight_source(model, bucket_bytes=1000)
    assert isinstance(source, WeightSource) and source.implements_iter_full()
    assert source.owned_names(1) == [name for name, _ in source.iter_full()]
    stream = stream_weights(model, since="")
    dict(stream)
    step(model)
    patches = vllm_patches(stream_weights(model, since=stream.version))
    for each in patches:
        SparseNCCLTrainerWeightTransferEngine._validate_patch(each)
    assert patches


def test_the_recorded_signatures_are_those_of_the_installed_version():
    if vllm.__version__ != SIGNATURES["vllm"]["version"]:
        pytest.skip(f"the installed vLLM is {vllm.__version__}, recorded is {SIGNATURES['vllm']['version']}")
    for owner in (
        RLOfflineMixin, LLMEngine, GPUModelRunner, WeightTransferEngine, WeightTransferEngineFactory,
        WeightTransferTrainerFactory, SparseNCCLTrainerWeightTransferEngine, vllm.LLM,
    ):  # fmt: skip
        for method in SIGNATURES["vllm"]["methods"][owner.__name__]:
            found = [(p.name, p.kind) for p in inspect.signature(getattr(owner, method)).parameters.values()]
            recorded = [(p.name, p.kind) for p in signature("vllm", owner.__name__, method).parameters.values()]
            assert [each for each in found if each[0] != "self"] == recorded, (owner, method)
