"""Record any training loop: one record of metrics per optimizer step, its rates, and traces of some steps."""

from fsdp2_strategy.tracking.metrics import Metrics
from fsdp2_strategy.tracking.profile import Profile
from fsdp2_strategy.tracking.throughput import Rates, Throughput
from fsdp2_strategy.tracking.trackers import JSONLinesTracker, TensorBoardTracker, Tracker, WeightsBiasesTracker

__all__ = [
    "JSONLinesTracker",
    "Metrics",
    "Profile",
    "Rates",
    "TensorBoardTracker",
    "Throughput",
    "Tracker",
    "WeightsBiasesTracker",
]
