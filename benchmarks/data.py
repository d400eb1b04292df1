"""Measure the data order: the time to the first batch after a resume, the cost of an order, the overhead of a loader.

    python benchmarks/data.py [--rounds 7] [--out DIR] [--smoke]

Resuming: a loader resumes after a number of samples, each contestant in its own way: ours computes the position,
torchdata's StatefulDataLoader iterates over a plain iterable again, Hugging Face's IterableDataset skips shards and
examples in memory. Orders: ids per second and memory, compared with a permutation in memory. Overhead: an epoch of tiny
samples through our loader and through a plain DataLoader, in turns. One process, no ranks. The first batch after a
resume (if predictable), the ids of an order and the samples of an epoch are checked, outside of the timed part.
Writes data.json, prints tables. `--smoke` runs everything in seconds, with fewer samples.
"""

import json
import logging
import statistics
import time
import tracemalloc
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import harness
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fsdp2_strategy.data import EpisodeOrder, GlobalOrder, ResumableLoader

BATCH = 32
STREAM_LENGTH = 2 * 10**9


class Numbers(Dataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(i)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(i) for i in range(STREAM_LENGTH))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


Resume = Callable[[], torch.Tensor]
"""A function that resumes a new loader and returns its first batch."""


def ours(batches: int) -> tuple[Resume, torch.Tensor]:
    consumed = batches * BATCH
    loader = ResumableLoader(Numbers(STREAM_LENGTH), BATCH)
    state = loader.state_dict() | {"batches": batches, "samples": consumed}

    def resume() -> torch.Tensor:
        fresh = ResumableLoader(Numbers(STREAM_LENGTH), BATCH)
        fresh.load_state_dict(state)
        return next(iter(fresh))

    order = GlobalOrder(STREAM_LENGTH, loader.seed, 0)
    return resume, torch.as_tensor(order.indices(consumed, consumed + BATCH))


def torchdata(batches: int) -> tuple[Resume, torch.Tensor]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    iterator = iter(loader := StatefulDataLoader(Stream(), BATCH))
    for _ in range(batches):
        next(iterator)
    state = loader.state_dict()

    def resume() -> torch.Tensor:
        fresh = StatefulDataLoader(Stream(), BATCH)
        fresh.load_state_dict(state)
        return next(iter(fresh))

    return resume, torch.arange(batches * BATCH, (batches + 1) * BATCH)


def hugging_face(batches: int) -> tuple[Resume, None]:
    """Resume a stream with a shuffle buffer; its samples cannot be predicted, because the buffer starts empty."""
    import datasets

    def make() -> datasets.IterableDataset:
        shards = [range(i, i + 10**5) for i in range(0, 2 * 10**6, 10**5)]
        examples = datasets.IterableDataset.from_generator(
            lambda shards: ({"i": i} for shard in shards for i in shard), gen_kwargs={"shards": shards}
        )
        return examples.shuffle(seed=0, buffer_size=1000).batch(BATCH)

    iterator = iter(stream := make())
    for _ in range(batches):
        next(iterator)
    state = stream.state_dict()

    def resume() -> torch.Tensor:
        fresh = make()
        fresh.load_state_dict(state)
        return torch.tensor(next(iter(fresh))["i"])

    return resume, None


