"""The data order: how long until the first batch after a resume, what an order costs, what a loader adds to a batch.

    python benchmarks/data.py [--rounds 7] [--out runs/benchmarks]

Resuming: a loader goes on after so many samples, each contestant in its own way; ours computes the place, torchdata's
StatefulDataLoader runs through a plain iterable again, Hugging Face's IterableDataset skips examples (from memory, in
pieces). Orders: ids a second and memory, beside a permutation in memory. Overhead: an epoch of tiny samples through our
loader and through a plain DataLoader, in turns. One process, no ranks. Writes data.json, prints tables.
"""

import argparse
import json
import logging
import statistics
import time
import tracemalloc
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import OUT, circumstances, in_turns, merge, ratio
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fsdp2_strategy.data import EpisodeOrder, GlobalOrder, ResumableLoader

BATCH = 32
BILLIONS = 2 * 10**9


class Numbers(Dataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(i)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(i) for i in range(BILLIONS))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ours(consumed: int) -> Callable[[], object]:
    loader = ResumableLoader(Numbers(BILLIONS), BATCH)
    state = loader.state_dict() | {"batches": consumed // BATCH, "samples": consumed}

    def resume() -> None:
        fresh = ResumableLoader(Numbers(BILLIONS), BATCH)
        fresh.load_state_dict(state)
        next(iter(fresh))

    return resume


def torchdata(consumed: int) -> Callable[[], object]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Stream(), BATCH)
    for _, _ in zip(range(consumed // BATCH), loader, strict=False):
        pass
    state = loader.state_dict()

    def resume() -> None:
        fresh = StatefulDataLoader(Stream(), BATCH)
        fresh.load_state_dict(state)
        next(iter(fresh))

    return resume


def hugging_face(consumed: int) -> Callable[[], object]:
    import datasets

    def make() -> datasets.IterableDataset:
        pieces = [range(i, i + 10**5) for i in range(0, 2 * 10**6, 10**5)]
        examples = datasets.IterableDataset.from_generator(
            lambda pieces: ({"i": i} for piece in pieces for i in piece), gen_kwargs={"pieces": pieces}
        )
        return examples.shuffle(seed=0, buffer_size=1000).batch(BATCH)

    stream = make()
    for _, _ in zip(range(consumed // BATCH), stream, strict=False):
        pass
    state = stream.state_dict()

    def resume() -> None:
        fresh = make()
        fresh.load_state_dict(state)
        next(iter(fresh))

    return resume


def resuming(rounds: int) -> dict:
    """Measure the time to the first batch, by what was consumed; a contestant that replays does not get the billion."""
    rows: dict[str, dict[str, list[float]]] = {}
    for consumed in (10**3, 10**6, 10**9):
        contestants = {"ours": ours} | ({"torchdata": torchdata, "datasets": hugging_face} if consumed < 10**9 else {})
        calls = {name: make(consumed) for name, make in contestants.items()}
        for call in calls.values():
            call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for name in in_turns(list(calls), rounds):
            times[name].append(seconds(calls[name]))
        rows[str(consumed)] = times
        for name, values in times.items():
            print(f"first batch after {consumed:>13,d} samples, {name:9s}: {statistics.median(values) * 1e3:10.2f} ms")
    return rows


def in_slices(order: GlobalOrder | EpisodeOrder) -> None:
    for at in range(10**7, 10**7 + 2**20, 4096):
        order.indices(at, at + 4096)


def orders(rounds: int) -> dict:
    """Measure ids a second in slices of 4,096, memory, and a permutation of 10^7 in memory beside them."""
    lengths = np.full(10**5, 300)
    made = {
        "GlobalOrder(10^9)": lambda: GlobalOrder(10**9, 0, 0),
        "GlobalOrder(10^12)": lambda: GlobalOrder(10**12, 0, 0),
        "EpisodeOrder(10^5 x 300, pool 64)": lambda: EpisodeOrder(lengths, 0, 0, 64),
        "EpisodeOrder(10^5 x 300, pool 64, 8 lanes)": lambda: EpisodeOrder(lengths, 0, 0, 64, lanes=8, batch=4096),
    }
    rows = {}
    for name, make in made.items():
        tracemalloc.start()
        order = make()
        order.indices(10**7, 10**7 + 4096)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        times = [seconds(partial(in_slices, order)) for _ in range(rounds)]
        rows[name] = {"ids_per_second": 2**20 / statistics.median(times), "peak_bytes": peak_bytes}
    times = [seconds(lambda: torch.randperm(10**7)) for _ in range(rounds)]
    rows["torch.randperm(10^7)"] = {"ids_per_second": 1e7 / statistics.median(times), "peak_bytes": 8 * 10**7}
    for name, row in rows.items():
        print(f"{name:45s}: {row['ids_per_second'] / 1e6:6.1f} M ids/s, {row['peak_bytes'] / 1e6:8.1f} MB")
    return rows


def overhead(rounds: int) -> dict:
    """Measure an epoch of tiny samples through ours and through a plain DataLoader, in turns."""
    rows = {}
    for batch, workers, n in ((32, 0, 20_000), (256, 0, 20_000), (32, 2, 60_000)):
        dataset = Numbers(n)
        loaders = {
            "ours": ResumableLoader(dataset, batch, num_workers=workers),
            "plain": DataLoader(dataset, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0),
        }
        times: dict[str, list[float]] = {name: [] for name in loaders}
        for name in [*loaders, *in_turns(list(loaders), rounds)]:
            times[name].append(seconds(partial(deque, loaders[name], maxlen=0)))
        times = {name: values[1:] for name, values in times.items()}
        batches = n / batch
        added = [(a - b) / batches for a, b in zip(times["ours"], times["plain"], strict=True)]
        rows[f"batch {batch}, {workers} workers"] = {
            "seconds": times,
            "added_seconds_per_batch": statistics.median(added),
            "ratio": ratio(times["ours"], times["plain"]),
        }
        loaders["ours"].close()
        print(
            f"batch {batch:3d}, {workers} workers: {statistics.median(times['plain']) / batches * 1e6:7.0f} us a batch "
            f"plain, {statistics.median(added) * 1e6:+7.0f} us ours"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torchdata's, of torch
    logging.disable()  # the contestants', of what they replay
    entry = {
        **circumstances(),
        "resuming": resuming(args.rounds),
        "orders": orders(args.rounds),
        "overhead": overhead(args.rounds),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    merge(args.out / "data.json", json.loads(json.dumps(entry)), ("hardware",))


if __name__ == "__main__":
    main()
