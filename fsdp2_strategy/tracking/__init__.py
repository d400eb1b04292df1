"""Record the metrics of any training loop: one record per optimizer step, to files and services; and its rates."""

from fsdp2_strategy.tracking.metrics import Metrics
from fsdp2_strategy.tracking.throughput import Rates, Throughput
from fsdp2_strategy.tracking.trackers import JSONLinesTracker, TensorBoardTracker, Tracker, WeightsBiasesTracker

__all__ = [
    "JSONLinesTracker",
    "Metrics",
    "Rates",
    "TensorBoardTracker",
    "Throughput",
    "Tracker",
    "WeightsBiasesTracker",
]
