"""Generate with transformers, in the trainer's process.

Input: a model, and weights under Hugging Face names. Output: what ``model.generate`` returns, or the outputs of the
calls of SGLang and vLLM.
"""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import nn

from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.errors import RolloutError, did_you_mean, dtype_text
from fsdp2_strategy.hf.library_internals import dtype_plan, mark_initialized
from fsdp2_strategy.hf.meta.init_on_meta import keep_dtypes
from fsdp2_strategy.hf.peft.merge import without_adapters
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.transformers_models import is_transformers_model
from fsdp2_strategy.logprob import token_log_probs
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.parallel.routing.replay import record_routing
from fsdp2_strategy.rollout.experts import chosen_experts
from fsdp2_strategy.rollout.protocol import Changes, Engine, Weights
from fsdp2_strategy.rollout.sampling import RequestOutput, generate_samples, loaded_tokenizer
from fsdp2_strategy.rollout.stream import stream_weights, weight_checksums
from fsdp2_strategy.rollout.weight_loader import WeightLoader


class TransformersEngine(Engine):
    """Generate with transformers, on this rank's own full copy of a sharded model; not collective.

    The copy has no weights before the first `update_weights`. Ranks generate independently, so the number and length of
    their sequences may differ.

    Args:
        model: the model, sharded or not, or its wrapper; may be on the meta device. Its modules are copied without
            adapters, because updates contain merged weights. Later changes to its modules do not affect the copy.
        dtype: dtype of the copy's floating-point parameters; None for the dtypes of the shards. "sent": the dtype of
            the weights that an update sends, so that the engine computes with the values of the trainer; until the
            first update bfloat16. Parameters that transformers keeps in fp32 stay in fp32.
        tokenizer: a tokenizer, or the folder or name of one, for prompts that are texts; None for token ids only.

    Raises:
        RolloutError: transformers cannot generate with the model, the stream of its weights lacks a parameter, or
            ``dtype`` is something else.
    """

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype | Literal["sent"] | None = "sent", tokenizer: Any = None
    ) -> None:
        if dtype is not None and dtype != "sent" and not isinstance(dtype, torch.dtype):
            raise RolloutError(
                f"cannot generate: dtype is {dtype!r}, expected a torch.dtype, 'sent' or None. Pass, for example, "
                "torch.bfloat16."
            )
        takes_sent_dtype = dtype == "sent"
        dtype = torch.bfloat16 if isinstance(dtype, str) else dtype
        root: Any = without_adapters(unwrap_model(model)).model
        if not is_transformers_model(root) or not root.can_generate():
            raise RolloutError(
                f"cannot generate: the model is a {class_name(root)}, expected a transformers model with a "
                "generate method. Use another engine."
            )

        def empty_like(original: torch.Tensor) -> torch.Tensor:
            if not isinstance(original, nn.Parameter) and not original.is_meta:
                return original.detach().clone().to(current_device())
            is_cast = dtype and isinstance(original, nn.Parameter) and original.is_floating_point()
            its_dtype = dtype if is_cast else original.dtype
            return torch.empty(original.shape, dtype=its_dtype, device=current_device())

        copied: Any = meta_skeleton(root, empty_like).eval().requires_grad_(False)
        _copy_configs(copied)
        copied.config.dtype = dtype or copied.dtype
        keep_dtypes(copied, dtype_plan(copied, dtype) if dtype else None)
        if any(buffer.is_meta for buffer in root.buffers()):
            for parameter in copied.parameters():
                mark_initialized(parameter)
            copied.initialize_weights()  # of the buffers only
        self.model = copied
        self._loader = WeightLoader(self.model, takes_sent_dtype=takes_sent_dtype)
        self._has_weights = False
        self.weights_version: str | None = None
        self._tokenizer = tokenizer

    def update_weights(self, weights: Weights) -> None:
        """Load all weights of the model from pairs of Hugging Face name and tensor.

        Raise RolloutError if the engine is asleep; or a weight is missing, unknown, repeated or has another shape: then
        `generate` raises until an update succeeds.
        """
        self._check_awake("update its weights")
        self._has_weights, self.weights_version = False, None
        self._loader.load(weights)
        self._has_weights = True

    def update_changed_weights(self, changes: Changes, *, since: str, version: str) -> None:
        """Write the weights that have changed since a version in place; see `stream_weights`.

        Args:
            changes: pairs of Hugging Face name and tensor or `TensorDifference`; all weights if ``since`` is empty.
            since: the version that the engine must have; empty if it need not have one.
            version: the version that it has afterwards.

        Raises:
            RolloutError: the engine is asleep, or has another version, and keeps it; or a weight is unknown, repeated
                or has another shape: then it has no version, and `generate` raises until an update succeeds.
        """
        self._check_awake("update its weights")
        if since and since != self.weights_version:
            raise RolloutError(
                f"cannot update weights: the engine has version {self.weights_version}, expected {since}, since which "
                "changes were sent. Send all weights."
            )
        self._has_weights, self.weights_version = False, None
        self._loader.load(changes, only_changed=bool(since))
        self._has_weights, self.weights_version = True, version

    def weight_checksums(self) -> dict[str, str]:
        """Return the checksums of the engine's weights by Hugging Face name."""
        return weight_checksums(stream_weights(self.model, dtype=None))

    def weight_dtypes(self) -> dict[str, str]:
        """Return the dtypes of the engine's weights by Hugging Face name, for example "bfloat16"."""
        return {name: dtype_text(tensor.dtype) for name, tensor in stream_weights(self.model, dtype=None)}

    def sleep(self) -> None:
        """Move the copy to host memory."""
        self.model.to("cpu")
        self.is_asleep = True
        if (device := current_device()).type != "cpu":
            torch.get_device_module(device).empty_cache()

    def wake_up(self) -> None:
        """Move the copy back to the device."""
        self.model.to(current_device())
        self.is_asleep = False

    def generate(self, *args: Any, return_routing: bool = False, **kwargs: Any) -> Any:
        """Call ``model.generate`` on the copy, with the same arguments and result; or generate as another engine does.

        Tensors in other memory are moved to this rank's device, on which the result is.

        With ``sampling_params``, the arguments and results are those of another engine:

        - SGLang's ``generate(sampling_params=, input_ids=)`` or ``generate(sampling_params=, prompt=)``: for each
          prompt a dict with "output_ids", a list of token ids. One prompt may be passed without a list around it. With
          ``return_logprob=True``, "meta_info" has "output_token_logprobs", at the sampling temperature.
        - vLLM's ``generate(prompts=, sampling_params=, use_tqdm=)``: for each prompt a `RequestOutput`; with the
          sampling parameter ``logprobs=0``, its outputs have ``logprobs``, at temperature 1.

        `sampled_log_probs` reads both kinds of log-probabilities.

        With ``return_routing``, the result is a pair: the result as above, and the tensors of a `Routing`, for
        ``Routing.from_tensors``. They are also sent by a server. Use it without ``sampling_params``.

        Raises:
            RolloutError: the engine is asleep, the last update of its weights is incomplete; an argument or a sampling
                parameter means something that transformers lacks; or the routing of the model cannot be recorded.
        """
        self._check_ready("generate")
        if return_routing:
            if "sampling_params" in kwargs:
                raise RolloutError(
                    "cannot return the routing: sampling_params was passed, with which prompts are generated in "
                    "another order, expected a batch of input_ids. Call generate as that of transformers."
                )
            with record_routing(self.model) as routing:
                result = self.generate(*args, **kwargs)
            return result, routing.to_tensors()
        if "sampling_params" in kwargs:
            if args:
                raise RolloutError(
                    "cannot generate: prompts were passed without a name, expected one, because those of SGLang and "
                    "vLLM mean different results. Pass input_ids=, prompt= or prompts=."
                )
            return self._generate_as_engine(**kwargs)
        if name := next((name for name in ("prompts", "prompt") if name in kwargs), None):
            raise RolloutError(
                f"cannot generate: {name} was passed without sampling_params, expected both, as SGLang and vLLM take "
                "them, or input_ids. Pass sampling_params={} for the defaults."
            )
        prompts = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if isinstance(prompts, list | tuple | str):
            raise RolloutError(
                f"cannot generate: the prompts are a {type(prompts).__name__}, expected a tensor [batch, length], "
                "because there are no sampling_params. Pass a tensor and its attention_mask, or the prompts by name "
                "with sampling_params."
            )

        def moved(value: Any) -> Any:
            return value.to(current_device()) if isinstance(value, torch.Tensor) else value

        with torch.no_grad():
            return self.model.generate(*map(moved, args), **{name: moved(value) for name, value in kwargs.items()})

    def log_probs(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        temperature: float = 1.0,
        **inputs: Any,
    ) -> torch.Tensor:
        """Return the log-probability of each token of sequences, given the tokens before it.

        Args:
            sequences: [batch, length], int64; padded on the right, if at all.
            attention_mask: [batch, length].
            temperature: the logits are divided by this number.
            **inputs: further arguments of the model's forward, such as ``pixel_values``.

        Returns:
            [batch, length - 1], fp32, in nats; also for padding.

        Raises:
            RolloutError: the engine is asleep, its weights are incomplete, or there is padding before a token.
        """
        self._check_ready("compute log-probabilities")
        if attention_mask is not None and (attention_mask.int().diff(dim=1) > 0).any():
            raise RolloutError(
                "cannot compute log-probabilities: attention_mask has padding before a token, expected it on the right "
                "only, so that positions count from the first token. Move the tokens to the left."
            )
        with torch.no_grad():
            log_probs = token_log_probs(self.model, sequences, attention_mask, temperature=temperature, **inputs)
        return cast("torch.Tensor", log_probs)

    def routed_experts(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any
    ) -> torch.Tensor | None:
        """Return the experts that each router chooses for each token of sequences.

        The arguments and errors are those of `log_probs`.

        Returns:
            Indices [layers, batch, length, k], int64, -1 for padding; None if `record_routing` refuses the model, or
            its layers choose different numbers of experts.
        """
        return chosen_experts(self.model, lambda: self.log_probs(sequences, attention_mask, **inputs))

    @property
    def llm_engine(self) -> Any:
        """An object with ``model_config.max_model_len``, which trainers read from vLLM's engine, in tokens."""
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        return SimpleNamespace(model_config=SimpleNamespace(max_model_len=longest))

    def _generate_as_engine(
        self,
        *,
        sampling_params: object,
        input_ids: list[Any] | None = None,
        prompt: str | list[str] | None = None,
        prompts: Any = None,
        image_data: Any = None,
        return_logprob: bool = False,
        **unknown: Any,
    ) -> Any:
        given = [name for name, value in unknown.items() if name != "use_tqdm" and value not in (None, False)]
        if image_data is not None and any(image is not None for image in image_data):
            given.append("image_data")
        if given:
            own = ("sampling_params", "input_ids", "prompt", "prompts", "return_logprob")
            raise RolloutError(
                f"cannot generate: the argument {given[0]} was passed, expected token ids or texts only, as one of "
                f"{', '.join(own[1:4])}.{did_you_mean(given[0], own)} For other inputs, call generate with the "
                "processor's output and without sampling_params, or use another engine."
            )
        passed = [value for value in (input_ids, prompt, prompts) if value is not None]
        if len(passed) != 1:
            raise RolloutError(
                f"cannot generate: {len(passed)} of input_ids, prompt and prompts were passed, expected one. Pass one."
            )
        (values,) = passed
        if isinstance(values, torch.Tensor):
            raise RolloutError(
                "cannot generate: the prompts are a tensor, expected lists of token ids without padding, because there "
                "are sampling_params. Pass [row[mask].tolist() for row, mask in zip(input_ids, attention_mask.bool())]."
            )
        is_one = isinstance(values, str | dict) or bool(values and isinstance(values[0], int))
        token_ids = [self._token_ids(value) for value in ([values] if is_one else values)]
        if return_logprob and prompts is not None:
            raise RolloutError(
                "cannot generate: return_logprob was passed with prompts, expected the sampling parameter logprobs, as "
                "vLLM has it. Set logprobs=0 there."
            )
        generated = generate_samples(
            self.model, token_ids, sampling_params, log_probs="sampled" if return_logprob else None
        )
        if prompts is not None:
            return [
                RequestOutput(ids, [sample.as_vllm() for sample in samples])
                for ids, samples in zip(token_ids, generated, strict=True)
            ]
        outputs = [sample.as_sglang(has_log_probs=return_logprob) for samples in generated for sample in samples]
        return outputs[0] if is_one and len(outputs) == 1 else outputs

    def _token_ids(self, prompt: Any) -> list[int]:
        """Return a prompt's token ids; tokenize a text without adding special tokens, which chat templates contain."""
        if isinstance(prompt, dict):
            if unknown := [name for name in prompt if name not in ("prompt", "prompt_token_ids")]:
                raise RolloutError(
                    f"cannot generate: a prompt has {unknown[0]}, expected prompt or prompt_token_ids. Use an engine "
                    "for images."
                )
            prompt = prompt.get("prompt_token_ids") or prompt["prompt"]
        if not isinstance(prompt, str):
            return list(prompt)
        if self._tokenizer is None:
            raise RolloutError(
                "cannot generate: a prompt is a text, and the engine has no tokenizer, expected token ids. Pass "
                "input_ids, or build the engine with tokenizer=."
            )
        self._tokenizer = loaded_tokenizer(self._tokenizer)
        tokens: list[int] = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return tokens


def _copy_configs(model: nn.Module) -> None:
    """Copy each configuration once, and replace it in all modules that refer to it."""
    from transformers import GenerationConfig, PretrainedConfig  # noqa: PLC0415

    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PretrainedConfig | GenerationConfig):
                vars(module)[name] = copy.deepcopy(value, memo)
