"""Make modules "vllm" and "sglang" whose calls have the signatures in signatures.json, over a transformers model.

A call with an unknown argument, or without a required one, raises a TypeError that names the package's version.
"""

from __future__ import annotations

import inspect
import json
import types
from pathlib import Path

from fsdp2_strategy.rollout.sampling import generate_samples
from fsdp2_strategy.rollout.weight_loader import WeightLoader

SIGNATURES = json.loads(Path(__file__).with_name("signatures.json").read_text())
SHARED = {("vllm", "LLM"): "EngineArgs", ("sglang", "Engine"): "ServerArgs"}
"""The options that ``**kwargs`` of a constructor takes."""


def signature(package, owner, method):
    """Return the recorded signature of a method."""
    recorded = SIGNATURES[package]["methods"][owner][method]
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


def check_sampling(package, sampling_params):
    """Raise if a sampling parameter is not one of the package's."""
    if unknown := set(sampling_params) - set(SIGNATURES[package]["fields"]["SamplingParams"]):
        raise TypeError(f"SamplingParams of {package} {SIGNATURES[package]['version']} has no {sorted(unknown)}")


def sglang(make_model, calls, *, fails=False):
    """Make a module "sglang"; each call is added to ``calls``."""

    class Engine:
        @checked("sglang", "Engine", "__init__")
        def __init__(self, **options):
            calls.append(("build", options))
            self._model = make_model()
            self._received = {}

        @checked("sglang", "Engine", "update_weights_from_tensor")
        def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
            assert not flush_cache, "cleared once, after the last bucket"
            calls.append(("bucket", len(named_tensors)))
            self._received |= {name: tensor.clone() for name, tensor in named_tensors}
            return not fails, "an unknown name" if fails else "loaded"

        @checked("sglang", "Engine", "flush_cache")
        def flush_cache(self):
            WeightLoader(self._model, takes_sent_dtype=True).load(iter(self._received.items()))
            self._received.clear()
            calls.append(("flush",))

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

    module = types.ModuleType("sglang")
    module.Engine = Engine
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


def vllm(make_model, calls):
    """Make a module "vllm"; each call is added to ``calls``."""

    class LLM:
        @checked("vllm", "LLM", "__init__")
        def __init__(self, model, **options):
            calls.append(("build", {"model": model, **options}))
            self._model = make_model()
            config = types.SimpleNamespace(max_model_len=options.get("max_model_len"))
            self.llm_engine = types.SimpleNamespace(model_config=config)

        @checked("vllm", "LLM", "apply_model")
        def apply_model(self, func):
            names = []

            def load_weights(weights):
                def recorded():
                    for name, tensor in weights:
                        names.append(name)
                        yield name, tensor

                WeightLoader(self._model, takes_sent_dtype=True).load(recorded())
                return set(names)

            calls.append(("apply",))
            return [func(types.SimpleNamespace(load_weights=load_weights))]

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

    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    return module
