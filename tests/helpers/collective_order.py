"""Compare the collectives of all ranks of a job: would it also run on NCCL, whose hangs gloo does not have?

Input: what each rank has begun (`collective_record`). Output: a text for each mistake.

[Note: order of collectives] A job has two properties, whatever its values are:

1. In each process group, all ranks begin the same collectives, in the same order, with the same dtype, numbers of
   elements, root and reduction. What rank 0 sends to rank 1 in an all-to-all has the number of elements that rank 1
   receives from rank 0. Messages (send, recv) are paired by their ranks and tag, apart from the collectives.
2. There is one order of all collectives, of all groups, that the order of each rank is a part of. In other words, the
   job would also finish if each rank carried out one collective at a time, in the order in which it began them, and
   each of them took until all ranks of its group have come to it.

NCCL requires the second property because each process group has a communicator, whose kernel occupies a part of the
device until all of its ranks have come. If rank 0 begins A before B, and rank 1 begins B before A, the kernel of A may
run on rank 0 and that of B on rank 1, and neither leaves room for the other: whether the room suffices depends on the
sizes, the versions, the kernels of the model, and on whether both are on one stream. Nothing on a rank can make such
an order safe: if rank 0 waits for A before it begins B, then A has to begin on rank 1 while B is in flight there; and
if rank 1 waits for B, too, the job hangs. What does make it safe is that a rank waits for both before the next pair:
A, B, and later B, A are four collectives, in one order on all ranks.

The order is that of the whole process. Threads of a rank that begin collectives without an order between them differ
from rank to rank, so either of the properties fails. To make sure that it fails in a test, too, whose threads may be
lucky, collectives of other threads than the main one are late on every second rank (`collective_record`). Autograd's
threads are parts of the main one, which waits for them in `backward`.

Groups that are made with the backend gloo, and those of CPU tensors next to an accelerator, occupy no device, so only
the first property counts for them. After a collective has failed on a rank, nothing is compared any more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from helpers.collective_record import Call, Group, Record

_MOST = 5
"""How many mistakes are described."""


class _Instance(NamedTuple):
    """The collective that is the n-th of its group on each of its ranks."""

    group: Group
    number: int


def mistakes(records: Sequence[Record]) -> list[str]:
    """Return a text for each difference between the ranks, and for each order that could deadlock; by rank.

    Ranks of a group that are not in ``records`` are not waited for.
    """
    calls = [[each for each in record.calls if max(each.group.ranks) < len(records)] for record in records]
    sequences = _sequences(calls)
    compared = {group: _compared(group, records) for group in sequences}
    found = [text for group, of_ranks in sequences.items() if (text := _difference(group, of_ranks, compared[group]))]
    if all(record.failed_at is None for record in records):
        found += _unpaired_messages(calls)
    if not found:
        found += _opposite_orders(calls, compared)
    return found[:_MOST]


def _sequences(calls: list[list[Call]]) -> dict[Group, dict[int, list[Call]]]:
    """Return the collectives of each rank of each group that has any."""
    found: dict[Group, dict[int, list[Call]]] = {}
    for rank, of_rank in enumerate(calls):
        for call in of_rank:
            if not call.is_message:
                of_ranks = found.setdefault(call.group, {each: [] for each in call.group.ranks})
                if rank in of_ranks:
                    of_ranks[rank].append(call)
    return found


def _compared(group: Group, records: Sequence[Record]) -> int | None:
    """Return how many collectives of a group are compared: those before the first failure; None for all."""
    before = [
        sum(call.group == group and not call.is_message for call in records[rank].calls[: records[rank].failed_at])
        for rank in group.ranks
        if records[rank].failed_at is not None
    ]
    return min(before, default=None)


# --- the same collectives in each group -------------------------------------------------------------------------------


def _difference(group: Group, of_ranks: dict[int, list[Call]], compared: int | None) -> str | None:
    """Return a text for the first place at which the ranks of a group differ."""
    longest = max(map(len, of_ranks.values()))
    for place in range(longest if compared is None else min(compared, longest)):
        at_place = {rank: calls[place] if place < len(calls) else None for rank, calls in of_ranks.items()}
        present = [call for call in at_place.values() if call is not None]
        if len(present) < len(at_place) or len({(call.kind, call.agreed) for call in present}) > 1:
            return _described(group, place, at_place)
        if present[0].sent is not None and not _all_to_all_agrees(present):
            return _described(group, place, at_place)
    return None


def _all_to_all_agrees(calls: list[Call]) -> bool:
    return all(
        (a.sent or ())[to : to + 1] == (b.received or ())[source : source + 1]
        for source, a in enumerate(calls)
        for to, b in enumerate(calls)
    )


def _described(group: Group, place: int, at_place: dict[int, Call | None]) -> str:
    each = "".join(f"\n    rank {rank}: {call or 'no further collective'}" for rank, call in at_place.items())
    return f"the ranks of {group} begin different collectives; number {place + 1} of the group is{each}"


def _unpaired_messages(calls: list[list[Call]]) -> list[str]:
    """Return a text for each message that was sent or received without its other end, or with another size."""
    sent: dict[tuple[Group, int, int, int], list[Call]] = defaultdict(list)
    received: dict[tuple[Group, int, int, int], list[Call]] = defaultdict(list)
    for rank, of_rank in enumerate(calls):
        for call in of_rank:
            if call.peer is None:
                continue
            own, (other, tag) = call.group.ranks.index(rank), call.peer
            if call.kind == "send":
                sent[call.group, own, other, tag].append(call)
            else:
                received[call.group, other, own, tag].append(call)
    found = []
    for key in dict.fromkeys([*sent, *received]):
        group, source, to, tag = key
        sizes = [[call.agreed for call in messages] for messages in (sent[key], received[key])]
        if sizes[0] != sizes[1]:
            ends = f"from rank {group.ranks[source]} to rank {group.ranks[to]} with tag {tag}"
            places = " and ".join(str(messages[-1]) for messages in (sent[key], received[key]) if messages)
            found.append(f"{group}: {len(sizes[0])} messages {ends} are sent, {len(sizes[1])} received: {places}")
    return found


# --- one order of the collectives of all groups -----------------------------------------------------------------------


def _opposite_orders(calls: list[list[Call]], compared: dict[Group, int | None]) -> list[str]:
    """Carry out the collectives of each rank one at a time; describe ranks that then wait in a circle."""
    chains: list[list[tuple[_Instance, Call]]] = []
    for rank, of_rank in enumerate(calls):
        numbers: Counter[Group] = Counter()
        chains.append([])
        for call in of_rank:
            if call.is_message or call.group.on_host or rank not in call.group.ranks:
                continue
            number = numbers[call.group]
            numbers[call.group] += 1
            limit = compared[call.group]
            if limit is None or number < limit:
                chains[-1].append((_Instance(call.group, number), call))
    places = [0] * len(chains)
    arrived: Counter[_Instance] = Counter()
    ready = list(range(len(chains)))
    while ready:
        rank = ready.pop()
        if places[rank] == len(chains[rank]):
            continue
        instance, _ = chains[rank][places[rank]]
        arrived[instance] += 1
        if arrived[instance] == len(instance.group.ranks):
            for each in instance.group.ranks:
                places[each] += 1
                ready.append(each)
    waiting = {rank for rank, chain in enumerate(chains) if places[rank] < len(chain)}
    return [_circle(chains, places, waiting)] if waiting else []


def _circle(chains: list[list[tuple[_Instance, Call]]], places: list[int], waiting: set[int]) -> str:
    """Describe a circle of ranks, each of which waits in a collective that the next one begins after its own."""
    rank, seen = min(waiting), []
    while rank not in seen:
        seen.append(rank)
        instance, _ = chains[rank][places[rank]]
        rank = next(each for each in instance.group.ranks if chains[each][places[each]][0] != instance)
    seen = seen[seen.index(rank) :]
    lines = []
    for each, following in zip(seen, [*seen[1:], seen[0]], strict=True):
        # The next rank begins this collective after the one that it waits in.
        instance, call = chains[each][places[each]]
        (held, holding) = chains[following][places[following]]
        later = next(other for found, other in chains[following][places[following] :] if found == instance)
        lines.append(
            f"\n    rank {following}: {holding} of {held.group}\n      before {later} of {instance.group},"
            f"\n      which rank {each} begins first: {call}"
        )
    return (
        "the ranks begin collectives of several groups in orders that contradict each other, which may deadlock on an "
        "accelerator ([Note: order of collectives] in helpers/collective_order.py):" + "".join(lines)
    )
