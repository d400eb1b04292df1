"""Make modules "vllm" and "sglang" whose calls have the signatures in signatures.json, over a transformers model.

A call with an unknown argument, or without a required one, raises a TypeError that names the package's version.
"""

from __future__ import annotations

import abc
import inspect
import json
import types
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import ClassVar

from torch import nn

from fsdp2_strategy.rollout.difference import TensorDifference
from fsdp2_strategy.rollout.sampling import generate_samples
from fsdp2_strategy.rollout.weight_loader import WeightLoader

SIGNATURES = json.loads(Path(__file__).with_name("signatures.json").read_text())
SHARED = {("vllm", "LLM"): "EngineArgs", ("sglang", "Engine"): "ServerArgs"}
"""The options that ``**kwargs`` of a constructor takes."""


def signature(package, owner, method):
    """Return the recorded signature of a method, or of a function if ``owner`` is None."""
    recorded = SIGNATURES[package]["functions"] if owner is None else SIGNATURES[package]["methods"][owner]
    recorded = recorded[method]
    return inspect.Signature(
        [
            inspect.Parameter(
                given["name"],
                getattr(inspect.Parameter, given["kind"].upper()),
                default=inspect.Parameter.empty if given["required"] or given["kind"].startswith("var") else None,
            )
            for given in recorded
        ]
    )


def checked(package, owner, method):
    """Make a decorator that checks the arguments of each call, and passes them by name."""
    expected = signature(package, owner, method)
    version = SIGNATURES[package]["version"]

    def decorate(function):
        def call(self, *args, **kwargs):
            try:
                bound = expected.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{owner}.{method} of {package} {version}: {error}") from error
            for name, given in expected.parameters.items():
                if given.kind is given.VAR_KEYWORD and (package, owner) in SHARED:
                    fields = SIGNATURES[package]["fields"][SHARED[package, owner]]
                    if unknown := set(bound.arguments.get(name, {})) - set(fields):
                        raise TypeError(f"{SHARED[package, owner]} of {package} {version} has no {sorted(unknown)}")
            return function(self, *bound.args, **bound.kwargs)

        return call

    return decorate


def checked_function(package, name):
    """Make a decorator that checks the arguments of each call of a function."""
    decorate = checked(package, None, name)
    return lambda function: partial(decorate(lambda _, *args, **kwargs: function(*args, **kwargs)), None)


def fields_of(package, name):
    """Return a class that takes the recorded fields of a class by name."""
    names = SIGNATURES[package]["fields"][name]
    return namedtuple(name, names, defaults=[None] * len(names))


def check_sampling(package, sampling_params):
    """Raise if a sampling parameter is not one of the package's."""
    if unknown := set(sampling_params) - set(SIGNATURES[package]["fields"]["SamplingParams"]):
        raise TypeError(f"SamplingParams of {package} {SIGNATURES[package]['version']} has no {sorted(unknown)}")


def sglang(make_model, calls, *, fails=False, has_sessions=True):  # noqa: C901
    """Make a module "sglang"; each call is added to ``calls``.

    As in the published version, weights are refused outside of a session, and a session while another is open.
    """

    class Engine:
        @checked("sglang", "Engine", "__init__")
        def __init__(self, **options):
            calls.append(("build", options))
            self._model = make_model()
            self._received = {}
            self._is_open = not has_sessions

        @checked("sglang", "Engine", "begin_weight_update")
        def begin_weight_update(self, selector="all"):
            if self._is_open:
                return False, "a weight-update session is already open"
            self._is_open = True
            calls.append(("begin",))
            return True, "Success"

        @checked("sglang", "Engine", "end_weight_update")
        def end_weight_update(self):
            if not self._is_open:
                return False, "no weight-update session is open"
            self._is_open = False
            calls.append(("end",))
            return True, "Success"

        @checked("sglang", "Engine", "update_weights_from_tensor")
        def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
            assert not flush_cache, "cleared once, after the last bucket"
            if not self._is_open:
                return False, "must run between begin_weight_update() and end_weight_update()"
            calls.append(("bucket", len(named_tensors)))
            self._received |= {name: tensor.clone() for name, tensor in named_tensors}
            return not fails, "an unknown name" if fails else "loaded"

        @checked("sglang", "Engine", "flush_cache")
        def flush_cache(self):
            WeightLoader(self._model, takes_sent_dtype=True).load(iter(self._received.items()))
            self._received.clear()
            calls.append(("flush",))
            return types.SimpleNamespace(success=True, message="")

        @checked("sglang", "Engine", "release_memory_occupation")
        def release_memory_occupation(self, tags=None):
            calls.append(("release", tags))

        @checked("sglang", "Engine", "resume_memory_occupation")
        def resume_memory_occupation(self, tags=None):
            calls.append(("resume", tags))

        @checked("sglang", "Engine", "generate")
        def generate(
            self, prompt=None, sampling_params=None, input_ids=None, image_data=None, return_logprob=False, **_
        ):
            check_sampling("sglang", sampling_params)
            kind = "sampled" if return_logprob else None
            generated = generate_samples(self._model, input_ids, sampling_params, log_probs=kind)
            outputs = []
            for sample in (sample for samples in generated for sample in samples):
                of_tokens = zip(sample.log_probs, sample.token_ids, strict=False)
                meta_info = {"output_token_logprobs": [(*pair, None) for pair in of_tokens]}
                outputs.append({"output_ids": sample.token_ids} | ({"meta_info": meta_info} if return_logprob else {}))
            return outputs

        @checked("sglang", "Engine", "shutdown")
        def shutdown(self):
            calls.append(("shutdown",))

    if not has_sessions:
        del Engine.begin_weight_update, Engine.end_weight_update
    module = types.ModuleType("sglang")
    module.Engine = Engine
    module.modules = {"sglang": module}
    return module


