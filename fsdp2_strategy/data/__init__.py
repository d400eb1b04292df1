"""Which samples a rank gets, in which order, and how a run goes on in it; knows nothing of models.

Orders are formulas (`order`), batches are slices of them (`batches`), a loader fetches a rank's part (`loader`).
"""

from fsdp2_strategy.data.loader import ResumableLoader
from fsdp2_strategy.data.order import EpisodeOrder, GlobalOrder, MixtureOrder, Order

__all__ = ["EpisodeOrder", "GlobalOrder", "MixtureOrder", "Order", "ResumableLoader"]
