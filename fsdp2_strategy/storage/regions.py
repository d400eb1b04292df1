"""Describe tensors without data: a tensor consists of boxes, and each box is a strided view of a source.

Input: sources, which are named tensors in a file or in a sharded model. Output: a `Region`, which code can stack,
concatenate, split and transpose like a tensor. A region records the source of each of its elements.

[Note: regions] transformers converts the tensors of a checkpoint into those of a model (it merges experts, splits fused
projections). Its code expects full tensors. If it runs on regions instead, no data moves, and the result is a list of
pieces: each is a box of the result that equals a strided view of one source. Operations that do more than rearrange
elements become a `Computed` source, which is evaluated on real tensors when its values are needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp2_strategy.distributed.torch_internals import storage_address
from fsdp2_strategy.model.boxes import Box, LocalShard, ShardBox, row_major


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a region, at ``start``, that equals a strided view of a source; strides and offset are in elements."""

    source: Any
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def span(self) -> int:
        """Number of elements in the source from the piece's first element to its last; 0 if the piece is empty."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) if all(self.shape) else 0

    @property
    def has_distinct_elements(self) -> bool:
        """Whether the strides show that no two elements of the piece are the same element of the source."""
        reached = 1
        for stride, n in sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if stride < reached:
                return False
            reached += (n - 1) * stride
        return True

    def positions(
        self, in_source: torch.Tensor, source_size: int, shape: Sequence[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return where elements of the source are in the region; the piece must have distinct elements.

        ``in_source`` are positions [n] in the flattened source. The first result are the indices [m] of those that are
        in the piece, None if the piece has all of them in the same order; the second their positions in the region.
        """
        if self.shape == tuple(shape) and self.strides == row_major(shape) and math.prod(shape) == source_size:
            return None, in_source
        rest = in_source - self.offset
        is_inside = rest >= 0
        to = row_major(shape)
        found = torch.full_like(rest, sum(s * t for s, t in zip(self.start, to, strict=True)))
        for dim in sorted(range(len(self.shape)), key=lambda d: -self.strides[d]):
            if self.shape[dim] > 1:
                index = rest // self.strides[dim]
                rest = rest - index * self.strides[dim]
                is_inside &= index < self.shape[dim]
                found += index * to[dim]
        selected = (is_inside & (rest == 0)).nonzero()[:, 0]
        return selected, found[selected]

    def narrow(self, dim: int, begin: int, length: int) -> Piece:
        """Return a slice of the piece: ``length`` indices of ``dim``, from ``begin`` within the piece."""
        start, shape = _with(self.start, dim, self.start[dim] + begin), _with(self.shape, dim, length)
        return Piece(self.source, start, shape, self.strides, self.offset + begin * self.strides[dim])

    def within(self, box: Box) -> Piece | None:
        """Return the intersection of the piece with a box of the region, in the box's coordinates; None if empty."""
        piece = self
        for dim, (begin, length) in enumerate(box):
            low = max(self.start[dim], begin)
            high = min(self.start[dim] + self.shape[dim], begin + length)
            if low >= high:
                return None
            if high - low < self.shape[dim]:
                piece = piece.narrow(dim, low - self.start[dim], high - low)
        start = tuple([s - b for s, (b, _) in zip(piece.start, box, strict=True)])
        return Piece(piece.source, start, piece.shape, piece.strides, piece.offset)

    def in_shard(self, shard: LocalShard) -> Iterator[Piece]:
        """Yield slices of the piece that together contain its elements in a shard of the source.

        Their strides and offsets are those in the shard's local tensor, which must be contiguous.
        """
        if all(self.shape):
            for box in shard.boxes:
                yield from self._in_box(shard, box)

    def is_aligned(self, full_shape: tuple[int, ...]) -> bool:
        """Return whether each dimension of the piece runs along another dimension of the source, within one index."""
        along = self._along(full_shape)
        return isinstance(along, dict) and all(len(dims) <= 1 for dims in along.values())

    def _along(self, full_shape: tuple[int, ...]) -> dict[int, list[tuple[int, int]]] | tuple[int, int]:
        """Return for each dimension of the source the dimensions of the piece that run along it, each after its step.

        If a dimension of the piece does not run along one of the source, return it, and how many of its indices do.
        """
        first, full_strides = _indices(self.offset, full_shape), row_major(full_shape)
        along: dict[int, list[tuple[int, int]]] = {dim: [] for dim in range(len(first))}
        for dim, (length, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            if length > 1 and stride:
                of_source = next(d for d, n in enumerate(full_shape) if n > 1 and full_strides[d] <= stride)
                step, rest = divmod(stride, full_strides[of_source])
                if rest:
                    return dim, 1
                along[of_source].append((step, dim))
        for of_source, dims in along.items():
            last = first[of_source] + sum(step * (self.shape[dim] - 1) for step, dim in dims)
            if dims and last >= full_shape[of_source]:  # it goes on in the next index of an outer dimension
                step, dim = max(dims)
                return dim, -(-(full_shape[of_source] - first[of_source]) // step) if len(dims) == 1 else 1
        return along

    def _in_box(self, shard: LocalShard, box: ShardBox) -> Iterator[Piece]:
        """Yield slices that contain the piece's elements in a box of a shard, in the shard's local tensor."""
        along = self._along(shard.full_shape)
        if isinstance(along, tuple):
            yield from self._apart(*along, shard, box)
            return
        first = _indices(self.offset, shard.full_shape)
        piece = self
        for of_source, dims in along.items():
            begin, length = box.full[of_source]
            low, high = begin - first[of_source], begin + length - first[of_source]
            if len(dims) == 1:
                [(step, dim)] = dims
                start, end = max(0, -(-low // step)), min(self.shape[dim], -(-high // step))
                if start >= end:
                    return
                piece = piece.narrow(dim, start, end - start)
            elif not dims or len(dims) > 1:
                last = sum(step * (self.shape[dim] - 1) for step, dim in dims)
                if low > last or high <= 0:
                    return
                if low > 0 or high <= last:  # only possible with several dimensions
                    yield from self._apart(max(dims)[1], 1, shard, box)
                    return
        local_strides = row_major(shard.shape)
        strides = [0] * len(self.shape)
        for of_source, dims in along.items():
            for step, dim in dims:
                strides[dim] = step * local_strides[of_source]
        starts = zip(_indices(piece.offset, shard.full_shape), box.full, box.local, local_strides, strict=True)
        offset = sum((index - full[0] + local[0]) * stride for index, full, local, stride in starts)
        yield replace(piece, strides=tuple(strides), offset=offset)

    def _apart(self, dim: int, length: int, shard: LocalShard, box: ShardBox) -> Iterator[Piece]:
        """Continue `_in_box` with slices of at most ``length`` indices of a dimension."""
        rest = self
        while rest.shape[dim] > length:
            yield from rest.narrow(dim, 0, length)._in_box(shard, box)
            rest = rest.narrow(dim, length, rest.shape[dim] - length)
            length = min(length, rest.shape[dim])
        yield from rest._in_box(shard, box)


def _indices(position: int, shape: Sequence[int]) -> list[int]:
    """Return the index in each dimension of a position in the flattened tensor."""
    found = []
    for stride in row_major(shape):
        found.append(position // stride)
        position %= stride
    return found


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A source whose values are a function of regions; see [Note: regions]."""

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def regions(self) -> list[Region]:
        """Return the regions among the arguments."""
        return [value for value in _leaves((self.args, self.kwargs)) if isinstance(value, Region)]

    def compute(self, tensor_of: Callable[[Region], torch.Tensor]) -> torch.Tensor:
        """Return the result as a contiguous tensor, computed from the values of its regions."""
        args, kwargs = _map(self.args, tensor_of), _map(dict(self.kwargs), tensor_of)
        return self.function(*args, **kwargs).clone(memory_format=torch.contiguous_format)


class Region:
    """A description of a tensor: its shape, dtype and pieces, without data; see [Note: regions]."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.pieces = tuple(pieces)
        self.device = torch.device("cpu")
        self.requires_grad = False

    @classmethod
    def of(cls, source: Any, shape: Sequence[int], dtype: torch.dtype) -> Region:
        """Return the region of a full source in row-major order."""
        shape = tuple(shape)
        return cls(shape, dtype, [Piece(source, (0,) * len(shape), shape, row_major(shape), 0)])

    @property
    def only_piece(self) -> Piece | None:
        """The piece that covers the full region; None if no single piece does."""
        is_one = len(self.pieces) == 1 and self.pieces[0].shape == tuple(self.shape)
        return self.pieces[0] if is_one else None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the length of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """Return whether the dtype is floating-point."""
        return self.dtype.is_floating_point

    def to(self, *args: Any, **kwargs: Any) -> Region:
        """Return the region with another dtype; ignore a device."""
        dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        return Region(self.shape, dtypes[0], self.pieces) if dtypes else self

    def __getitem__(self, index: Any) -> Region:
        if index is Ellipsis:
            return self
        return _run(torch.Tensor.__getitem__, (self, index), {})  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        """Return a method of `torch.Tensor` that runs on the description."""
        method = getattr(torch.Tensor, name, None)
        if name.startswith("_") or not callable(method):
            raise AttributeError(f"a Region has no {name!r}")
        return lambda *args, **kwargs: _run(method, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    def _narrow(self, dim: int, begin: int, length: int) -> Region:
        box = tuple((begin, length) if d == dim else (0, n) for d, n in enumerate(self.shape))
        pieces = [part for piece in self.pieces if (part := piece.within(box))]
        return Region(_with(tuple(self.shape), dim, length), self.dtype, pieces)

    def _reorder(self, dims: Sequence[int]) -> Region:
        """Permute the dimensions. ``dims`` may omit dimensions of length 1; None inserts a dimension of length 1."""

        def pick(values: Sequence[int], new: int) -> tuple[int, ...]:
            return tuple(new if d is None else values[d] for d in dims)

        pieces = [
            replace(p, start=pick(p.start, 0), shape=pick(p.shape, 1), strides=pick(p.strides, 0)) for p in self.pieces
        ]
        return Region(pick(self.shape, 1), self.dtype, pieces)


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)
    return lambda *args: _run(method, args, {})


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "neg"):
    setattr(Region, f"__{_name}__", _operator(f"__{_name}__"))


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on regions: rearrange pieces if possible, else return a region of a `Computed` source."""
    arrange = _ARRANGEMENTS.get(function.__name__)
    if arrange is not None:
        return arrange(*args, **kwargs)
    regions = Computed(function, args, kwargs).regions()
    inputs = {id(region): _meta_tensor(region) for region in regions}
    viewable = regions[0].only_piece if len(regions) == 1 else None
    message = f"cannot run {function.__name__} on a Region: it needs the values of a tensor, which a Region lacks"
    try:
        result = function(*_map(args, lambda r: inputs[id(r)]), **_map(kwargs, lambda r: inputs[id(r)]))
    except NotImplementedError as error:
        raise TypeError(message) from error
    outputs = list(_leaves(result))
    if not all(isinstance(output, torch.Tensor) for output in outputs):
        raise TypeError(message)
    results = []
    for i, output in enumerate(outputs):
        if viewable and storage_address(output) == storage_address(inputs[id(regions[0])]):
            shape, strides = tuple(output.shape), tuple(output.stride())
            piece = Piece(viewable.source, (0,) * len(shape), shape, strides, output.storage_offset())
            results.append(Region(shape, output.dtype, [piece]))
        else:
            pick = function if isinstance(result, torch.Tensor) else _output(function, i)
            results.append(Region.of(Computed(pick, args, kwargs), output.shape, output.dtype))
    return results[0] if isinstance(result, torch.Tensor) else tuple(results)


def _meta_tensor(region: Region) -> torch.Tensor:
    """Return a meta tensor of a region's shape; it has the strides and offset of the only piece, if there is one."""
    piece = region.only_piece
    if piece is None:
        return torch.empty(region.shape, dtype=region.dtype, device="meta")
    base = torch.empty(piece.offset + piece.span, dtype=region.dtype, device="meta")
    return base.as_strided(piece.shape, piece.strides, piece.offset)


def _output(function: Any, i: int) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: list(_leaves(function(*args, **kwargs)))[i]


def _cat(tensors: Sequence[Region], dim: int = 0, *, axis: int | None = None) -> Region:
    dim = (dim if axis is None else axis) % tensors[0].ndim
    shapes = [_with(tuple(t.shape), dim, 0) for t in tensors]
    if len(set(shapes)) > 1:
        raise ValueError(f"cannot concatenate along dimension {dim}: the shapes are {[list(t.shape) for t in tensors]}")
    pieces, at = [], 0
    for tensor in tensors:
        pieces += [replace(p, start=_with(p.start, dim, p.start[dim] + at)) for p in tensor.pieces]
        at += tensor.shape[dim]
    return Region(_with(tuple(tensors[0].shape), dim, at), tensors[0].dtype, pieces)


def _unsqueeze(tensor: Region, dim: int) -> Region:
    dims: list[Any] = list(range(tensor.ndim))
    dims.insert(dim % (tensor.ndim + 1), None)
    return tensor._reorder(dims)


def _squeeze(tensor: Region, dim: int | None = None) -> Region:
    dropped = range(tensor.ndim) if dim is None else [dim % tensor.ndim]
    return tensor._reorder([d for d in range(tensor.ndim) if d not in dropped or tensor.shape[d] != 1])


def _transpose(tensor: Region, dim0: int, dim1: int) -> Region:
    dims = list(range(tensor.ndim))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return tensor._reorder(dims)


def _split(tensor: Region, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Region, ...]:
    dim, sizes = dim % tensor.ndim, split_size_or_sections
    if isinstance(sizes, int):
        total, size = tensor.shape[dim], max(1, sizes)
        sizes = [min(size, total - at) for at in range(0, total, size)]
    ends = list(itertools.accumulate(sizes))
    if ends[-1:] != [tensor.shape[dim]]:
        raise ValueError(f"cannot split {list(tensor.shape)} along dimension {dim} into {list(sizes)}")
    return tuple(tensor._narrow(dim, end - size, size) for end, size in zip(ends, sizes, strict=True))


def _chunk(tensor: Region, chunks: int, dim: int = 0) -> tuple[Region, ...]:
    return _split(tensor, math.ceil(tensor.shape[dim] / chunks), dim)


def _unbind(tensor: Region, dim: int = 0) -> tuple[Region, ...]:
    return tuple(_squeeze(part, dim) for part in _split(tensor, 1, dim))


def _same(tensor: Region, *_args: Any, **_kwargs: Any) -> Region:
    return tensor


_ARRANGEMENTS: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "concat": _cat,
    "stack": lambda tensors, dim=0: _cat([_unsqueeze(t, dim) for t in tensors], dim),
    "chunk": _chunk,
    "split": _split,
    "unbind": _unbind,
    "narrow": lambda tensor, dim, start, length: tensor._narrow(dim % tensor.ndim, start, length),
    "select": lambda tensor, dim, index: _squeeze(tensor._narrow(dim % tensor.ndim, index, 1), dim),
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    "permute": lambda tensor, *dims: tensor._reorder(dims[0] if len(dims) == 1 else dims),
    "t": lambda tensor: _transpose(tensor, 0, 1) if tensor.ndim == 2 else tensor,
    "contiguous": _same,
    "clone": _same,
    "detach": _same,
}


def assemble(region: Region, tensor_of: Callable[[Any], torch.Tensor], box: Box | None = None) -> torch.Tensor:
    """Return a box of the region as a real tensor, built from full sources."""
    box = box or tuple((0, n) for n in region.shape)
    result: torch.Tensor | None = None
    for piece in region.pieces:
        part = piece.within(box)
        if part is None:
            continue
        source = value_of(part.source, tensor_of)
        if result is None:
            shape = [length for _, length in box]
            result = torch.empty(shape, dtype=region.dtype, device=source.device)
        view = source.as_strided(part.shape, part.strides, source.storage_offset() + part.offset)
        target_of(result, part).copy_(view.to(region.dtype))
    return torch.empty([length for _, length in box], dtype=region.dtype) if result is None else result


def value_of(source: Any, tensor_of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """Return the full tensor of a source; evaluate it if it is `Computed`."""
    if isinstance(source, Computed):
        return source.compute(lambda region: assemble(region, tensor_of))
    return tensor_of(source)


def target_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the view of a tensor that a piece fills."""
    for dim, (begin, length) in enumerate(zip(piece.start, piece.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def sources_of(region: Region) -> list[Any]:
    """Return the sources of a region; a `Computed` source is replaced by the sources of its arguments."""
    found: list[Any] = []
    for piece in region.pieces:
        if isinstance(piece.source, Computed):
            for inner in piece.source.regions():
                found += sources_of(inner)
        else:
            found.append(piece.source)
    return found


def _map(value: Any, change: Callable[[Region], Any]) -> Any:
    if isinstance(value, Region):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_map(v, change) for v in value)
    if isinstance(value, dict):
        return {k: _map(v, change) for k, v in value.items()}
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | dict):
        for v in value.values() if isinstance(value, dict) else value:
            yield from _leaves(v)
    else:
        yield value
