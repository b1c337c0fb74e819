"""The replay of the caching allocator: its rules on small cases, its invariants on random ones."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.memory.allocator import MIB, CachingAllocator, replay


def test_small_requests_share_a_segment_of_two_mib() -> None:
    allocator = replay([(number, 1000) for number in range(10)])
    assert allocator.allocated == 10 * 1024
    assert allocator.reserved == 2 * MIB


def test_medium_requests_share_twenty_mib_and_large_ones_are_rounded_to_two() -> None:
    assert replay([(0, 3 * MIB), (1, 3 * MIB)]).reserved == 20 * MIB
    assert replay([(0, 11 * MIB)]).reserved == 12 * MIB


def test_a_freed_block_is_used_again_and_neighbours_join() -> None:
    events = [(0, 8 * MIB), (1, 8 * MIB), (0, -8 * MIB), (1, -8 * MIB), (2, 16 * MIB)]
    allocator = replay(events)
    assert allocator.reserved == 20 * MIB
    assert (allocator.allocated, allocator.peak_allocated) == (16 * MIB, 16 * MIB)


def test_what_is_left_of_a_large_block_stays_with_it_up_to_one_mib() -> None:
    allocator = replay([(0, 12 * MIB), (0, -12 * MIB), (1, 11 * MIB)])
    assert allocator.allocated == 12 * MIB  # 1 MiB too small to be split off
    assert replay([(0, 14 * MIB), (0, -14 * MIB), (1, 11 * MIB)]).allocated == 11 * MIB


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, 40 * MIB), st.integers(0, 30)), min_size=1, max_size=80),
)
def test_reserved_holds_allocated_and_all_is_joined_again_when_all_is_freed(
    steps: list[tuple[int, int]],
) -> None:
    allocator, alive = CachingAllocator(), []
    for number, (size, victim) in enumerate(steps):
        allocator.allocate(number, size)
        alive.append((number, size))
        assert allocator.allocated <= allocator.reserved == allocator.peak_reserved
        assert allocator.allocated >= sum(held for _, held in alive)
        if victim < len(alive):
            allocator.release(alive.pop(victim)[0])
    for number, _ in alive:
        allocator.release(number)
    assert allocator.allocated == 0
    free = [entry[2] for pool in allocator._free.values() for entry in pool]
    assert sum(block.size for block in free) == allocator.reserved
    assert all(block.before is block.after is None for block in free), "whole segments again"
