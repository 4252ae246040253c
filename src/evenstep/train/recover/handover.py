"""Send the training state from workers that have it to workers that need it, over a group.

Sources take turns in sending slices, and the receivers pass each slice on in a chain. The chain
begins with another receiver each time, so no link carries more than the state once. Only a few
slices are in flight, so nobody needs memory for more than those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import torch

from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.train.comm.group import Group
from evenstep.train.comm.transfer import Transfer
from evenstep.train.recover.flatten import KeyPath, tensor_paths, unflatten
from evenstep.train.recover.slices import TensorSpec, cut_into_slices, staging_buffers
from evenstep.train.recover.state import TrainingState

T = TypeVar("T")

IN_FLIGHT = 4  # slices at once, from each source and to each receiver
MAX_HEADER_BYTES = 1 << 30
SIZE_TAG, HEADER_TAG, FIRST_TAG = 0, 1, 2


def hand_over(
    group: Group,
    sources: Sequence[int],
    receivers: Sequence[int],
    state: TrainingState,
    *,
    grads: bool = False,
) -> None:
    """Bring the receivers to the state of the sources, which is the same on all of them.

    All ranks call it. Receivers overwrite their own tensors where they fit; one that is interrupted
    has a mixture of two states, and `state.torn` is set until another handover succeeds. After any
    error the group is unusable. With `grads`, on sources, gradients are part of the state.
    """
    if not receivers:
        return
    if not sources or set(sources) & set(receivers):
        raise InvalidInputError("sources", f"{sources} cannot hand over to {receivers}")
    relay = Relay(group, sources, receivers)
    try:
        if group.rank in sources:
            _send_state(relay, state, grads)
        elif group.rank in receivers:
            _receive_state(relay, state)
    except BaseException:
        relay.abandon()
        raise


class HandoverHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first message, from the first source to all other sources and receivers."""

    structure: bytes = msgspec.field(name="plan")
    specs: tuple[TensorSpec, ...]


class Relay:
    """The route of each slice through the ranks, and the transfers in flight on this one."""

    def __init__(self, group: Group, sources: Sequence[int], receivers: Sequence[int]) -> None:
        self.group, self.rank = group, group.rank
        self.sources, self.receivers = list(sources), list(receivers)
        self._in_flight: list[Transfer] = []

    def route(self, number: int) -> list[int]:
        """The ranks that a slice goes through: a source, then all receivers."""
        first = number % len(self.receivers)
        source = self.sources[number % len(self.sources)]
        return [source, *self.receivers[first:], *self.receivers[:first]]

    def send(self, data: torch.Tensor, rank: int, tag: int) -> Transfer:
        self._in_flight.append(self.group.send(data, rank, tag))
        return self._in_flight[-1]

    def recv(self, data: torch.Tensor, rank: int, tag: int) -> Transfer:
        self._in_flight.append(self.group.recv(data, rank, tag))
        return self._in_flight[-1]

    def wait(self, transfer: Transfer) -> None:
        self.group.wait(transfer)
        self._in_flight.remove(transfer)

    def wait_all(self) -> None:
        """Wait for all transfers in flight."""
        while self._in_flight:
            self.wait(self._in_flight[0])

    def abandon(self) -> None:
        """Give up the transfers in flight: other ranks get an error, and nothing writes later."""
        for transfer in self._in_flight:
            transfer.abandon()

    def send_header(self, header: HandoverHeader) -> None:
        """On the first source: send the header to all other sources and receivers."""
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(header)), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        for rank in (*self.sources[1:], *self.receivers):
            self.send(size, rank, SIZE_TAG)
            self.send(data, rank, HEADER_TAG)
        self.wait_all()

    def recv_header(self) -> HandoverHeader:
        """Receive the header from the first source."""
        size = torch.zeros(1, dtype=torch.int64)
        self.wait(self.recv(size, self.sources[0], SIZE_TAG))
        if not 0 < int(size) <= MAX_HEADER_BYTES:
            raise InvalidInputError("state", f"has a header of {int(size)} bytes")
        data = torch.empty(int(size), dtype=torch.uint8)
        self.wait(self.recv(data, self.sources[0], HEADER_TAG))
        try:
            return msgspec.msgpack.decode(data.numpy().tobytes(), type=HandoverHeader)
        except msgspec.MsgspecError as e:
            raise InvalidInputError("state", f"has a header that cannot be decoded: {e}") from None


