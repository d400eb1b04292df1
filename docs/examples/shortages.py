"""Warn about numbers of ranks, workers or episodes that make a run slower or mix its samples less.

Input: the numbers of ranks, workers, samples, episodes and cores. Output: a warning for each shortage, with its cost
and its remedy.
"""

from __future__ import annotations

import logging
import os

from fsdp2_strategy.distributed.agreement import to_rank_0
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective


@collective
def warn_of_shortages(**numbers: int) -> list[str]:
    """Log one warning for each shortage that any rank finds; collective.

    Each rank checks its own host, because hosts may have different numbers of cores. Rank 0 logs the shortages of all
    ranks.

    Args:
        **numbers: the arguments of `shortages`.

    Returns:
        The shortages that this rank finds.
    """
    own = shortages(**numbers)
    for sentence in dict.fromkeys(sentence for found in to_rank_0(own) for sentence in found):
        log("%s", sentence, level=logging.WARNING)
    return own


def shortages(
    *,
    ranks: int,
    local_ranks: int,
    global_batch_size: int,
    lanes: int,
    pool: int,
    episodes: int,
    batches: int,
    num_workers: int,
    cores: int | None = None,
) -> list[str]:
    """Compare the numbers, and return the text of a warning for each shortage; not collective.

    Args:
        ranks: number of ranks that share the data.
        local_ranks: number of ranks on this host.
        global_batch_size: samples per batch, on all ranks together.
        lanes: number of lanes; see `EpisodeOrder`.
        pool: number of episodes that are mixed at a time, on all ranks together.
        episodes: number of episodes in the data set.
        batches: number of batches per epoch, at least 1.
        num_workers: worker processes per rank.
        cores: number of cores that this process may run on; by default taken from the operating system.

    Example:
        >>> facts = dict(ranks=2, local_ranks=2, lanes=2, pool=8, episodes=20, batches=50, num_workers=1, cores=4)
        >>> shortages(global_batch_size=16, **facts)
        []
        >>> [sentence] = shortages(global_batch_size=15, **facts)
        >>> sentence.partition(":")[0]
        'a global batch of 15 samples is not a multiple of 2 ranks'
    """
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = []
    if global_batch_size % ranks:
        found.append(
            f"a global batch of {global_batch_size} samples is not a multiple of {ranks} ranks: in each step, some "
            f"ranks have one more sample, and the others wait for them. Choose a multiple of {ranks}."
        )
    if lanes % ranks:
        found.append(
            f"{lanes} lanes are not a multiple of {ranks} ranks: ranks share episodes, which are then fetched and "
            f"opened more than once. Use a number of ranks that divides {lanes}, or start a new run with another "
            "number of lanes."
        )
    if episodes < pool:
        per_lane = episodes // lanes
        lower_pool = f"Lower the pool to at most {per_lane} episodes per lane, {per_lane * lanes} in total."
        found.append(
            f"{episodes} episodes do not fill the pools of all ranks, {pool} in total: all episodes are open at once, "
            f"and each batch mixes fewer episodes than the pool. "
            f"{lower_pool if per_lane else f'Start a new run with at most {episodes} lanes.'}"
        )
    if num_workers > batches:
        found.append(
            f"{num_workers} workers per rank are more than the {batches} batches of an epoch: in each epoch some "
            f"workers only prefetch batches of later epochs. Use at most {batches}."
        )
    if num_workers * local_ranks > cores:
        found.append(
            f"{num_workers} workers x {local_ranks} ranks on a host are more than its {cores} cores: they slow down "
            f"each other and the ranks. Use at most {max(cores // local_ranks, 1)} per rank."
        )
    return found
