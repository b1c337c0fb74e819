"""From allocated to reserved: a replay of what the CUDA caching allocator would do with the same requests.

The allocator takes memory from the device in segments and gives out blocks of them. What it has taken
(reserved) is what the device no longer has, and is more than what tensors hold (allocated): blocks are
multiples of 512 bytes, small ones come out of 2 MiB segments and medium ones out of 20 MiB segments, and
the rest of a split block can be too small for what comes next. The rules and constants are those of torch's
c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer,
kRoundLarge), without expandable segments and on one stream.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

MIB = 2**20
MIN_BLOCK = 512
SMALL = MIB  # up to this a request goes to the small pool
SMALL_SEGMENT = 2 * MIB
MEDIUM = 10 * MIB  # below this a large request gets a segment of MEDIUM_SEGMENT
MEDIUM_SEGMENT = 20 * MIB
ROUND_LARGE = 2 * MIB


@dataclass
class _Block:
    """A piece of a segment; `before` and `after` are its neighbours in that segment."""

    size: int
    small: bool
    number: int  # order of creation, which is the order of addresses among equals
    free: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None


class CachingAllocator:
    """Takes requests in their order; `reserved` and `allocated` are bytes, as are their peaks."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._blocks: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._count = 0

    def allocate(self, key: int, size: int) -> None:
        """Gives `size` bytes to the storage `key`."""
        size = max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)
        small = size <= SMALL
        block = self._taken_from_free(size, small) or self._new_segment(size, small)
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL:
            self._split(block, size)
        block.free = False
        self._blocks[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def release(self, key: int) -> None:
        """Takes back what `key` had, and joins it with free neighbours."""
        block = self._blocks.pop(key)
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._free[neighbour.small].remove((neighbour.size, neighbour.number, neighbour))
                self._join(block, neighbour)
        self._put_free(block)

    def _taken_from_free(self, size: int, small: bool) -> _Block | None:
        """The smallest free block that holds `size`."""
        pool = self._free[small]
        index = bisect_left(pool, size, key=lambda entry: entry[0])
        return pool.pop(index)[2] if index < len(pool) else None

    def _new_segment(self, size: int, small: bool) -> _Block:
        if small:
            segment = SMALL_SEGMENT
        elif size < MEDIUM:
            segment = MEDIUM_SEGMENT
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return self._block(segment, small)

    def _block(self, size: int, small: bool) -> _Block:
        self._count += 1
        return _Block(size, small, self._count)

    def _split(self, block: _Block, size: int) -> None:
        rest = self._block(block.size - size, block.small)
        rest.before, rest.after, block.size = block, block.after, size
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        self._put_free(rest)

    def _put_free(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.number, block), key=lambda entry: entry[:2])

    def _join(self, block: _Block, neighbour: _Block) -> None:
        block.size += neighbour.size
        if neighbour is block.before:
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block


def replay(events: Iterable[tuple[int, int]]) -> CachingAllocator:
    """The allocator after `events`: (storage, bytes) when it appears, (storage, -bytes) when it goes."""
    allocator = CachingAllocator()
    for key, size in events:
        if size > 0:
            allocator.allocate(key, size)
        else:
            allocator.release(key)
    return allocator