class SamplingParams:
    """vLLM's sampling parameters, by the names of its published version."""

    def __init__(self, **given):
        check_sampling("vllm", given)
        vars(self).update({"temperature": 1.0, "max_tokens": 16, **given})


def vllm_completion(sample):
    """Return a sample as vLLM does."""
    pairs = zip(sample.token_ids, sample.log_probs, strict=False)
    logprobs = [{token: types.SimpleNamespace(logprob=log_prob, rank=None)} for token, log_prob in pairs]
    return types.SimpleNamespace(token_ids=sample.token_ids, logprobs=logprobs or None)


class VLLMModel(nn.Module):
    """A model as vLLM's worker holds it: converted for kernels, except during a layerwise reload."""

    def __init__(self, model, calls, experts):
        super().__init__()
        self.inner, self.calls = model, calls
        self.is_converted = True
        self.reloaded = None
        """Names that were received since the reload began."""
        if experts:
            method = type("UnquantizedFusedMoEMethod", (), {})()
            method.unquantized_backend = types.SimpleNamespace(name=experts)
            self.experts = nn.Module()
            self.experts.quant_method = method

    def load_weights(self, weights):
        """Load weights in the layout of the files."""
        assert not self.is_converted, "raw load_weights mixes the layouts of files and kernels"
        names = []

        def recorded():
            for name, tensor in weights:
                assert name not in self.reloaded, "counted on top of an update that was not finished"
                self.reloaded.add(name)
                names.append(name)
                yield name, tensor

        WeightLoader(self.inner, takes_sent_dtype=True).load(recorded())
        return set(names)


class WeightTransferEngine(abc.ABC):
    """vLLM's base class of transfers, with the recorded methods."""

    @checked("vllm", "WeightTransferEngine", "__init__")
    def __init__(self, config, vllm_config, device, model):
        self.model, self.model_config, self.device = model, vllm_config.model_config, device

    @checked("vllm", "WeightTransferEngine", "update_weights")
    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))

    def parse_update_info(self, update_dict):
        try:
            return self.update_info_cls(**update_dict)
        except TypeError as error:
            raise ValueError(str(error)) from error

    @abc.abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abc.abstractmethod
    def start_weight_update(self): ...

    @abc.abstractmethod
    def receive_weights(self, update_info): ...

    @abc.abstractmethod
    def finish_weight_update(self): ...

    @abc.abstractmethod
    def shutdown(self): ...


def vllm_submodules(calls, *, has_transfer, has_reload):
    """Return the modules of vLLM that update weights, by path; None for one that a version lacks."""
    transfer, sparse = types.ModuleType("weight_transfer"), types.ModuleType("sparse_nccl_engine")
    reload, patches = types.ModuleType("reload"), types.ModuleType("checkpoint_weight_patch")

    class WeightTransferEngineFactory:
        registered: ClassVar = {}

        @checked("vllm", "WeightTransferEngineFactory", "register_engine")
        def register(self, name, module_path_or_cls, class_name=None):
            assert name not in self.registered
            self.registered[name] = module_path_or_cls

        @classmethod
        def register_engine(cls, *args, **kwargs):
            return cls().register(*args, **kwargs)

    class WeightSource(abc.ABC):
        @property
        @abc.abstractmethod
        def metadata(self): ...

        def iter_full(self):
            raise NotImplementedError

    @checked_function("vllm", "initialize_layerwise_reload")
    def initialize_layerwise_reload(model):
        calls.append(("reload",))
        model.is_converted = False
        model.reloaded = set() if model.reloaded is None else model.reloaded

    @checked_function("vllm", "finalize_layerwise_reload")
    def finalize_layerwise_reload(model, model_config):
        calls.append(("convert",))
        model.is_converted, model.reloaded = True, None

    @checked_function("vllm", "load_checkpoint_weight_patches")
    def load_checkpoint_weight_patches(model, patches, max_chunk_bytes=None, validate_unique_indices=True):
        given = [(p.name, TensorDifference(p.shape, p.indices, p.values.to(p.dtype))) for p in patches]
        calls.append(("patch", sum(len(change.positions) for _, change in given)))
        WeightLoader(model.inner, takes_sent_dtype=True).load(iter(given), only_changed=True)

    transfer.WeightTransferEngine, transfer.WeightTransferEngineFactory = (
        WeightTransferEngine,
        WeightTransferEngineFactory,
    )
    transfer.WeightSource = WeightSource
    transfer.ParamMeta = lambda name, dtype, shape: fields_of("vllm", "ParamMeta")(name=name, dtype=dtype, shape=shape)
    sparse.SparseWeightPatch = fields_of("vllm", "SparseWeightPatch")
    reload.initialize_layerwise_reload = initialize_layerwise_reload
    reload.finalize_layerwise_reload = finalize_layerwise_reload
    patches.load_checkpoint_weight_patches = load_checkpoint_weight_patches
    patches.CheckpointWeightPatch = lambda name, shape, dtype, values, indices: fields_of(
        "vllm", "CheckpointWeightPatch"
    )(name=name, shape=shape, dtype=dtype, values=values, indices=indices)
    loader = "vllm.model_executor.model_loader"
    return {
        "vllm.distributed.weight_transfer": transfer if has_transfer else None,
        "vllm.distributed.weight_transfer.sparse_nccl_engine": sparse if has_transfer else None,
        f"{loader}.reload": reload if has_reload else None,
        f"{loader}.checkpoint_weight_patch": patches if has_transfer else None,
    }


