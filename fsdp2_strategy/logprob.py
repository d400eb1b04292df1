"""Compute the log-probability of each token of sequences, with the logits of only a few rows at a time.

Input: a causal language model, sharded or not, and token ids. Output: differentiable log-probabilities, and the
entropies of the distributions.

[Note: chunks] A batch of 8 x 4,096 tokens with a vocabulary of 128,000 has 17 GB of fp32 logits, but only one number
per token is needed. So the head's forward is replaced for one pass. The new forward computes the logits of one chunk of
rows (tokens) at a time, and keeps only their log-probabilities; backward computes the logits again. The head remains a
module with FSDP2's hooks, in its own unit or in the root unit. These hooks run when the module is called and when its
output gets a gradient, so the head's parameters are gathered for forward and again for backward. Ranks that share the
head each compute the logits of their part of the vocabulary, and gather those of one chunk at a time.

[Note: after the head] Some models apply a function to the logits of their head: a scale or a soft cap. An additional
forward pass measures this function: the head returns known numbers, and the function follows from the logits that the
model returns for them. The function is not read from the configuration; docs/decisions.md says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear, pad

from fsdp2_strategy import sizes
from fsdp2_strategy.config.arguments import accepts, check_inputs, check_number
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.generators import restored_generators
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.torch_internals import all_gather_single
from fsdp2_strategy.errors import LogProbError
from fsdp2_strategy.hf.packed_rows import ARGUMENT, with_documents_apart
from fsdp2_strategy.model.fsdp_state import class_name, is_sharded
from fsdp2_strategy.model.ranks import on_ranks_of, sequence_group_of
from fsdp2_strategy.model.state import Slot, measured_pass, model_state
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.sharding.features import feature

_OPTIONS = ("attention_mask", "last", "temperature", "entropy", "chunk_bytes")
"""The optional arguments of `token_log_probs`, which could be misspelled."""


@collective
def token_log_probs(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    last: int | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_bytes: int | None = None,
    **inputs: Any,
) -> Any:
    """Return the log-probability of each token, given the tokens before it; collective for a sharded model.

    Values and gradients are those of ``log_softmax(model(...).logits.float() / temperature)`` at the tokens, but only
    the logits of one chunk of rows exist at a time: [Note: chunks]. Many models count the padding on the left of a
    sequence as positions. For these, pass ``position_ids``, as ``generate`` does. The first call runs an additional
    forward pass: [Note: after the head].

    If ranks share sequences (``sequence_parallel_size``), each of them passes the same full sequences, computes a part
    of them, and gets all log-probabilities. From these, all of them compute the same loss.

    Args:
        model: a causal language model or its wrapper; it may be sharded, and may take images.
        input_ids: [batch, length], int64.
        attention_mask: [batch, length], passed to the model.
        last: number of tokens at the end of each sequence whose log-probabilities are returned; by default and at most
            length - 1.
        temperature: the logits are divided by this number.
        entropy: also return the entropies, in nats.
        chunk_bytes: maximum size of the fp32 logits of one chunk, by default 256 MiB; a chunk has at least one row.
            Forward needs about two and a half times this memory, backward about four times.
        **inputs: other arguments of the model's forward (``position_ids``, ``pixel_values``).

    Returns:
        Log-probabilities [batch, last] in fp32 (float64 for a float64 model), also for padding. With ``entropy``, a
        pair: log-probabilities, and entropies of the same shape.

    Raises:
        LogProbError: the model is not a causal language model, or ``input_ids`` is not a tensor of integers; its head
            is not an `nn.Linear` that is called once per pass; it changes the logits of the head by more than a fixed
            scale and a soft cap; or an argument is out of range.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, pad_token_id=0)
        >>> ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 1]])
        >>> token_log_probs(LlamaForCausalLM(config), ids, last=2).shape
        torch.Size([2, 2])
    """
    if not isinstance(model, nn.Module):
        raise LogProbError(
            f"cannot compute log-probabilities: the model is a {type(model).__name__}, expected a language model. "
            "Call token_log_probs(model, input_ids); from hidden states, call linear_log_probs."
        )
    root: Any = unwrap_model(model)
    with ExitStack() as stack:
        if is_sharded(root):
            stack.enter_context(on_ranks_of(root))
            stack.enter_context(all_or_none("compute log-probabilities", LogProbError))
        last = _check_arguments(
            input_ids, attention_mask, inputs, last=last, temperature=temperature, chunk_bytes=chunk_bytes
        )
        check_inputs(inputs, _OPTIONS, root, "compute log-probabilities", LogProbError)
        head = _head_of(root)
        inputs = _inputs_of(root, {"input_ids": input_ids, "attention_mask": attention_mask, **inputs})
    rows, shard = _Rows.of(input_ids, last), None
    if (group := sequence_group_of(root)) is not None:
        inputs = feature("sequence.shard").shard_sequence(inputs, group)
        shard = inputs[ARGUMENT]
        rows = rows.in_part(shard.begin, shard.begin + shard.local_length)
    shape = _logit_shape_of(root, head, inputs)

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        expected = input_ids.shape if shard is None else (len(input_ids), shard.local_length)
        if hidden.shape[:2] != expected:
            raise LogProbError(
                f"cannot compute log-probabilities: the head of {class_name(root)} got hidden states for "
                f"{list(hidden.shape[:2])} tokens, expected {list(expected)}. Use a model that adds no tokens."
            )
        weight, bias, group = _parts_of(head)
        found = linear_log_probs(
            hidden[:, rows.begin : rows.end],
            weight,
            rows.targets,
            bias,
            temperature=temperature,
            entropy=entropy,
            chunk_bytes=chunk_bytes,
            shape=shape,
            group=group,
        )
        return torch.stack(found) if isinstance(found, tuple) else found[None]

    found = _run_with_head(root, head, compute, inputs)
    if shard is not None:  # [1 or 2, batch, rows of this part] -> [1 or 2, batch, last]
        of_part = pad(found, (rows.begin, shard.local_length - rows.end))
        end = input_ids.shape[1] - 1
        found = feature("sequence.exchange").gather_results(of_part, shard.ranks, dim=2)[..., end - last : end]
    return (found[0], found[1]) if entropy else found[0]


@dataclass(frozen=True)
class _Rows:
    """The hidden states whose next tokens are scored: from ``begin`` to ``end`` along the sequence."""

    begin: int
    end: int
    targets: torch.Tensor
    """[batch, end - begin]: the next tokens."""

    @classmethod
    def of(cls, input_ids: torch.Tensor, last: int) -> _Rows:
        """Return the rows of the last tokens of full sequences."""
        return cls(input_ids.shape[1] - last - 1, input_ids.shape[1] - 1, input_ids[:, -last:])

    def in_part(self, begin: int, end: int) -> _Rows:
        """Return the rows that lie in a part of the sequences, counted from its begin; there may be none."""
        first, stop = min(max(self.begin, begin), end), max(min(self.end, end), begin)
        stop = max(first, stop)
        return _Rows(
            first - begin, stop - begin, self.targets[:, max(first - self.begin, 0) : max(stop - self.begin, 0)]
        )


@collective
def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_bytes: int | None = None,
    shape: LogitShape | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Compute log-probabilities under a linear head, one chunk of rows at a time; collective only with ``group``.

    The head's parameters must be full tensors on this rank. In the forward of a prepared model, and of a wrapper that
    was passed to `prepare_model`, ``lm_head.weight`` is. With ``group``, they are this rank's part of the vocabulary,
    and the call and its backward are collective over the group; all its ranks pass the same hidden states and targets,
    and get the same results.

    Args:
        hidden: [..., width].
        weight: [vocabulary, width].
        targets: [...], int64.
        bias: [vocabulary].
        temperature: as for `token_log_probs`.
        entropy: as for `token_log_probs`.
        chunk_bytes: as for `token_log_probs`.
        shape: the function that the model applies to its logits.
        group: ranks that hold successive parts of the vocabulary.

    Returns:
        Log-probabilities [...] in fp32, or in float64 for float64 inputs. With ``entropy``, a pair: log-probabilities,
        and entropies of the same shape. Backward accumulates the gradients of weight and bias over the chunks in the
        same dtype, and casts the sums to the dtype of the weight.

    Raises:
        LogProbError: the weight is sharded.
    """
    if isinstance(weight, DTensor):
        raise LogProbError(
            f"cannot compute log-probabilities: the weight is a DTensor of shape {list(weight.shape)}, because it is "
            "used outside of a pass of its model, expected the full weight. Use it within the model's forward. Pass "
            "the wrapper whose forward calls it to prepare_model; or call token_log_probs(model, input_ids)."
        )
    _check_tensors(hidden, weight, targets, temperature)
    device = hidden.device.type
    chunk_bytes = sizes.LOGITS_BYTES if chunk_bytes is None else chunk_bytes
    vocabulary = _Vocabulary.of(weight, group)
    settings = _Settings(
        temperature=temperature,
        vocabulary=vocabulary,
        rows=max(1, chunk_bytes // (sum(vocabulary.sizes) * _at_least_fp32(hidden).itemsize)),
        shape=shape or LogitShape(),
        entropy=entropy,
        autocast=(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)),
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    apply: Any = _LinearLogProbs.apply
    log_probs, entropies = apply(flat, weight, bias, targets.reshape(-1), settings)
    log_probs = log_probs.view(targets.shape)
    return (log_probs, entropies.view(targets.shape)) if entropy else log_probs


def _check_tensors(hidden: Any, weight: Any, targets: Any, temperature: Any) -> None:
    """Raise LogProbError unless hidden states, weight and targets of `linear_log_probs` fit."""
    action = "compute log-probabilities"
    for name, tensor in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        if not isinstance(tensor, torch.Tensor):
            raise LogProbError(
                f"cannot {action}: {name} is a {type(tensor).__name__}, expected a tensor. Check the order of the "
                "arguments: linear_log_probs(hidden, weight, targets)."
            )
    is_fit = hidden.ndim > 0 and weight.ndim == 2 and hidden.shape[-1] == weight.shape[1]
    if not is_fit or hidden.shape[:-1] != targets.shape or targets.is_floating_point():
        raise LogProbError(
            f"cannot {action}: hidden is {list(hidden.shape)}, weight {list(weight.shape)}, targets "
            f"{list(targets.shape)} of {targets.dtype}, expected [..., width], [vocabulary, width], [...] of int64. "
            "Check their order and shapes."
        )
    check_number(action, "temperature", temperature, LogProbError, above=0)


@dataclass(frozen=True)
class LogitShape:
    """The function that a model applies to the logits of its head.

    It is ``cap * tanh(scale * logits / cap)`` with a soft cap, else ``scale * logits``.
    """

    scale: float = 1.0
    cap: float = math.inf

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits that the model returns for these logits of its head, computed in the same dtype."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if math.isinf(self.cap) else torch.tanh(logits / self.cap) * self.cap

    def derivative(self, shaped: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of the function where its value is ``shaped``; this may overwrite ``shaped``."""
        if math.isinf(self.cap):
            return self.scale
        return shaped.div_(self.cap).square_().neg_().add_(1.0).mul_(self.scale)


@dataclass(frozen=True)
class _Vocabulary:
    """The parts of the vocabulary that the ranks of a group hold."""

    group: dist.ProcessGroup | None
    """The ranks; None if this rank holds the full vocabulary."""
    sizes: tuple[int, ...]
    """Number of tokens in each rank's part."""
    own: slice
    """The tokens of this rank's part."""

    @classmethod
    def of(cls, weight: torch.Tensor, group: dist.ProcessGroup | None) -> _Vocabulary:
        """Return the parts for the weight of a head; collective over the group."""
        size = weight.shape[0]
        if group is None:
            return cls(None, (size,), slice(0, size))
        counts = weight.new_zeros(dist.get_world_size(group), dtype=torch.int64)
        counts[dist.get_rank(group)] = size
        dist.all_reduce(counts, group=group)
        sizes = tuple(counts.tolist())
        begin = sum(sizes[: dist.get_rank(group)])
        return cls(group, sizes, slice(begin, begin + size))

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens [rows, vocabulary] for those of this rank's part; collective."""
        if self.group is None:
            return logits
        longest = max(self.sizes)  # all parts but the last have equal sizes
        padded = pad(logits, (0, longest - logits.shape[-1])).contiguous()
        parts = padded.new_empty((len(self.sizes) * len(padded), longest))
        all_gather_single(parts, padded, group=self.group)
        of_ranks = zip(parts.view(len(self.sizes), len(padded), longest), self.sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in of_ranks], dim=-1)


@dataclass(frozen=True)
class _Settings:
    """The settings of `_LinearLogProbs`."""

    temperature: float
    vocabulary: _Vocabulary
    rows: int
    """Number of rows in a chunk."""
    shape: LogitShape
    entropy: bool
    autocast: tuple[str, torch.dtype, bool]
    """Arguments of `torch.autocast` in forward; backward passes the same ones, so that it computes equal logits."""

    def log_probs(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits that the model returns for some rows, and the log-softmax of logits / temperature."""
        with torch.autocast(*self.autocast):
            shaped = self.shape.apply(self.vocabulary.gather(linear(hidden, weight, bias)))
        logits = shaped.to(_at_least_fp32(hidden))
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return shaped, logits.log_softmax(dim=-1)


class _LinearLogProbs(torch.autograd.Function):
    """Compute the head, the log-softmax and the selection of targets as one operation, chunk by chunk.

    With z the logits, p their softmax and t the target: d log p_t / dz = (onehot_t - p) / temperature, and
    d entropy / dz = -p (log p + entropy) / temperature.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes by position
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found, entropies = hidden.new_zeros((2, len(targets)), dtype=_at_least_fp32(hidden)).unbind()
        for rows in _chunks(targets, settings):
            log_probs = settings.log_probs(hidden[rows], weight, bias)[1]
            found[rows] = log_probs.gather(-1, targets[rows, None]).squeeze(-1)
            if settings.entropy:
                entropies[rows] = -log_probs.mul_(log_probs.exp()).sum(dim=-1)
            del log_probs  # before the logits of the next chunk are allocated
        ctx.save_for_backward(hidden, weight, bias, targets, entropies)
        ctx.settings = settings
        return found.clone(), entropies.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropies: torch.Tensor) -> Any:
        hidden, weight, bias, targets, entropies = ctx.saved_tensors
        settings: _Settings = ctx.settings
        grad_hidden, grad_weight, grad_bias = (
            torch.zeros_like(tensor, dtype=hidden.dtype if tensor is hidden else entropies.dtype) if wanted else None
            for tensor, wanted in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        for rows in _chunks(targets, settings):
            shaped, log_probs = settings.log_probs(hidden[rows], weight, bias)
            grad_logits = log_probs.exp()
            if settings.entropy:
                log_probs += entropies[rows, None]
                log_probs *= grad_entropies[rows, None]
                log_probs += grad_log_probs[rows, None]
                grad_logits *= log_probs
            else:
                grad_logits *= grad_log_probs[rows, None]
            grad_logits.neg_().scatter_add_(-1, targets[rows, None], grad_log_probs[rows, None])
            if settings.shape != LogitShape():
                grad_logits *= settings.shape.derivative(log_probs.copy_(shaped))
            if settings.temperature != 1.0:
                grad_logits /= settings.temperature
            grad_raw = grad_logits[:, settings.vocabulary.own].to(shaped.dtype)
            del shaped, log_probs, grad_logits
            if grad_hidden is not None:
                grad_hidden[rows] = grad_raw @ weight.to(grad_raw.dtype)
            if grad_weight is not None:
                _add_product(grad_weight, grad_raw.T, hidden[rows].to(grad_raw.dtype))
            if grad_bias is not None:
                grad_bias += grad_raw.sum(dim=0, dtype=grad_bias.dtype)
        if grad_hidden is not None and settings.vocabulary.group is not None:
            dist.all_reduce(grad_hidden, group=settings.vocabulary.group)
        grad_weight, grad_bias = (None if grad is None else grad.to(weight.dtype) for grad in (grad_weight, grad_bias))
        return grad_hidden, grad_weight, grad_bias, None, None


def _at_least_fp32(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(targets: torch.Tensor, settings: _Settings) -> Iterator[slice]:
    return (slice(first, first + settings.rows) for first in range(0, len(targets), settings.rows))


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


# --- the model around the head ---------------------------------------------------------------------------------------


def _check_arguments(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    inputs: Mapping[str, Any],
    *,
    last: int | None,
    temperature: float,
    chunk_bytes: int | None,
) -> int:
    """Check the arguments; return ``last``, or its default if it is None."""
    if unsupported := [name for name in ("labels", "logits_to_keep") if name in inputs]:
        raise LogProbError(
            f"cannot compute log-probabilities: {unsupported[0]} is among the inputs, expected only inputs that the "
            "hidden states are computed from. Omit it; last selects the tokens."
        )
    action = "compute log-probabilities"
    for name, ids in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        is_given = isinstance(ids, torch.Tensor) and (name != "input_ids" or not ids.is_floating_point())
        if not (is_given or (name == "attention_mask" and ids is None)):
            shown = f"a tensor of {ids.dtype}" if isinstance(ids, torch.Tensor) else f"a {type(ids).__name__}"
            raise LogProbError(f"cannot {action}: {name} is {shown}, expected a tensor of integers. Pass token ids.")
    for name, number in (("last", last), ("chunk_bytes", chunk_bytes)):
        if number is not None:
            check_number(action, name, number, LogProbError, integer=True)
    check_number(action, "temperature", temperature, LogProbError)
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise LogProbError(
            f"cannot compute log-probabilities: input_ids has the shape {list(input_ids.shape)}, expected "
            "[batch, length] with at least two tokens. Add the batch dimension, or pass longer sequences."
        )
    longest = input_ids.shape[1] - 1
    last = longest if last is None else last
    for name, value, valid, expected in (
        ("last", last, 1 <= last <= longest, f"1 to {longest}, because the first token is not predicted"),
        ("temperature", temperature, 0 < temperature < math.inf, "a finite number above 0"),
        ("chunk_bytes", chunk_bytes, chunk_bytes is None or chunk_bytes >= 1, "at least 1"),
    ):
        if not valid:
            raise LogProbError(
                f"cannot compute log-probabilities: {name} is {value}, expected {expected}. Omit it for its default."
            )
    return last


def _head_of(root: Any) -> nn.Linear:
    """Return the linear layer that computes the logits; raise LogProbError if the model has none."""
    model = root if hasattr(root, "get_output_embeddings") else getattr(root, "model", root)
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    generates = not hasattr(model, "can_generate") or model.can_generate()
    causal = generates and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if causal and isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return head
    raise LogProbError(
        f"cannot compute log-probabilities: the head of {class_name(model)} is a {type(head).__name__}, expected "
        "the nn.Linear that get_output_embeddings of a causal language model returns. Use such a model, add no adapter "
        "to its head, or call linear_log_probs in its forward."
    )


def _inputs_of(root: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward pass without a key-value cache, which would only use memory.

    Raise LogProbError if the forward does not accept the tokens by their usual name.
    """
    if not accepts(root.forward, "input_ids"):
        raise LogProbError(
            f"cannot compute log-probabilities: {class_name(root)}.forward has no argument input_ids, expected the "
            "forward of a causal language model. Pass the inner model, or set is_actor = True on a wrapper of one."
        )
    without_cache = {**({"use_cache": False} if accepts(root.forward, "use_cache") else {}), **inputs}
    return with_documents_apart(without_cache, has_cache=False) or without_cache


def _parts_of(head: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None, dist.ProcessGroup | None]:
    """Return weight and bias of a gathered head, or this rank's parts of them and the ranks that share the head."""
    if not isinstance(head.weight, DTensor):
        return head.weight, head.bias, None
    (placed,) = head.weight.placements
    if placed != Shard(0):
        raise LogProbError(
            f"cannot compute log-probabilities: the weight of the head has the placement {placed}, expected a head "
            "whose outputs are split. Use the style colwise_gather_output for the head."
        )
    bias = head.bias.to_local() if isinstance(head.bias, DTensor) else head.bias
    return head.weight.to_local(), bias, head.weight.device_mesh.get_group()


def _run_with_head(
    root: nn.Module,
    head: nn.Module,
    compute: Callable[[torch.Tensor], torch.Tensor],
    inputs: Mapping[str, Any],
    *,
    with_output: bool = False,
) -> Any:
    """Run a model with ``compute`` as the forward of its head; collective for a sharded model.

    Returns:
        The head's output. It has passed through FSDP2's hooks of the head and of the root unit, so backward gathers
        both units. With ``with_output``, a pair: the head's output and the model's output.
    """
    made: list[torch.Tensor] = []
    forward = root.forward

    def forward_of_root(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if len(made) != 1:
            raise LogProbError(
                f"cannot compute log-probabilities: {class_name(root)} called its head {len(made)} times, expected "
                "one call in a forward pass. Use a causal language model."
            )
        return output if with_output else made[0]

    with (
        _replaced_forward(head, compute),
        head.register_forward_hook(lambda _module, _inputs, output: made.append(output)),
        _replaced_forward(root, forward_of_root),
    ):
        output = root(**inputs)
    return (made[0], output) if with_output else output


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward while the context is active; the module's hooks still run."""
    own = vars(module).pop("forward", None)
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own


# --- the function of the logits after the head ------------------------------------------------------------------------

_SHAPE = Slot[tuple[bool, LogitShape]]("logit shape")
"""Whether the model was sharded when the function was measured, and the function.

The function is measured again after sharding. The forward pass is then collective, so all ranks must run it, including
ranks that measured the function before sharding.
"""


def _logit_shape_of(root: nn.Module, head: nn.Linear, inputs: Mapping[str, Any]) -> LogitShape:
    """Return the function that a model applies to its logits, measured at first use: [Note: after the head]."""
    cached = model_state(root).get(_SHAPE)
    if cached is None or cached[0] != is_sharded(root):
        cached = model_state(root).set(_SHAPE, (is_sharded(root), _measure_logit_shape(root, head, inputs)))
    return cached[1]


def _measure_logit_shape(root: nn.Module, head: nn.Linear, inputs: Mapping[str, Any]) -> LogitShape:
    """Run the model with a head that returns known numbers, and fit the function to the logits of the model."""
    device = inputs["input_ids"].device
    known = torch.linspace(-1, 1, head.out_features, device=device) ** 3 * 2000

    def return_known(_hidden: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(True)  # so that logits require grad if a trained factor scales them
        return known.clone().view(1, 1, -1)  # a copy: `known` must stay the same if the model changes logits in place

    with measured_pass(), torch.no_grad(), restored_generators():
        from_head, output = _run_with_head(root, head, return_known, inputs, with_output=True)
    logits = getattr(output, "logits", torch.empty(0))
    comparable = logits.shape == (1, 1, len(known)) and not logits.requires_grad
    if comparable and torch.equal(from_head[0, 0].to(known.dtype), known):
        measured = logits[0, 0].to(known.dtype)
        for shape in _candidates(known, measured):
            if torch.allclose(shape.apply(known), measured, rtol=8 * torch.finfo(logits.dtype).eps, atol=1e-6):
                return shape
    raise LogProbError(
        f"cannot compute log-probabilities: {class_name(root)} or one of its hooks changes the logits of its head, "
        "expected at most a fixed factor and a soft cap. Call linear_log_probs in its forward."
    )


def _candidates(known: torch.Tensor, measured: torch.Tensor) -> Iterator[LogitShape]:
    """Yield functions that may map ``known`` to ``measured``; the last known value is large enough to reach the cap."""
    largest = measured[-1].item()
    yield LogitShape(scale=largest / known[-1].item())
    half = (measured / largest - 0.5).abs().argmin()
    ratio = measured[half].item() / largest if largest else 0.0
    if 0 < ratio < 1:
        scale = math.atanh(ratio) * largest / known[half].item()
        yield LogitShape(float(f"{scale:.4g}"), largest)  # exact if the configured scale has 4 digits or fewer
        yield LogitShape(scale, largest)
