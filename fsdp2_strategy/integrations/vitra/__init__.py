"""Train VITRA's models: parameter groups, schedules, metrics and the training strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from fsdp2_strategy.integrations.vitra.metrics import VLAMetrics as VLAMetrics
    from fsdp2_strategy.integrations.vitra.multi_group_scheduler import MultiGroupLRScheduler as MultiGroupLRScheduler
    from fsdp2_strategy.integrations.vitra.parameter_groups import GROUPS as GROUPS
    from fsdp2_strategy.integrations.vitra.parameter_groups import split_modality_collator as split_modality_collator
    from fsdp2_strategy.integrations.vitra.parameter_groups import vla_parameter_groups as vla_parameter_groups
    from fsdp2_strategy.integrations.vitra.settings import VLASettings as VLASettings
    from fsdp2_strategy.integrations.vitra.strategy import VLAFSDPStrategy as VLAFSDPStrategy

_MODULE_OF = {
    "GROUPS": "parameter_groups",
    "MultiGroupLRScheduler": "multi_group_scheduler",
    "VLAFSDPStrategy": "strategy",
    "VLAMetrics": "metrics",
    "VLASettings": "settings",
    "split_modality_collator": "parameter_groups",
    "vla_parameter_groups": "parameter_groups",
}
"""The module of each public name."""

__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_imports(__name__, _MODULE_OF)
