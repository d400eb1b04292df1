"""LeRobot v3 data sets, read from where they are and written; needs the extra `vla`.

`LeRobotDataset` gives samples by index, `ResumableLoader` their order. The other rooms: where files come from
(`source`), what they hold (`metadata`), an episode's numbers (`rows`) and frames (`video`), windows in time
(`windows`), what is fetched ahead (`staging`, `fetching`), and a writer of the format (`generate`).
"""

from fsdp2_strategy.vla.lerobot.dataset import LeRobotDataset
from fsdp2_strategy.vla.lerobot.metadata import Metadata

__all__ = ["LeRobotDataset", "Metadata"]
