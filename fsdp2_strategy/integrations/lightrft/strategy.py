"""Define `LightRFTStrategy`: an `FSDPV2Strategy` with the further names that LightRFT's trainers read.

Input: the namespace of LightRFT's parser. Output: a strategy for its scripts; see docs/coming_from_lightrft.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.checkpoint.load import foreign_training_state
from fsdp2_strategy.checkpoint.several_models import Models
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.mesh import group_of
from fsdp2_strategy.distributed.process_group import group_in_use, ranks_of
from fsdp2_strategy.errors import CheckpointError, ConfigError, RolloutError, SequenceError
from fsdp2_strategy.integrations.lightrft.critic_export import is_critic, is_plain_wrapper, save_critic
from fsdp2_strategy.integrations.lightrft.generation import (
    Generation,
    LengthStatistics,
    gather_lists,
    generate,
    prompts_with_media,
)
from fsdp2_strategy.integrations.lightrft.sequences import SequenceParallelData, split_within_forward, takes_actions
from fsdp2_strategy.integrations.lightrft.settings import OPTIONS, settings_of, with_options
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.ranks import sequence_group_of
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout import WeightUpdate
from fsdp2_strategy.strategy import FSDPV2Strategy
from fsdp2_strategy.tracking.step_log import Output

ModelT = TypeVar("ModelT", bound=nn.Module | None)


class EngineStatus(Enum):
    """Whether the inference engine is awake."""

    SLEEPED = 0
    WAKEUP = 1


def get_strategy(args: object = None, *, trust_checkpoints: bool = False, **settings: Any) -> LightRFTStrategy:
    """Make the strategy for LightRFT's arguments; collective if there is no process group yet.

    Args:
        args: the namespace of LightRFT's parser. Options that it lacks have LightRFT's defaults.
        trust_checkpoints: allow `load_ckpt` to read checkpoints that LightRFT wrote, whose pickles can run code.
        **settings: fields of `StrategyConfig` that override ``args``; for example ``loss_reduction="sum"``.

    Raises:
        ConfigError: ``args.fsdp`` is false, or a value is not valid; see `FSDPV2Strategy`.
        MeshError: see `FSDPV2Strategy`.
    """
    config = settings_of(args, **settings)
    return LightRFTStrategy(args=args, config=config, trust_checkpoints=trust_checkpoints)


def is_engine(model: object) -> bool:
    """Return whether an object is an inference engine and not a model; not collective."""
    return hasattr(model, "wake_up")


@dataclass(frozen=True)
class BroadcastManager:
    """Send a model's weights to the inference engine."""

    strategy: LightRFTStrategy
    actor: nn.Module

    def broadcast_to_engine(self) -> None:
        """Load the model's weights into the engine; collective; see `LightRFTStrategy.update_engine_weights`."""
        self.strategy.update_engine_weights(self.actor)


