"""LeRobot: read and write its v3 data sets, save checkpoints in its layout, and export its policies.

`LeRobotDataset` returns samples by index; `ResumableLoader` decides their order. The main modules of this package:

    dataset_source         local and remote files
    metadata               features, tasks, statistics, and the files of each episode
    rows, video            an episode's table rows and video frames
    windows                time windows around a frame
    prefetch, fetching     threads that fetch episodes before they are needed
    generate               a writer of data sets

These modules need the extra `vla`; `checkpoint_layout` and `policy_export` do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.import_paths import lazy_exports

if TYPE_CHECKING:
    from fsdp2_strategy.lerobot.checkpoint_layout import LeRobotLayout as LeRobotLayout
    from fsdp2_strategy.lerobot.dataset import LeRobotDataset as LeRobotDataset
    from fsdp2_strategy.lerobot.metadata import Metadata as Metadata
    from fsdp2_strategy.lerobot.policy_export import save_policy as save_policy

__getattr__, __dir__, __all__ = lazy_exports(__name__)
