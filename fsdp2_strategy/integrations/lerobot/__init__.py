"""LeRobot: read its v3 data sets, save checkpoints in its layout, and export its policies.

`LeRobotDataset` returns samples by index; `ResumableLoader` decides their order. The main modules of this package:

    dataset_source         local and remote files
    metadata               features, tasks, statistics, and the files of each episode
    rows, video            an episode's table rows and video frames
    windows                time windows around a frame
    prefetch, fetching     threads that fetch episodes before they are needed

These modules need the extra `lerobot`; `layout`, `policies` and `policy_export` do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from fsdp2_strategy.integrations.lerobot.dataset import LeRobotDataset as LeRobotDataset
    from fsdp2_strategy.integrations.lerobot.layout import LeRobotLayout as LeRobotLayout
    from fsdp2_strategy.integrations.lerobot.metadata import Metadata as Metadata
    from fsdp2_strategy.integrations.lerobot.policies import register_policy as register_policy
    from fsdp2_strategy.integrations.lerobot.policy_export import save_policy as save_policy

_MODULE_OF = {
    "LeRobotDataset": "dataset",
    "LeRobotLayout": "layout",
    "Metadata": "metadata",
    "register_policy": "policies",
    "save_policy": "policy_export",
}
"""The module of each public name."""

__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_imports(__name__, _MODULE_OF)
