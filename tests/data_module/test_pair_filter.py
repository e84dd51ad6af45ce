import numpy as np

from data_module.pair_filter import SeenPairs, hash_pairs


def test_seen_pairs_equal_a_set() -> None:
    random_hashes = np.random.default_rng(1).integers(0, 3000, size=5000).astype(np.uint64)
    seen, reference, memory = [], [], set()
    pairs = SeenPairs()
    for chunk in np.split(random_hashes, [1, 1, 10, 500, 3000]):
        seen += pairs.add(chunk).tolist()
        for value in chunk.tolist():
            reference.append(value in memory)
            memory.add(value)
    assert seen == reference
    assert hash_pairs([("a", "b c")])[0] != hash_pairs([("a b", "c")])[0]
