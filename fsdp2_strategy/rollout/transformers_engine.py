"""Generate with transformers, in the trainer's process.

Input: a model, and weights under Hugging Face names. Output: what ``model.generate`` returns, or the outputs of the
calls of SGLang and vLLM.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.hf.library_internals import dtype_plan, mark_initialized
from fsdp2_strategy.hf.meta.init_on_meta import keep_dtypes
from fsdp2_strategy.hf.peft.merge import without_adapters
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.transformers_models import is_transformers_model
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout.protocol import Weights, check_awake
from fsdp2_strategy.rollout.sampling import CompletionOutput, RequestOutput, generate_tokens
from fsdp2_strategy.rollout.stream import stream_weights, weight_checksums
from fsdp2_strategy.rollout.weight_loader import WeightLoader


class TransformersEngine:
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
        RolloutError: transformers cannot generate with the model, or the stream of its weights lacks a parameter.
    """

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype | Literal["sent"] | None = "sent", tokenizer: Any = None
    ) -> None:
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
            _compute_buffers(copied)
        self.model = copied
        self._loader = WeightLoader(self.model, takes_sent_dtype=takes_sent_dtype)
        self.is_asleep = False
        self._has_weights = False
        self._tokenizer = tokenizer

    def update_weights(self, weights: Weights) -> None:
        """Load all weights of the model from pairs of Hugging Face name and tensor.

        If this raises while the engine is awake, `generate` raises until an update succeeds.

        Raises:
            RolloutError: the engine is asleep; or a weight is missing, unknown, repeated or has another shape.
        """
        check_awake(self, "update its weights")
        self._has_weights = False
        self._loader.load(weights)
        self._has_weights = True

    def weight_checksums(self) -> dict[str, str]:
        """Return the checksums of the engine's weights by Hugging Face name."""
        return weight_checksums(stream_weights(self.model, dtype=None))

    def weight_dtypes(self) -> dict[str, str]:
        """Return the dtypes of the engine's weights by Hugging Face name, for example "bfloat16"."""
        return {
            name: str(tensor.dtype).removeprefix("torch.") for name, tensor in stream_weights(self.model, dtype=None)
        }

    def sleep(self) -> None:
        """Move the copy to host memory."""
        self.model.to("cpu")
        self.is_asleep = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Move the copy back to the device."""
        self.model.to(current_device())
        self.is_asleep = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``model.generate`` on the copy, with the same arguments and result; or generate as another engine does.

        With ``sampling_params``, the arguments and results are those of another engine:

        - SGLang's ``generate(sampling_params=, input_ids=)`` or ``generate(sampling_params=, prompt=)``: for each
          prompt a dict with "output_ids", a list of token ids. One prompt may be passed without a list around it.
        - vLLM's ``generate(prompts=, sampling_params=, use_tqdm=)``: for each prompt a `RequestOutput`.

        Raises:
            RolloutError: the engine is asleep, the last update of its weights is incomplete; or an argument or a
                sampling parameter means something that transformers lacks.
        """
        check_awake(self, "generate")
        if not self._has_weights:
            raise RolloutError(
                "cannot generate: the engine does not have all of its weights, expected a complete update. Call "
                "update_engine_weights first."
            )
        if "sampling_params" in kwargs:
            if args:
                raise RolloutError(
                    "cannot generate: prompts were passed without a name, expected one, because those of SGLang and "
                    "vLLM mean different results. Pass input_ids=, prompt= or prompts=."
                )
            return self._generate_as_engine(**kwargs)
        with torch.no_grad():
            return self.model.generate(*args, **kwargs)

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
        **unknown: Any,
    ) -> Any:
        given = [name for name, value in unknown.items() if name != "use_tqdm" and value not in (None, False)]
        if image_data is not None and any(image is not None for image in image_data):
            given.append("image_data")
        if given:
            raise RolloutError(
                f"cannot generate: the argument {given[0]} was passed, expected token ids or texts only. Call generate "
                "with the processor's output and without sampling_params, or use another engine."
            )
        passed = [value for value in (input_ids, prompt, prompts) if value is not None]
        if len(passed) != 1:
            raise RolloutError(
                f"cannot generate: {len(passed)} of input_ids, prompt and prompts were passed, expected one. Pass one."
            )
        (values,) = passed
        is_one = isinstance(values, str | dict) or bool(values and isinstance(values[0], int))
        token_ids = [self._token_ids(value) for value in ([values] if is_one else values)]
        generated = generate_tokens(self.model, token_ids, sampling_params)
        if prompts is not None:
            return [
                RequestOutput(ids, [CompletionOutput(tokens) for tokens in sequences])
                for ids, sequences in zip(token_ids, generated, strict=True)
            ]
        outputs = [{"output_ids": tokens} for sequences in generated for tokens in sequences]
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
        if isinstance(self._tokenizer, str | Path):
            from transformers import AutoTokenizer  # noqa: PLC0415

            self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer)
        tokens: list[int] = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return tokens


def _compute_buffers(model: Any) -> None:
    """Compute the values of a model's buffers with transformers' ``initialize_weights``; keep the parameters."""
    for parameter in model.parameters():
        mark_initialized(parameter)
    model.initialize_weights()


def _copy_configs(model: nn.Module) -> None:
    """Copy each configuration once, and replace it in all modules that refer to it."""
    from transformers import GenerationConfig, PretrainedConfig  # noqa: PLC0415

    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PretrainedConfig | GenerationConfig):
                vars(module)[name] = copy.deepcopy(value, memo)
