"""Make a model compute its part of the sequences, by hooks on the model, its decoder and its blocks.

Input: a model of transformers, and a `SplitPlan`. Output: the same model. If its forward gets a `SequenceShard`, it
computes this rank's part; otherwise it computes full sequences, as before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextvars import Token
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.generators import seed_torch, set_torch_states, torch_states
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.errors import SequenceError
from fsdp2_strategy.hf.library_internals import (
    attention_implementation,
    recompute_in_context,
    set_attention_implementation,
)
from fsdp2_strategy.hf.packed_rows import ARGUMENT, running_shard
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.parallel.sequence.attention import is_split_name, split_name
from fsdp2_strategy.parallel.sequence.exchange import gather_sequence
from fsdp2_strategy.parallel.sequence.full_sequences import run_on_full_sequences
from fsdp2_strategy.parallel.sequence.shard import SequenceShard, current_shard, documents_of, is_sequence
from fsdp2_strategy.parallel.tensor.random import DROPOUTS

Arguments = dict[str, Any]

KINDS = {
    "plain": "sequences",
    "padded": "sequences with an attention_mask",
    "packed": "packed documents",
    "loss": "sequences with labels",
}
"""Kinds of batches, by their names in `SplitPlan`."""


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """What `split_sequences` must know of a model; `plan_split` finds it out."""

    full: frozenset[tuple[str, str]] = frozenset()
    """Modules that compute full sequences: name within its block, and class name. The name is empty for a block."""
    outside: frozenset[str] = frozenset()
    """Names, within the decoder, of modules outside of blocks that compute full sequences."""
    makes_positions: bool = False
    """Whether the model gets no positions if the batch has none, because its own do not count from 0."""
    packs: bool = True
    """Whether the model keeps packed documents apart."""
    padding_position: int | None = None
    """The position of padding, if the model's own positions count only the tokens that are not padding; else None."""
    is_inside: bool = False
    """Whether sequences must be split after they are embedded, because masks are made before from all tokens."""
    refused: tuple[tuple[str, str], ...] = ()
    """Kinds of batches that the model cannot split (`KINDS`), and why."""


def split_sequences(model: Any, plan: SplitPlan) -> None:
    """Register the hooks that make a model compute its part of the sequences; not collective.

    No class is changed, and nothing outside of this model. Its text configuration names our attention functions.
    """
    config = model.config.get_text_config()
    _split_attention(config)
    decoder = decoder_of(model)
    at_begin: list[AtBegin] = [_Checks(class_name(model), plan, config), _own_dropout(model)]
    _make_current(model, at_begin=[*at_begin, _join] if plan.is_inside else at_begin)
    _make_current(decoder, at_begin=[_split_inside, _pass_mask_on], at_end=_gather_router_logits)
    for name, module in modules_outside(model).items():
        module.register_forward_pre_hook(_count_from_begin, with_kwargs=True)
        if name in plan.outside:
            run_on_full_sequences(module)
    for block in blocks_of(model):
        _make_current(block)
        for name, module in ("", block), *block.named_children():
            if (name, class_name(module)) in plan.full:
                run_on_full_sequences(module)


def _split_attention(config: Any) -> None:
    """Make a configuration name our attention function; a call of ``set_attn_implementation`` has replaced it."""
    implementation = attention_implementation(config)
    if not is_split_name(implementation):
        set_attention_implementation(config, split_name(implementation))


def decoder_of(model: Any) -> nn.Module:
    """Return the module that computes hidden states from embeddings: the decoder of a model, without its head."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) else model.base_model


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the entries of the outermost lists of modules in a model's decoder."""
    return list(_entries(decoder_of(model)))


def modules_outside(model: Any) -> dict[str, nn.Module]:
    """Return the modules of a decoder that are outside of its blocks, by name; not those within them."""
    return dict(_outside(decoder_of(model)))