def _send_state(relay: Relay, state: TrainingState, grads: bool) -> None:
    structure, tensors = state.flatten(grads=grads)
    header = HandoverHeader(structure=structure, specs=tuple(map(TensorSpec.of, tensors)))
    if relay.rank == relay.sources[0]:
        relay.send_header(header)
    else:
        own, header = header, relay.recv_header()
        _check_same_state(own, header, relay)
    slices = cut_into_slices(tensors, header.specs)
    staging = staging_buffers(slices, IN_FLIGHT)
    sends: deque[Transfer] = deque()
    for number, part in enumerate(slices):
        source, receiver, *_ = relay.route(number)
        if source != relay.rank:
            continue
        if len(sends) == IN_FLIGHT:
            relay.wait(sends.popleft())
        data = part.data(staging[number // len(relay.sources) % IN_FLIGHT])
        part.pack(data)
        sends.append(relay.send(data, receiver, FIRST_TAG + number))
    relay.wait_all()


def _receive_state(relay: Relay, state: TrainingState) -> None:
    header = relay.recv_header()
    state.check(unflatten(header.structure, [spec.empty("meta") for spec in header.specs]))
    tensors = _destinations(header, _by_path(*state.flatten()))
    slices = cut_into_slices(tensors, header.specs)
    staging = staging_buffers(slices, IN_FLIGHT)
    incoming: deque[tuple[torch.Tensor, Transfer]] = deque()

    def start_receiving(number: int) -> None:
        route = relay.route(number)
        data = slices[number].data(staging[number % IN_FLIGHT])
        previous = route[route.index(relay.rank) - 1]
        incoming.append((data, relay.recv(data, previous, FIRST_TAG + number)))

    state.torn = True
    for number in range(min(IN_FLIGHT, len(slices))):
        start_receiving(number)
    for number, part in enumerate(slices):
        data, recv = incoming.popleft()
        relay.wait(recv)
        route = relay.route(number)
        following = route[route.index(relay.rank) + 1 :]
        sends = [relay.send(data, rank, FIRST_TAG + number) for rank in following[:1]]
        part.unpack(data)
        for send in sends:
            relay.wait(send)
        if number + IN_FLIGHT < len(slices):
            start_receiving(number + IN_FLIGHT)
    state.apply(unflatten(header.structure, tensors))


def _check_same_state(own: HandoverHeader, first: HandoverHeader, relay: Relay) -> None:
    """Raise if this source's state has other tensors than the first source's."""
    ours, theirs = _by_path(own.structure, own.specs), _by_path(first.structure, first.specs)
    for path in (*theirs, *ours):
        a, b = ours.get(path), theirs.get(path)
        if a is None or b is None or not a.matches(b):
            name = ".".join(map(str, path))
            raise EvenstepError(
                f"{name} is {a} on rank {relay.rank}, {b} on rank {relay.sources[0]}: "
                "workers that trained together must have the same state"
            )


def _by_path(structure: bytes, tensors: Sequence[T]) -> dict[KeyPath, T]:
    return dict(zip(tensor_paths(structure), tensors, strict=True))


def _destinations(header: HandoverHeader, own: dict[KeyPath, torch.Tensor]) -> list[torch.Tensor]:
    """Where to receive each tensor: into this worker's own if it fits, else into a new one."""
    used: set[int] = set()
    destinations = []
    for path, spec in _by_path(header.structure, header.specs).items():
        tensor = own.get(path)
        if tensor is None or not spec.matches(TensorSpec.of(tensor)):
            tensor = spec.empty("cpu")
        elif path[0] != "models":
            # An average of parameters may begin as a view of them; receiving into it would
            # overwrite the parameters.
            dense = tensor.permute(TensorSpec.of(tensor).dims).is_contiguous()
            if not dense or tensor.untyped_storage().data_ptr() in used:
                tensor = spec.empty("cpu")
        used.add(tensor.untyped_storage().data_ptr())
        destinations.append(tensor)
    return destinations