def vllm(make_model, calls, *, has_transfer=True, has_reload=True, experts=None):  # noqa: C901
    """Make a module "vllm"; each call is added to ``calls``. ``modules`` has it and its submodules."""
    submodules = vllm_submodules(calls, has_transfer=has_transfer, has_reload=has_reload)

    class LLMEngine:
        def __init__(self, config):
            self.model_config = config

        @checked("vllm", "LLMEngine", "reset_encoder_cache")
        def reset_encoder_cache(self):
            calls.append(("reset encoder",))

    class LLM:
        @checked("vllm", "LLM", "__init__")
        def __init__(self, model, **options):
            calls.append(("build", {"model": model, **options}))
            self._model = make_model()
            self._worker_model = VLLMModel(self._model, calls, experts)
            config = types.SimpleNamespace(max_model_len=options.get("max_model_len"))
            self.llm_engine = LLMEngine(config)
            self._is_active, self._transfer = False, None
            if transfer := options.get("weight_transfer_config"):
                assert set(transfer) <= set(SIGNATURES["vllm"]["fields"]["WeightTransferConfig"])
                factory = submodules["vllm.distributed.weight_transfer"].WeightTransferEngineFactory
                vllm_config = types.SimpleNamespace(model_config=config)
                self._transfer = factory.registered[transfer["backend"]](
                    transfer, vllm_config, None, self._worker_model
                )

        @checked("vllm", "RLOfflineMixin", "start_weight_update")
        def start_weight_update(self):
            if self._is_active:
                raise RuntimeError("a weight update is already active")
            self._transfer.start_weight_update()
            self._is_active = True
            calls.append(("start",))

        @checked("vllm", "RLOfflineMixin", "update_weights")
        def update_weights(self, request):
            if not self._is_active:
                raise RuntimeError("start_weight_update must be called before update_weights")
            try:
                self._transfer.update_weights(request["update_info"])
            except BaseException:
                self._is_active = False
                raise

        @checked("vllm", "RLOfflineMixin", "finish_weight_update")
        def finish_weight_update(self, weight_version=None):
            if not self._is_active:
                raise RuntimeError("finish_weight_update called without a matching start_weight_update")
            self._transfer.finish_weight_update()
            self._is_active = False
            calls.append(("finish",))

        @checked("vllm", "LLM", "collective_rpc")
        def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            assert method == "reload_weights"
            signature("vllm", "GPUModelRunner", method).bind(*args or (), **kwargs)
            reload = submodules["vllm.model_executor.model_loader.reload"]
            reload.initialize_layerwise_reload(self._worker_model)
            self._worker_model.load_weights(kwargs["weights_iterator"])
            reload.finalize_layerwise_reload(self._worker_model, None)

        @checked("vllm", "LLM", "apply_model")
        def apply_model(self, func):
            return [func(self._worker_model)]

        @checked("vllm", "LLM", "reset_prefix_cache")
        def reset_prefix_cache(self, *_, **__):
            calls.append(("reset",))
            return True

        @checked("vllm", "LLM", "sleep")
        def sleep(self, level=1, *_, **__):
            calls.append(("sleep", level))

        @checked("vllm", "LLM", "wake_up")
        def wake_up(self, tags=None):
            calls.append(("wake_up",))

        @checked("vllm", "LLM", "generate")
        def generate(self, prompts, sampling_params=None, *_, **__):
            check_sampling("vllm", vars(sampling_params))
            ids = [prompt["prompt_token_ids"] for prompt in prompts]
            generated = generate_samples(self._model, ids, sampling_params)
            output = types.SimpleNamespace
            return [
                output(prompt_token_ids=own, outputs=[vllm_completion(sample) for sample in samples])
                for own, samples in zip(ids, generated, strict=True)
            ]

    if not has_transfer:
        del LLM.start_weight_update, LLM.update_weights, LLM.finish_weight_update
    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    module.__version__ = SIGNATURES["vllm"]["version"]
    module.modules = {"vllm": module, **submodules}
    return module
