"""LeRobot: read and write its v3 data sets, save checkpoints in its layout, and export its policies.

`LeRobotDataset` returns samples by index; `ResumableLoader` decides their order. The modules: access to local and
remote files (`dataset_source`), metadata (`metadata`), an episode's table rows (`rows`) and video frames (`video`),
time windows (`windows`), fetching ahead (`prefetch`, `fetching`), and a writer (`generate`). These need the extra
`vla`; `checkpoint_layout` and `policy_export` do not.
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