def _outside(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            continue
        if next(_entries(child), None) is None:
            yield prefix + name, child
        else:
            yield from _outside(child, f"{prefix}{name}.")


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _entries(child)


def _count_from_begin(_module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> Any:
    """Correct positions that a model without an argument for them has counted from 0: a tensor of one dimension."""
    shard, positions = current_shard(), kwargs.get("position_ids")
    if shard is None or positions is None or positions.ndim != 1:
        return None
    return args, kwargs | {"position_ids": positions + shard.begin}


AtBegin = Callable[[SequenceShard, Arguments], Callable[[], None] | None]
"""Changes the arguments of a module; returns what is called when the module has run."""


def _make_current(
    module: nn.Module,
    at_begin: list[AtBegin] | None = None,
    at_end: Callable[[SequenceShard, Any], None] = lambda _shard, _output: None,
) -> None:
    """Register hooks that make the shard in a module's arguments the current one while the module runs."""
    running: list[tuple[Token[SequenceShard | None], list[Callable[[], None] | None]]] = []

    def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        shard = kwargs.get(ARGUMENT)
        token = running_shard.set(shard or current_shard())
        recompute_in_context(_module)  # without the hooks of the model, it computes the same shard
        running.append((token, []))
        for change in at_begin or () if shard else ():
            running[-1][1].append(change(kwargs[ARGUMENT], kwargs))
        if shard and kwargs[ARGUMENT] is not shard:
            running_shard.set(kwargs[ARGUMENT])
        return args, kwargs

    def end(_module: nn.Module, _args: object, output: Any) -> None:
        if not running:  # a hook ahead of `begin` raised
            return
        token, undo = running.pop()
        shard = current_shard()
        running_shard.reset(token)
        for call in undo:
            if call is not None:
                call()
        if shard is not None and output is not None:
            at_end(shard, output)

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end, always_call=True)


def positions_without_padding(mask: torch.Tensor, padding_position: int | None) -> torch.Tensor:
    """Return positions that count the tokens that are not padding; ``padding_position`` is that of padding."""
    is_token = mask.bool()
    return torch.where(is_token, is_token.cumsum(dim=1) - 1, padding_position or 0)


class _Checks:
    """Refuse batches that a model cannot split, and adapt arguments.

    A part needs no key-value cache. The documents are dropped if the model does not keep them apart.
    """

    def __init__(self, name: str, plan: SplitPlan, config: Any) -> None:
        self.name, self.plan, self.config, self.refused = name, plan, config, dict(plan.refused)

    def __call__(self, shard: SequenceShard, kwargs: Arguments) -> None:
        shard.usage.note_computed()
        _split_attention(self.config)
        kwargs["use_cache"] = False
        skips_padding = self.plan.padding_position is not None and not shard.has_own_positions
        if skips_padding and shard.attention_mask is not None:
            positions = positions_without_padding(shard.attention_mask, self.plan.padding_position)
            kwargs[ARGUMENT] = dataclasses.replace(shard, position_ids=positions)
            kwargs["position_ids"] = shard.local(positions)
        if shard.documents is not None and not self.plan.packs:
            kwargs[ARGUMENT] = dataclasses.replace(shard, documents=None)
        if self.plan.makes_positions and not (shard.has_own_positions or shard.is_split_inside):
            del kwargs["position_ids"]
        requested = {
            "plain": True,
            "padded": shard.attention_mask is not None,
            "packed": kwargs[ARGUMENT].documents is not None,
            "loss": kwargs.get("labels") is not None,
        }
        for kind, is_requested in requested.items():
            if is_requested and kind in self.refused:
                fix = "Compute the loss from the logits" if kind == "loss" else "Set sequence_parallel_size=1"
                raise SequenceError(
                    f"cannot split {KINDS[kind]}: {self.name} {self.refused[kind]}, expected the same values as for "
                    f"full sequences. {fix}."
                )
        if kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
            raise SequenceError(
                f"cannot split sequences: output_attentions is set for {self.name}, expected it not to be, because "
                "each rank has the weights of some heads only. Leave it out."
            )


def _own_dropout(model: nn.Module) -> AtBegin:
    """Give each rank its own random numbers while the model runs, if it has dropout.

    All ranks that share sequences have the same random state. They draw one seed from it and add their rank, so the
    state stays the same on all of them, and resumed runs draw the same numbers.
    """
    modules = [module for module in model.modules() if isinstance(module, DROPOUTS)]
    settings = [value for name, value in vars(model.config).items() if "drop" in name and isinstance(value, float)]

    def reseed(shard: SequenceShard, _kwargs: Arguments) -> Callable[[], None] | None:
        if not model.training or not (any(settings) or any(module.p for module in modules)):
            return None
        seed = int(torch.randint(2**62, (), device="cpu"))
        device = current_device()
        common = torch_states(device)
        seed_torch(seed + shard.ranks.rank)
        return functools.partial(set_torch_states, common, device)

    return reseed


def _join(shard: SequenceShard, kwargs: Arguments) -> None:
    """Gather the parts of a model's arguments, so that its decoder splits them again."""
    if shard.is_split_inside:
        return
    kwargs[ARGUMENT] = dataclasses.replace(shard, is_split_inside=True)
    for name, value in kwargs.items():
        if is_sequence(value, shard.local_length) and not name.endswith("labels") and name != "attention_mask":
            kwargs[name] = gather_sequence(value, shard.ranks)
    # Without positions in the batch, the model counts them in its own way.
    kwargs["position_ids"] = shard.position_ids if shard.has_own_positions else None


def _split_inside(shard: SequenceShard, kwargs: Arguments) -> None:
    """Keep this rank's part of a decoder's arguments, if they are full sequences with embedded images."""
    if not shard.is_split_inside:
        return
    tokens = _tokens_of(kwargs)
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(shard.length, device=tokens.device)[None]
    documents = None if shard.attention_mask is not None else documents_of(positions, len(tokens))
    kwargs[ARGUMENT] = dataclasses.replace(shard, position_ids=positions, documents=documents, is_split_inside=False)
    _keep_local_images(shard, kwargs)
    for name, value in kwargs.items():
        is_full = isinstance(value, torch.Tensor) and value.shape[:2] == tokens.shape[:2]
        if is_full and name != "attention_mask":
            kwargs[name] = shard.local(value)
        elif isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[1:3] == (1, shard.length):
            kwargs[name] = value if name == "attention_mask" else shard.local(value, dim=2)  # which images tokens see
    kwargs["position_ids"] = shard.local(positions, dim=positions.ndim - 1)


def _tokens_of(kwargs: Arguments) -> torch.Tensor:
    """Return a decoder's embeddings, or its token ids."""
    found: torch.Tensor = next(kwargs[name] for name in ("inputs_embeds", "input_ids") if kwargs.get(name) is not None)
    return found


def _pass_mask_on(shard: SequenceShard, kwargs: Arguments) -> None:
    """Give a decoder a mask if the model around it has not: without one, it would look for packed documents itself."""
    if kwargs.get("attention_mask") is None:
        tokens = _tokens_of(kwargs)
        kwargs["attention_mask"] = tokens.new_ones((len(tokens), shard.length), dtype=torch.int64)


def _keep_local_images(shard: SequenceShard, kwargs: Arguments) -> None:
    """Keep the image features that some models add to hidden states of later blocks, of this rank's part."""
    mask, features = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if mask is None or features is None:
        return
    position = torch.arange(shard.length, device=mask.device).expand_as(mask)[mask]
    is_local = (position >= shard.begin) & (position < shard.begin + shard.local_length)
    kwargs["deepstack_visual_embeds"] = [feature[is_local] for feature in features]


def _gather_router_logits(shard: SequenceShard, output: Any) -> None:
    """Replace the router logits of a part by those of full sequences, for losses that balance experts."""
    logits = getattr(output, "router_logits", None)
    if logits is None:
        return
    part = output.last_hidden_state.shape[:2]
    output.router_logits = tuple(
        gather_sequence(own.reshape(*part, -1), shard.ranks).flatten(0, 1) if own is not None else None
        for own in logits
    )
