"""Places sentence pairs in blocks, so that attention on a CPU is a product of whole blocks.

Block b of the source row holds the source sentences of the pairs whose target sentences block b of the target row
holds. A block of width W has W tokens on both sides, and no sentence crosses its border.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NARROWEST = 64
"""Width of the narrowest blocks. Wider ones are twice as wide as the one before."""


class BlockLayout(NamedTuple):
    """Where each pair is."""

    source_starts: NDArray[np.int64]
    """[pairs] the first token of each source sentence in its row."""
    target_starts: NDArray[np.int64]
    """The same for targets."""
    blocks: list[tuple[int, int]]
    """Number and width of the blocks of each width, in the order in which they follow one another in the row."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a row."""
        return sum(count * width for count, width in self.blocks)


def place_in_blocks(source_lengths: NDArray[np.integer], target_lengths: NDArray[np.integer]) -> BlockLayout:
    """Place each pair, the longest first, in the fullest block that has room for it on both sides.

    Args:
        source_lengths: [pairs], each at least 1.
        target_lengths: [pairs], each at least 1.

    Returns:
        The layout; for no pairs it has one block.
    """
    if len(source_lengths) == 0:
        empty = np.empty(0, np.int64)
        return BlockLayout(empty, empty, [(1, NARROWEST)])
    longest = np.maximum(source_lengths, target_lengths).astype(np.int64)
    widths = NARROWEST << np.ceil(np.log2(np.maximum(longest / NARROWEST, 1.0))).astype(np.int64)
    source, target = source_lengths.tolist(), target_lengths.tolist()
    # Blocks by their free target tokens: the fullest block with room is found without looking at all blocks, because
    # there are at most as many lists as the widest block has tokens.
    by_room: list[list[int]] = [[] for _ in range(int(widths.max()) + 1)]
    source_room: list[int] = []
    block_widths: list[int] = []
    block_of, source_place, target_place = (np.empty(len(source), np.int64) for _ in range(3))
    # Longest first, as in best-fit decreasing: short pairs fill what long ones leave.
    for pair in np.argsort(-longest, kind="stable").tolist():
        source_length, target_length = source[pair], target[pair]
        block, room = _fullest(by_room, source_room, source_length, target_length)
        if block < 0:
            block, room = len(block_widths), int(widths[pair])
            block_widths.append(room)
            source_room.append(room)
        else:
            by_room[room].remove(block)
        block_of[pair] = block
        source_place[pair], target_place[pair] = block_widths[block] - source_room[block], block_widths[block] - room
        source_room[block] -= source_length
        by_room[room - target_length].append(block)
    # The narrowest blocks come first, so that all of one width are one rectangle of the row: attention is a single
    # product for each width.
    order = np.argsort(block_widths, kind="stable")
    sorted_widths = np.asarray(block_widths)[order]
    starts = np.empty(len(order), np.int64)
    starts[order] = np.cumsum(sorted_widths) - sorted_widths
    blocks = [
        (int(count), int(width)) for width, count in zip(*np.unique(sorted_widths, return_counts=True), strict=True)
    ]
    return BlockLayout(starts[block_of] + source_place, starts[block_of] + target_place, blocks)


def _fullest(by_room: list[list[int]], source_room: list[int], source: int, target: int) -> tuple[int, int]:
    """Return the block with the fewest free target tokens that has room on both sides, and its room; or -1 and 0."""
    for room in range(target, len(by_room)):
        for block in by_room[room]:
            if source_room[block] >= source:
                return block, room
    return -1, 0
