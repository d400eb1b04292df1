"""LeRobot: data sets of its v3 format, its layout of checkpoints, and its folder of a policy.

`LeRobotDataset` gives samples by index, `ResumableLoader` their order. The modules: where files come from
(`dataset_source`), what they hold (`metadata`), an episode's numbers (`rows`) and frames (`video`), windows in time
(`windows`), what is fetched ahead (`prefetch`, `fetching`), and a writer of the format (`generate`); all with the extra
`vla`. `checkpoint_layout` and `policy_export` need nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.import_paths import lazily

if TYPE_CHECKING:
    from fsdp2_strategy.lerobot.checkpoint_layout import LeRobotLayout as LeRobotLayout
    from fsdp2_strategy.lerobot.dataset import LeRobotDataset as LeRobotDataset
    from fsdp2_strategy.lerobot.metadata import Metadata as Metadata
    from fsdp2_strategy.lerobot.policy_export import save_policy as save_policy

__getattr__, __dir__, __all__ = lazily(__name__)
