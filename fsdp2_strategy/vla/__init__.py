"""Train vision-language-action models: parameter groups, schedules, metrics and the training strategy."""

from fsdp2_strategy.checkpoint import LeRobotLayout
from fsdp2_strategy.lerobot.policy_export import save_policy
from fsdp2_strategy.optim.schedule import get_constant_schedule_with_freeze_warmup
from fsdp2_strategy.sharding.known_policies import register_policy
from fsdp2_strategy.tracking import JSONLinesTracker, Tracker, WeightsBiasesTracker
from fsdp2_strategy.vla.metrics import VLAMetrics
from fsdp2_strategy.vla.parameter_groups import GROUPS, split_modality_collator, vla_parameter_groups
from fsdp2_strategy.vla.schedule import MultiGroupLRScheduler
from fsdp2_strategy.vla.strategy import VLAFSDPStrategy

__all__ = [
    "GROUPS",
    "JSONLinesTracker",
    "LeRobotLayout",
    "MultiGroupLRScheduler",
    "Tracker",
    "VLAFSDPStrategy",
    "VLAMetrics",
    "WeightsBiasesTracker",
    "get_constant_schedule_with_freeze_warmup",
    "register_policy",
    "save_policy",
    "split_modality_collator",
    "vla_parameter_groups",
]
