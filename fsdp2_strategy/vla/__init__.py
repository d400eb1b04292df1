"""What vision-language-action training adds: parameter groups and schedules for a backbone and an action model."""

from fsdp2_strategy.schedule import get_constant_schedule_with_freeze_warmup
from fsdp2_strategy.vla.groups import GROUPS, split_modality_collator, vla_parameter_groups
from fsdp2_strategy.vla.schedule import MultiGroupLRScheduler

__all__ = [
    "GROUPS",
    "MultiGroupLRScheduler",
    "get_constant_schedule_with_freeze_warmup",
    "split_modality_collator",
    "vla_parameter_groups",
]
