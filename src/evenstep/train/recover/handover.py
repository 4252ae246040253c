"""TrainingState from those who have it to those who need it, over a generation's group.

All tensors are laid end to end and cut into slices of a size. Sources take turns in sending them;
receivers pass each slice on from one to the next, beginning with another one each time, so that no
link carries more than the state once. A slice goes from memory to memory where it lies in one
piece; the others, of small tensors or on a GPU, go through a few buffers. Nobody holds more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.train.comm.group import Group
from evenstep.train.comm.transfer import Transfer
from evenstep.train.recover.flatten import Path, bytes_of, places, put_together
from evenstep.train.recover.state import TrainingState

T = TypeVar("T")

SLICE_BYTES = 8 << 20
IN_FLIGHT = 4  # slices at once, from each source and to each receiver
ALONE_BYTES = 1 << 20  # tensors of this size share no slice, so that they need no copying
ALIGNED = 16  # bytes at which tensors begin, so that no number is cut in two
MOST_HEADER_BYTES = 1 << 30
SIZE_TAG, HEADER_TAG, FIRST_TAG = 0, 1, 2


def hand_over(
    group: Group,
    sources: Sequence[int],
    receivers: Sequence[int],
    state: TrainingState,
    *,
    grads: bool = False,
) -> None:
    """Bring the receivers to the state of the sources, which all hold the same. All ranks call it.

    A receiver overwrites its own tensors where they fit. If it is interrupted it holds a mixture of
    two states, and `state.torn` says so until another handover succeeds. After any error the group
    is of no use. `grads`, on sources: gradients are part of the state.
    """
    if not receivers:
        return
    if not sources or set(sources) & set(receivers):
        raise InvalidInputError("sources", f"{sources} cannot hand over to {receivers}")
    links = Links(group, sources, receivers)
    try:
        if group.rank in sources:
            _give(links, state, grads)
        elif group.rank in receivers:
            _take(links, state)
    except BaseException:
        links.abandon()
        raise


class Spec(msgspec.Struct, frozen=True):
    """A tensor as it travels: its numbers in the order in which the sender has them in memory."""

    dtype: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]  # from the slowest to the fastest

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(dims))

    def make(self, device: str) -> torch.Tensor:
        """A tensor like it, with nothing in it."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or sorted(self.dims) != list(range(len(self.shape))):
            raise InvalidInputError("state", f"has a tensor that cannot be: {self!r}")
        laid = torch.empty([self.shape[d] for d in self.dims], dtype=dtype, device=device)
        return laid.permute([self.dims.index(d) for d in range(len(self.dims))])

    def alike(self, other: Spec) -> bool:
        """Whether one can hold the other, be it in another order."""
        return (self.dtype, self.shape) == (other.dtype, other.shape)

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


class HandoverHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the first source tells the others before anything else is sent."""

    plan: bytes
    specs: tuple[Spec, ...]


class Links:
    """Where slices go, and what is under way."""

    def __init__(self, group: Group, sources: Sequence[int], receivers: Sequence[int]) -> None:
        self.group, self.rank = group, group.rank
        self.sources, self.receivers = list(sources), list(receivers)
        self._under_way: list[Transfer] = []

    def way(self, number: int) -> list[int]:
        """The ranks that a slice goes through: a source, then all receivers."""
        turn = number % len(self.receivers)
        source = self.sources[number % len(self.sources)]
        return [source, *self.receivers[turn:], *self.receivers[:turn]]

    def send(self, data: torch.Tensor, rank: int, tag: int) -> Transfer:
        self._under_way.append(self.group.send(data, rank, tag))
        return self._under_way[-1]

    def recv(self, data: torch.Tensor, rank: int, tag: int) -> Transfer:
        self._under_way.append(self.group.recv(data, rank, tag))
        return self._under_way[-1]

    def wait(self, transfer: Transfer) -> None:
        self.group.wait(transfer)
        self._under_way.remove(transfer)

    def finish(self) -> None:
        """Wait for all that is under way."""
        while self._under_way:
            self.wait(self._under_way[0])

    def abandon(self) -> None:
        """Give up what is under way. Peers learn of it by their links; nothing is written later."""
        for transfer in self._under_way:
            transfer.abandon()

    def tell(self, header: HandoverHeader) -> None:
        """From the first source to all others who take part."""
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(header)), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        for rank in (*self.sources[1:], *self.receivers):
            self.send(size, rank, SIZE_TAG)
            self.send(data, rank, HEADER_TAG)
        self.finish()

    def hear(self) -> HandoverHeader:
        """What the first source tells."""
        size = torch.zeros(1, dtype=torch.int64)
        self.wait(self.recv(size, self.sources[0], SIZE_TAG))
        if not 0 < int(size) <= MOST_HEADER_BYTES:
            raise InvalidInputError("state", f"has a structure of {int(size)} bytes")
        data = torch.empty(int(size), dtype=torch.uint8)
        self.wait(self.recv(data, self.sources[0], HEADER_TAG))
        try:
            return msgspec.msgpack.decode(data.numpy().tobytes(), type=HandoverHeader)
        except msgspec.MsgspecError as e:
            raise InvalidInputError("state", f"has a structure that cannot be read: {e}") from None


def _give(links: Links, state: TrainingState, grads: bool) -> None:
    """A source's part."""
    plan, tensors = state.take_apart(grads=grads)
    header = HandoverHeader(plan=plan, specs=tuple(map(Spec.of, tensors)))
    if links.rank == links.sources[0]:
        links.tell(header)
    else:
        mine, header = header, links.hear()
        _check_alike(mine, header, links)
    slices = slices_of(tensors, header.specs)
    slots = _slots(slices)
    sends: deque[Transfer] = deque()
    for number, piece in enumerate(slices):
        source, receiver, *_ = links.way(number)
        if source != links.rank:
            continue
        if len(sends) == IN_FLIGHT:
            links.wait(sends.popleft())
        data = piece.room(slots[number // len(links.sources) % IN_FLIGHT])
        piece.write(data)
        sends.append(links.send(data, receiver, FIRST_TAG + number))
    links.finish()


def _take(links: Links, state: TrainingState) -> None:
    """A receiver's part."""
    header = links.hear()
    state.check(put_together(header.plan, [spec.make("meta") for spec in header.specs]))
    tensors = _landings(header, _named(*state.take_apart()))
    slices = slices_of(tensors, header.specs)
    slots = _slots(slices)
    coming: deque[tuple[torch.Tensor, Transfer]] = deque()

    def expect(number: int) -> None:
        way = links.way(number)
        data = slices[number].room(slots[number % IN_FLIGHT])
        before = way[way.index(links.rank) - 1]
        coming.append((data, links.recv(data, before, FIRST_TAG + number)))

    state.torn = True
    for number in range(min(IN_FLIGHT, len(slices))):
        expect(number)
    for number, piece in enumerate(slices):
        data, recv = coming.popleft()
        links.wait(recv)
        way = links.way(number)
        after = way[way.index(links.rank) + 1 :]
        passing = [links.send(data, rank, FIRST_TAG + number) for rank in after[:1]]
        piece.read(data)
        for send in passing:
            links.wait(send)
        if number + IN_FLIGHT < len(slices):
            expect(number + IN_FLIGHT)
    state.apply(put_together(header.plan, tensors))


def _check_alike(mine: HandoverHeader, first: HandoverHeader, links: Links) -> None:
    """Sources send parts of one state: refuse it if theirs are not one."""
    ours, theirs = _named(mine.plan, mine.specs), _named(first.plan, first.specs)
    for path in (*theirs, *ours):
        a, b = ours.get(path), theirs.get(path)
        if a is None or b is None or not a.alike(b):
            name = ".".join(map(str, path))
            raise EvenstepError(
                f"{name} is {a} on rank {links.rank}, {b} on rank {links.sources[0]}: "
                "those who trained together must hold the same state"
            )


def _named(plan: bytes, tensors: Sequence[T]) -> dict[Path, T]:
    return dict(zip(places(plan), tensors, strict=True))


def _landings(header: HandoverHeader, mine: dict[Path, torch.Tensor]) -> list[torch.Tensor]:
    """Where each tensor goes: a model's own, another of ours that is like it, or a fresh one."""
    taken: set[int] = set()
    found = []
    for path, spec in _named(header.plan, header.specs).items():
        tensor = mine.get(path)
        if tensor is None or not spec.alike(Spec.of(tensor)):
            tensor = spec.make("cpu")
        elif path[0] != "models":
            # A mean of parameters may begin as a view of them, and must not end there.
            dense = tensor.permute(Spec.of(tensor).dims).is_contiguous()
            if not dense or tensor.untyped_storage().data_ptr() in taken:
                tensor = spec.make("cpu")
        taken.add(tensor.untyped_storage().data_ptr())
        found.append(tensor)
    return found


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor, and its place in a slice."""

    tensor: torch.Tensor  # with its dimensions in the order in which it travels
    begin: int
    end: int
    at: int  # in bytes

    @property
    def after(self) -> int:
        return self.at + (self.end - self.begin) * self.tensor.element_size()

    def rooms(self, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the tensor, each with its part of a slice's bytes."""
        at = self.at
        for view in flat_views(self.tensor, self.begin, self.end):
            after = at + view.numel() * view.element_size()
            yield view, data[at:after].view(view.dtype).view(view.shape)
            at = after


class Slice:
    """What is sent at once: a part of one tensor, or of several."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    @property
    def size(self) -> int:
        return self.pieces[-1].after

    @property
    def in_memory(self) -> torch.Tensor | None:
        """Its bytes in their place, if they are in one."""
        piece, *others = self.pieces
        tensor = piece.tensor
        if others or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        size = tensor.element_size()
        return bytes_of(tensor)[piece.begin * size : piece.end * size]

    def room(self, slot: torch.Tensor) -> torch.Tensor:
        """Its bytes in their place, or a part of the slot for them."""
        here = self.in_memory
        return slot[: self.size] if here is None else here

    def write(self, data: torch.Tensor) -> None:
        """From the tensors into the room, unless they are the same."""
        if self.in_memory is None:
            for piece in self.pieces:
                for view, room in piece.rooms(data):
                    room.copy_(view)

    def read(self, data: torch.Tensor) -> None:
        """From the room into the tensors, unless they are the same."""
        if self.in_memory is None:
            for piece in self.pieces:
                for view, room in piece.rooms(data):
                    view.copy_(room)


def slices_of(tensors: Sequence[torch.Tensor], specs: Sequence[Spec]) -> list[Slice]:
    """All tensors end to end, in slices of one size: first the small ones, then the others."""
    slices: list[Slice] = []
    at = 0
    pairs = zip(tensors, specs, strict=True)
    for tensor, spec in sorted(pairs, key=lambda pair: pair[0].nbytes >= ALONE_BYTES):
        laid, size, begin = tensor.permute(spec.dims), tensor.element_size(), 0
        at += -at % (SLICE_BYTES if tensor.nbytes >= ALONE_BYTES else ALIGNED)
        while begin < laid.numel():
            number, within = divmod(at, SLICE_BYTES)
            end = min(laid.numel(), begin + (SLICE_BYTES - within) // size)
            if number == len(slices):
                slices.append(Slice())
            slices[number].pieces.append(Piece(laid, begin, end, within))
            at += (end - begin) * size
            begin = end
    return slices


def flat_views(tensor: torch.Tensor, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Views of a tensor that are its numbers from `begin` to `end`, as if it were flat."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[begin:end]
        return
    row = tensor[0].numel()
    first, last = -(-begin // row), end // row  # the whole rows
    if first > last:
        yield from flat_views(tensor[last], begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from flat_views(tensor[first - 1], begin - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if last * row < end:
        yield from flat_views(tensor[last], 0, end - last * row)


def _slots(slices: Sequence[Slice]) -> torch.Tensor:
    """Buffers for the slices in flight."""
    sizes = [s.size for s in slices if s.in_memory is None]
    return torch.zeros(IN_FLIGHT, max(sizes, default=0), dtype=torch.uint8)