def resuming(rounds: int, samples: Sequence[int]) -> dict:
    """Measure the time to the first batch after each number of samples; only ours runs after 10^9 samples."""
    rows: dict[str, dict] = {}
    for consumed in samples:
        contestants = {"ours": ours} | ({"torchdata": torchdata, "datasets": hugging_face} if consumed < 10**9 else {})
        calls: dict[str, Resume] = {}
        missing: dict[str, dict[str, str]] = {}
        for name, make in contestants.items():
            try:
                calls[name], expected = make(consumed // BATCH)
            except ModuleNotFoundError as error:
                missing[name] = {"error": f"not installed: {error.name}"}
                print(f"{name}: {missing[name]['error']}")
                continue
            batch = calls[name]()
            if batch.shape != (BATCH,) or (expected is not None and not torch.equal(batch, expected)):
                raise harness.ValuesError(f"{name} resumes with {batch.tolist()}, expected {expected}")
        times: dict[str, list[float]] = {name: [] for name in calls}
        for name in harness.turn_order(list(calls), rounds):
            times[name].append(seconds(calls[name]))
        rows[str(consumed)] = {**times, **missing}
        for name, values in times.items():
            print(f"first batch after {consumed:>13,d} samples, {name:9s}: {statistics.median(values) * 1e3:10.2f} ms")
    return rows


def in_slices(order: GlobalOrder | EpisodeOrder, count: int) -> list[np.ndarray]:
    return [order.indices(begin, begin + 4096) for begin in range(10**7, 10**7 + count, 4096)]


def orders(rounds: int, count: int) -> dict:
    """Measure ids per second in slices of 4,096, and memory; compare with a permutation of 10^7 in memory."""
    lengths = np.full(10**5, 300)
    made = {
        "GlobalOrder(10^9)": (10**9, lambda: GlobalOrder(10**9, 0, 0)),
        "GlobalOrder(10^12)": (10**12, lambda: GlobalOrder(10**12, 0, 0)),
        "EpisodeOrder(10^5 x 300, pool 64)": (3 * 10**7, lambda: EpisodeOrder(lengths, 0, 0, 64)),
        "EpisodeOrder(10^5 x 300, pool 64, 8 lanes)": (
            3 * 10**7,
            lambda: EpisodeOrder(lengths, 0, 0, 64, lanes=8, batch=4096),
        ),
    }
    rows = {}
    for name, (samples, make) in made.items():
        tracemalloc.start()
        order = make()
        order.indices(10**7, 10**7 + 4096)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        ids = np.concatenate(in_slices(order, count))
        if len(np.unique(ids)) != count or ids.min() < 0 or ids.max() >= samples:
            raise harness.ValuesError(f"{name} returns a sample twice, or one that does not exist")
        times = [seconds(partial(in_slices, order, count)) for _ in range(rounds)]
        rows[name] = {"ids_per_second": count / statistics.median(times), "peak_bytes": peak_bytes}
    times = [seconds(lambda: torch.randperm(10**7)) for _ in range(rounds)]
    rows["torch.randperm(10^7)"] = {"ids_per_second": 1e7 / statistics.median(times), "peak_bytes": 8 * 10**7}
    for name, row in rows.items():
        print(f"{name:45s}: {row['ids_per_second'] / 1e6:6.1f} M ids/s, {row['peak_bytes'] / 1e6:8.1f} MB")
    return rows


def overhead(rounds: int, *, smoke: bool) -> dict:
    """Measure an epoch of tiny samples through our loader and through a plain DataLoader, in turns."""
    rows = {}
    for batch, workers, samples in ((32, 0, 20_480), (256, 0, 20_480), (32, 2, 61_440)):
        n = 1024 if smoke else samples
        dataset = Numbers(n)
        loaders = {
            "ours": ResumableLoader(dataset, batch, num_workers=workers),
            "plain": DataLoader(dataset, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0),
        }
        times: dict[str, list[float]] = {name: [] for name in loaders}
        for name, loader in loaders.items():
            if not torch.equal(torch.cat(list(loader)).sort().values, torch.arange(n)):
                raise harness.ValuesError(f"an epoch of the {name} loader does not have each sample once")
        for name in harness.turn_order(list(loaders), rounds):
            times[name].append(seconds(partial(deque, loaders[name], maxlen=0)))
        batches = n / batch
        added = [(a - b) / batches for a, b in zip(times["ours"], times["plain"], strict=True)]
        rows[f"batch {batch}, {workers} workers"] = {
            "seconds": times,
            "added_seconds_per_batch": statistics.median(added),
            "ratio": harness.ratio(times["ours"], times["plain"]),
        }
        loaders["ours"].close()
        print(
            f"batch {batch:3d}, {workers} workers: {statistics.median(times['plain']) / batches * 1e6:7.0f} us per "
            f"batch plain, {statistics.median(added) * 1e6:+7.0f} us ours"
        )
    return rows


def main() -> None:
    args = harness.parse(harness.parser_of(__doc__), smoke={})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torchdata's warnings about torch
    logging.disable()  # the contestants' messages about skipped samples
    entry = {
        **harness.environment(smoke=args.smoke),
        "resuming": resuming(args.rounds, (100, 1000, 10**9) if args.smoke else (10**3, 10**6, 10**9)),
        "orders": orders(args.rounds, 2**14 if args.smoke else 2**20),
        "overhead": overhead(args.rounds, smoke=args.smoke),
    }
    harness.merge(args.out / "data.json", json.loads(json.dumps(entry)), ("hardware",))


if __name__ == "__main__":
    main()
