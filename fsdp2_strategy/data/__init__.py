"""Compute the data order, cut it into global batches, load this rank's samples, and resume at any batch.

`orders` computes the order of an epoch, `batches` cuts it into global batches, and `loader` fetches this rank's part of
each batch.
"""

from fsdp2_strategy.data.loader import ResumableLoader
from fsdp2_strategy.data.orders import EpisodeOrder, GlobalOrder, MixtureOrder, Order

__all__ = ["EpisodeOrder", "GlobalOrder", "MixtureOrder", "Order", "ResumableLoader"]