class LightRFTStrategy(FSDPV2Strategy):
    """Train with LightRFT's trainers; `get_strategy` constructs it from the namespace of LightRFT's parser.

    Arguments that are not listed here, and the errors, are those of `FSDPV2Strategy`.

    Args:
        *arguments: as for `FSDPV2Strategy`.
        trust_checkpoints: allow `load_ckpt` to read checkpoints that LightRFT wrote, whose pickles can run code.
        **keywords: as for `FSDPV2Strategy`.

    Attributes:
        engine_mp_group: the ranks that share an engine: ``engine_tp_size`` successive ranks.
        engine_dp_group: the ranks with this rank's position in its engine, one of each engine.
        sp_data_processor: distributes samples over the ranks that share sequences.
        genlen_analyser: statistics of the lengths of generated outputs.
        broadcast_manager: sends the weights of the last model that `update_engine_weights` sent; None before.
        time_steps: ``time_steps["ema"]`` is the number of calls of `moving_average`.
    """

    _option_defaults: ClassVar = {**FSDPV2Strategy._option_defaults, **OPTIONS}

    def __init__(self, *arguments: Any, trust_checkpoints: bool = False, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.trust_checkpoints = trust_checkpoints
        try:
            self.config = with_options(self.config)
            self.engine_mp_group, self.engine_dp_group = _engine_groups(self.config.extra["engine_tp_size"])
        except ConfigError:
            self.close()  # every rank raises
            raise
        self.sp_data_processor = SequenceParallelData(self.sp_group if self.sp_size > 1 else None)
        self.genlen_analyser = LengthStatistics(self.engine_dp_group, self.config.extra["plot_every"])
        self.broadcast_manager: BroadcastManager | None = None
        self.time_steps: Counter[str] = Counter()
        self._generations = 0

    def _step_output(self) -> Output:
        """LightRFT's trainers have bars of their own."""
        return "lines"

    # --- models -------------------------------------------------------------------------------------------------------

    @collective
    def prepare_model(self, model: ModelT, *arguments: Any, **keywords: Any) -> ModelT:
        """Shard a model in place; collective; see `FSDPV2Strategy.prepare_model`.

        LightRFT sets ``is_actor`` on the trained actor only. Here it is also set on other wrappers that add no tensors
        to the model in ``.model``: the reference, and the model of averages. So their parameters have the actor's
        names, and they are exported as it is.
        """
        if is_plain_wrapper(model):
            model.is_actor = True  # type: ignore[union-attr]
        if model is None or self.sp_size == 1:
            return super().prepare_model(model, *arguments, **keywords)
        was_split = sequence_group_of(unwrap_model(model)) is not None
        model = super().prepare_model(model, *arguments, **keywords)
        is_split = sequence_group_of(unwrap_model(model)) is not None and takes_actions(model)
        if is_split and not was_split:
            split_within_forward(model, self.shard_sequence)
        elif not is_split:
            log("%s computes full sequences on each of the %d ranks that share them", class_name(model), self.sp_size)
        return model

    @collective
    def backward(
        self, loss: torch.Tensor, model: nn.Module, optimizer: Optimizer | None = None, **keywords: Any
    ) -> None:
        """Run the backward pass of one micro-batch; collective; see `FSDPV2Strategy.backward`.

        Raises:
            SequenceError: ranks share sequences, and the trainer does not share its samples.
        """
        if self.sp_size > 1 and not self.sp_data_processor.is_used:
            raise SequenceError(
                f"cannot compute gradients: sp_size is {self.sp_size}, and this trainer has not called "
                "sp_data_processor.preprocess, expected the same samples on ranks that share sequences. Use sp_size 1."
            )
        super().backward(loss, model, optimizer, **keywords)

    def moving_average(self, *arguments: Any, **keywords: Any) -> None:
        """Average a model's parameters into a second model; collective unless all are sharded the same way."""
        super().moving_average(*arguments, **keywords)
        self.time_steps["ema"] += 1

    def _part_of_data(self) -> tuple[int, int]:
        """Return this rank and the number of ranks: each rank generates samples of its own, also if they are shared."""
        return self.get_rank(), self.world_size

    # --- the engine ---------------------------------------------------------------------------------------------------

    @property
    def inference_engine_status(self) -> EngineStatus:
        """Whether this rank's engine is awake; asleep if there is none."""
        has_engine = self._rollout.engine is not None
        return EngineStatus.WAKEUP if has_engine and not self._rollout.is_asleep else EngineStatus.SLEEPED

    @collective
    def update_engine_weights(
        self, actor: nn.Module, *, verify: bool = False, by_difference: bool | Literal["hashes"] = False
    ) -> WeightUpdate:
        """Load a model's weights into the engine, which is awake afterwards; do nothing without an engine; collective.

        Arguments, result and errors are those of `FSDPV2Strategy.update_engine_weights`.
        """
        if self.inference_engine_type is None:
            log("there is no inference engine: no weights are sent")
            return WeightUpdate(None, is_full=False, sent_bytes=0, full_bytes=0, retained_bytes=0)
        self.wakeup_inference_engine()
        update = super().update_engine_weights(actor, verify=verify, by_difference=by_difference)
        self.broadcast_manager = BroadcastManager(self, actor)
        return update

    def engine_generate_local(
        self,
        sampling_params: Any,
        prompt_token_ids: Sequence[list[int]] | None = None,
        multi_modal_inputs: Sequence[dict[str, Any]] | None = None,
    ) -> list[Generation]:
        """Generate with this rank's engine; not collective, unless the engine's own ``generate`` is.

        Args:
            sampling_params: passed to the engine.
            prompt_token_ids: prompts as token ids; or None.
            multi_modal_inputs: the result of `_build_multimodal_inputs`; or None.

        Raises:
            RolloutError: there is no engine on this rank; or see `generation.generate`.
        """
        if self._rollout.engine is None:
            raise RolloutError(
                "cannot generate: there is no inference engine on this rank, expected one. Call "
                "setup_inference_engine first."
            )
        engine, kind = self._rollout.engine, self.inference_engine_type
        return generate(engine, kind, sampling_params, token_ids=prompt_token_ids, inputs=multi_modal_inputs)

    _build_multimodal_inputs = staticmethod(prompts_with_media)

    @collective
    def gather_and_generate(
        self,
        sampling_params: Any,
        all_prompt_token_ids: Sequence[list[int]] | None = None,
        all_prompts: Sequence[str] | None = None,
        all_images: Sequence[Any] | None = None,
        sleep_engine: bool = True,
        images_num: Sequence[int] | None = None,
        all_videos: Sequence[Any] | None = None,
        videos_num: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Generate for the prompts of all ranks that share an engine, and return the outputs of this rank; collective.

        The engine is woken before.

        Args:
            sampling_params: passed to the engine.
            all_prompt_token_ids: this rank's prompts as token ids.
            all_prompts: the same prompts as texts; used if there are images or videos.
            all_images: for each prompt a list of its images, or the images of all prompts in one list; None, or a list
                of None, for prompts without images.
            sleep_engine: put the engine to sleep afterwards if ``enable_engine_sleep`` is true.
            images_num: number of images of each prompt.
            all_videos: as ``all_images``.
            videos_num: as ``images_num``.

        Raises:
            RolloutError: on every rank: there is no engine, it failed, or it did not return one output for each prompt.
        """
        self.wakeup_inference_engine()
        own_media = any(item is not None for media in (all_images, all_videos) for item in media or ())
        has_media = any(flag for (flag,) in gather_lists([own_media], self.engine_mp_group))
        with all_or_none("generate", RolloutError):
            own: list[Any] = (
                self._build_multimodal_inputs(all_prompts or (), all_images, images_num, all_videos, videos_num)
                if has_media
                else list(all_prompt_token_ids or ())
            )
        of_ranks = gather_lists(own, self.engine_mp_group)
        with all_or_none("generate", RolloutError):
            shared = [prompt for prompts in of_ranks for prompt in prompts]
            token_ids, inputs = (None, shared) if has_media else (shared, None)
            generated = None  # another rank has the engine
            if self._rollout.engine is not None or dist.get_world_size(self.engine_mp_group) == 1:
                generated = self.engine_generate_local(sampling_params, token_ids, inputs)
        with all_or_none("generate", RolloutError):
            outputs = _outputs_of_group(generated, self.engine_mp_group)
        start = sum(map(len, of_ranks[: dist.get_rank(self.engine_mp_group)]))
        mine = outputs[start : start + len(own)]
        for output, ids in zip(mine, all_prompt_token_ids or (), strict=False):
            if output.prompt_token_ids is None:
                output.prompt_token_ids = list(ids)
        if sleep_engine:
            self.maybe_sleep_inference_engine()
        statistics = self.genlen_analyser.collect(outputs, self._generations)
        if statistics is not None:
            log("lengths of generation %d: %s", self._generations, statistics)
        self._generations += 1
        return mine

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @collective
    def load_ckpt(
        self,
        model: Models,
        load_dir: str | Path,
        optimizer: Optimizer | Mapping[str, Optimizer | None] | None = None,
        scheduler: LRScheduler | Mapping[str, LRScheduler | None] | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        **keywords: Any,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint of this package, or one that LightRFT wrote; collective; see `FSDPV2Strategy.load_ckpt`.

        LightRFT's trainers save neither optimizer nor schedule. If a checkpoint of LightRFT lacks their state, this is
        logged, and they stay as they are.

        Raises:
            CheckpointError: on every rank: LightRFT wrote the checkpoint, and ``trust_checkpoints`` is false; or see
                `FSDPV2Strategy.load_ckpt`.
        """
        trust = keywords.pop("trust", self.trust_checkpoints)
        saved = foreign_training_state(load_dir, keywords.get("tag"), trust=trust)
        if saved is not None and not trust:
            raise CheckpointError(
                f"cannot load from {load_dir}: another system wrote the checkpoint, and it contains pickles, which can "
                "run any code when they are read, expected permission to read them. Call "
                "get_strategy(args, trust_checkpoints=True) if you trust its source."
            )
        if saved is not None:
            lacking = [name for name in ("optimizer", "scheduler") if name not in saved]
            load_optimizer_states &= "optimizer" in saved
            load_lr_scheduler_states &= "scheduler" in saved
            if lacking:
                log("%s has no state for %s: the run continues with new ones", load_dir, " and ".join(lacking))
        return super().load_ckpt(
            model,
            load_dir,
            optimizer,
            scheduler,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            trust=trust,
            **keywords,
        )

    @collective
    def save_model(
        self, model: nn.Module, tokenizer: Any = None, output_dir: str | Path | None = None, **kwargs: Any
    ) -> None:
        """Write a Hugging Face folder; collective; see `hf.export.save_model`.

        A critic is written as the folder of its backbone, with its value head in ``value_head.safetensors``.
        """
        save = save_critic if is_critic(model) else super().save_model
        save(model, tokenizer, output_dir, **kwargs)


def _engine_groups(size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the group of ranks that share this rank's engine, and that of one rank of each engine; collective."""
    ranks = ranks_of(group_in_use())
    if not isinstance(size, int) or size < 1 or len(ranks) % size:
        raise ConfigError(
            f"cannot group ranks by engine: engine_tp_size is {size!r}, expected a divisor of the number of ranks "
            f"{len(ranks)}. Pass another engine_tp_size."
        )
    index = ranks.index(dist.get_rank())
    first = index - index % size
    return group_of(ranks[first : first + size]), group_of(ranks[index % size :: size])


def _outputs_of_group(outputs: list[Generation] | None, group: dist.ProcessGroup) -> list[Generation]:
    """Return the outputs of the first rank of a group that has them; collective over the group."""
    if dist.get_world_size(group) == 1:
        return outputs or []
    found = [own for (own,) in gather_lists([outputs], group) if own is not None]
    if not found:
        raise RolloutError(
            "cannot generate: there is no inference engine on any of the ranks that share one, expected one. Call "
            "setup_inference_engine first."
        )
    return found[0]
