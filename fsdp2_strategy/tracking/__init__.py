"""Record the metrics of any training loop: one record per optimizer step, to files and services."""

from fsdp2_strategy.tracking.metrics import Metrics
from fsdp2_strategy.tracking.trackers import JSONLinesTracker, TensorBoardTracker, Tracker, WeightsBiasesTracker

__all__ = ["JSONLinesTracker", "Metrics", "TensorBoardTracker", "Tracker", "WeightsBiasesTracker"]
