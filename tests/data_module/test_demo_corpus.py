"""The text of the demo does not change."""

import os
from hashlib import sha256
from pathlib import Path

import pytest

from data_module.demo import corpus as demo_corpus

SHA256 = "c540e17d92fdd036363c9c071ede9d9506f5061534d8ad0ba29debec620671d8"
"""Of all files, one after another: figures of the demo are compared between versions."""


def test_the_text_is_the_same_in_all_versions_and_files_are_not_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever hashes this process has, which Python draws at random."""
    corpus = demo_corpus.demo_corpus()
    monkeypatch.setattr(demo_corpus, "demo_corpus", lambda seed: corpus)
    demo_corpus.write_demo_corpus(tmp_path)
    (tmp_path / "test.de").write_text("spoilt\n")
    os.utime(tmp_path / "train.en", ns=(1, 1))
    demo_corpus.write_demo_corpus(tmp_path)
    names = [f"{split}.{side}" for split in demo_corpus.SPLIT_SIZES for side in ("en", "de")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert sha256(b"".join((tmp_path / name).read_bytes() for name in names)).hexdigest() == SHA256
    assert (tmp_path / "train.en").stat().st_mtime_ns == 1
