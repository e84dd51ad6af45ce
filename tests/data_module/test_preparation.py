import fcntl
import gc
import gzip
import json
import logging
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from data_module.corpus import preparation
from data_module.corpus.builder import learn_tokenizer
from data_module.corpus.checks import check_text
from data_module.corpus.preparation import existing_corpus, in_use
from data_module.corpus.store import open_corpus, training_pairs
from data_module.errors import InputError
from data_module.settings import CorpusSettings, NoiseSettings, TextSource
from tests.conftest import another_user
from tests.data_module.conftest import contents, dropped, made, pairs_of_text, start_preparing, text_of, write_pairs


def test_the_corpus_contains_the_text_in_order(settings: CorpusSettings) -> None:
    manifest = made(settings)
    assert text_of(settings) == pairs_of_text(400, 1)
    assert text_of(settings, "validation") == pairs_of_text(20, 2)
    corpus = open_corpus(Path(settings.folder), "train")
    assert manifest["train"]["pairs_kept"] == manifest["train"]["pairs_read"] == 400
    assert manifest["train"]["source_tokens"] == int(corpus.source.lengths.sum()) == len(corpus.source.tokens)
    assert manifest["train"]["longest_target"] == corpus.target.lengths.max()
    assert manifest["tokenizer"]["vocabulary_size"] == 60
    assert json.loads((Path(settings.folder) / "manifest.json").read_text()) == manifest
    assert gc.isenabled()


def test_validation_text_has_one_line_per_pair(settings: CorpusSettings, tmp_path: Path) -> None:
    pairs = [("a\u2028b  c ", "x\ry"), ("", "dropped"), ("d", "z")]
    made(replace(settings, validation=[write_pairs(tmp_path, "odd", pairs)]))
    folder = Path(settings.folder)
    assert (folder / "validation.source.txt").read_bytes() == b"a b c\nd\n"
    assert (folder / "validation.target.txt").read_bytes() == b"x y\nz\n"


def test_preparing_again_does_nothing(settings: CorpusSettings, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(settings.folder)
    folder.mkdir()  # An empty folder is used.
    manifest = made(settings)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with caplog.at_level(logging.INFO):
        assert made(settings) == manifest
    assert "up to date" in caplog.text
    # As if it had been killed between the renames of --force.
    folder.rename(folder.with_name(".corpus.replaced"))
    assert made(settings) == manifest
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert not folder.with_name(".corpus.replaced").exists()


def test_a_change_is_named_and_force_rebuilds(settings: CorpusSettings, tmp_path: Path) -> None:
    manifest, before = made(settings), contents(settings.folder)
    write_pairs(tmp_path, "train", pairs_of_text(401, 1))
    # Text is read only if asked for.
    assert existing_corpus(settings, compare_texts=False) == manifest
    assert existing_corpus(replace(settings, folder="elsewhere"), compare_texts=True) is None
    changed = replace(settings, max_tokens=200, vocabulary_size=50)
    with pytest.raises(InputError) as caught:
        made(changed)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "vocabulary_size was 60, now 50",
        "max_tokens was 256, now 200",
        f"; {tmp_path}/train.en has changed; ",
        "rebuild this one for a new run with `prepare --force`",
    ):
        assert part in message
    assert contents(settings.folder) == before
    assert made(changed, force=True)["train"]["pairs_kept"] == 401
    assert made(changed)["settings"]["max_tokens"] == 200


def test_sources_are_concatenated_gz_tsv_and_repeat(settings: CorpusSettings, tmp_path: Path) -> None:
    plain, zipped, tabbed = (pairs_of_text(n, n) for n in (30, 31, 32))
    first = write_pairs(tmp_path, "plain", plain)
    second = TextSource(str(tmp_path / "z.en.gz"), str(tmp_path / "z.de.gz"), repeat=3)
    for side, column in (("en", 0), ("de", 1)):
        (tmp_path / f"z.{side}.gz").write_bytes(gzip.compress("\n".join(p[column] for p in zipped).encode()))
    third = tmp_path / "t.tsv"
    third.write_text("\r\n".join("\t".join(pair) for pair in tabbed), encoding="utf-8", newline="")
    sources = [first, second, TextSource(tsv=str(third), repeat=2), first]
    manifest = made(replace(settings, train=sources, validation=sources))
    expected = plain + zipped * 3 + tabbed * 2 + plain
    assert text_of(settings) == text_of(settings, "validation") == expected
    assert manifest["train"]["pairs_read"] == len(expected)


def test_the_identity_of_a_corpus_is_that_of_its_training_pairs(settings: CorpusSettings, tmp_path: Path) -> None:
    """Other names of files, other held-out text and another folder do not change it; other pairs do."""
    pairs, [train] = pairs_of_text(400, 1), settings.train
    own = made(settings)["training_pairs"]
    (tmp_path / "elsewhere").mkdir()
    same = {
        "names": {"train": [write_pairs(tmp_path, "a", pairs[:150]), write_pairs(tmp_path, "b", pairs[150:])]},
        "validation": {"validation": [write_pairs(tmp_path, "c", pairs_of_text(9, 3))]},
        "test": {"test": [write_pairs(tmp_path, "d", pairs_of_text(9, 4))]},
        "folder": {"folder": str(tmp_path / "elsewhere" / "corpus")},
    }
    for name, changes in same.items():
        changed = replace(settings, **{"folder": str(tmp_path / name), **changes})
        assert made(changed)["training_pairs"] == own, name
        assert training_pairs(Path(changed.folder)) == own
    # Aligned in another way, with the same words and the same vocabulary.
    (tmp_path / "other").mkdir()
    other = list(zip([a for a, _ in pairs], [b for _, b in pairs[::-1]], strict=True))
    for number, text in enumerate((write_pairs(tmp_path / "other", "a", other), replace(train, repeat=2))):
        changed = replace(settings, folder=str(tmp_path / f"other_{number}"), train=[text])
        assert made(changed)["training_pairs"] != own
    # A corpus of version 1.1 has no hash in its manifest.
    manifest = json.loads((Path(settings.folder) / "manifest.json").read_text())
    del manifest["training_pairs"]
    (Path(settings.folder) / "manifest.json").write_text(json.dumps(manifest))
    assert training_pairs(Path(settings.folder)) == own


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_key_of_a_text_but_its_weight_is_compared(settings: CorpusSettings, split: str) -> None:
    """Also where a change of the texts or their number does not show it."""
    settings = replace(settings, test=settings.validation)
    made(settings)
    [text] = getattr(settings, split)
    other = {"repeat": 2, "name": "other", "prefix": "<b>", "source": text.target, "target": text.source}
    for change in ({key: value} for key, value in other.items()):
        changed = replace(settings, **{split: [replace(text, **change)]})
        with pytest.raises(InputError, match=rf"was made from other inputs or settings: corpus\.{split}: "):
            existing_corpus(changed, compare_texts=False)
    weighted = replace(settings, **{split: [replace(text, weight=2.0)]})
    assert existing_corpus(weighted, compare_texts=False) is not None


def test_long_validation_pairs_are_named(settings: CorpusSettings, caplog: pytest.LogCaptureFixture) -> None:
    longer = dropped(made(replace(settings, max_tokens=15))["validation"])["too_long"]
    assert 0 < longer < 20
    assert f"{longer} validation pairs are longer than corpus.max_tokens (15)" in caplog.text


def test_the_tokenizer_learns_from_a_seeded_sample(settings: CorpusSettings) -> None:
    def model(**changes: object) -> str:
        return made(replace(settings, vocabulary_size=45, **changes), force=True)["tokenizer"]["sha256"]

    sampled = model(tokenizer_sentences=40)
    assert sampled == model(tokenizer_sentences=40)
    assert sampled != model(tokenizer_sentences=40, seed=2)
    assert model() == model(seed=2) != sampled


@pytest.mark.parametrize("chunk_bytes", [2**20, 8])
def test_a_sample_has_the_given_size_without_repetitions(
    settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """Each pair is one word, which takes three pieces besides its letters; all 20 letters are always pieces."""
    monkeypatch.setattr("data_module.corpus.readers.CHUNK_BYTES", chunk_bytes)
    words = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st"]
    text = write_pairs(tmp_path, "words", [(word, word) for word in words])
    for num_sentences, num_words in ((2, 1), (3, 1), (9, 4), (18, 9), (20, 10), (99, 10)):
        wanted = replace(settings, train=[text], tokenizer_sentences=num_sentences, vocabulary_size=500)
        with pytest.raises(InputError, match=f"the largest that works is {25 + 3 * num_words}$"):
            learn_tokenizer(wanted, check_text(wanted), progress=False)


def test_text_of_many_chunks(settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of chunks does not change the corpus or line numbers."""
    # A byte order mark is removed only from a file's first line.
    plain = [*((f"\ufeff{source}", target) for source, target in pairs_of_text(60, 8)), ("", "the")]
    tabbed = [*pairs_of_text(60, 7), ("the", "")]
    (tmp_path / "t.tsv").write_text("".join("\t".join(pair) + "\n" for pair in tabbed), encoding="utf-8")
    sources = [replace(write_pairs(tmp_path, "plain", plain), repeat=2), TextSource(tsv=str(tmp_path / "t.tsv"))]
    wanted = replace(settings, train=sources, validation=sources)
    manifests, folders = [], []
    for chunk_bytes in (2**20, 200):
        monkeypatch.setattr("data_module.corpus.readers.CHUNK_BYTES", chunk_bytes)
        folders.append(tmp_path / f"corpus-{chunk_bytes}")
        manifests.append(made(replace(wanted, folder=str(folders[-1]))))
    assert contents(str(folders[0])) == contents(str(folders[1]))
    sources = [source for source, _ in text_of(replace(wanted, folder=str(folders[1])))]
    assert [source.startswith("\ufeff") for source in sources[:60]] == [False] + [True] * 59
    assert manifests[1]["train"]["pairs_dropped"]["empty_side"]["first_lines"] == [
        f"{tmp_path}/plain.en:61",
        f"{tmp_path}/t.tsv:61",
    ]


def test_a_symbol_of_many_characters_is_one_token(settings: CorpusSettings, tmp_path: Path) -> None:
    """Whether a sentence is too long does not depend on its characters."""
    long = [("a" * 600, "the"), ("a" * 600 * 20, "the")]
    validation = [write_pairs(tmp_path, "long", long)]
    wanted = replace(settings, validation=validation, user_symbols=["<b>", "a" * 600], max_tokens=25)
    made(wanted)
    assert text_of(wanted, "validation") == long


PAUSE_BEFORE_MANIFEST = """
write = builder.write_manifest
def pause(*arguments):
    print('half-way', flush=True)
    time.sleep(PAUSE)
    return write(*arguments)
builder.write_manifest = pause
"""


PAUSE_IN_A_PROCESS = """
variants.CHUNK_PAIRS, variants.num_processors = 64, lambda: 2
encode = variants._ChunkEncoder.__getitem__
def pause(encoder, item):
    if item == 3:
        print('half-way', flush=True)
        time.sleep(100)
    return encode(encoder, item)
variants._ChunkEncoder.__getitem__ = pause
"""


@pytest.mark.parametrize("pause", [PAUSE_BEFORE_MANIFEST.replace("PAUSE", "100"), PAUSE_IN_A_PROCESS], ids=len)
def test_killed_and_run_again(settings: CorpusSettings, tmp_path: Path, pause: str) -> None:
    """No process goes on, with which its output would; and the same bytes in the end."""
    settings = replace(settings, variants=2, noise=NoiseSettings(typos=0.3))
    process = start_preparing(settings, pause)
    assert process.stdout is not None
    assert process.stdout.readline() == "half-way\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=50)
    assert not Path(settings.folder).exists()
    assert (tmp_path / ".corpus.partial").exists()
    made(settings)
    assert not (tmp_path / ".corpus.partial").exists()
    made(replace(settings, folder=str(tmp_path / "whole")))
    assert contents(settings.folder) == contents(tmp_path / "whole")


def test_of_two_concurrent_processes_one_writes_and_the_other_reads(settings: CorpusSettings) -> None:
    first = start_preparing(settings, PAUSE_BEFORE_MANIFEST.replace("PAUSE", "2"))
    assert first.stdout is not None
    assert first.stdout.readline() == "half-way\n"
    second = start_preparing(settings, "builder.write_manifest = None")
    assert first.communicate()[0] == second.communicate()[0] == "done\n"
    assert text_of(settings) == pairs_of_text(400, 1)


def test_a_corpus_that_cannot_be_written_is_locked_by_those_who_train_on_it() -> None:
    with another_user() as place:
        folder = place / "corpus"
        folder.mkdir()
        manifest = folder / "manifest.json"
        manifest.touch()
        manifest.chmod(0o444)
        folder.chmod(0o555)
        with manifest.open() as file, in_use(folder), in_use(folder), pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.chmod(0o755)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("notes.txt", "mine"),
        ("manifest.json", '{"format": "of another program"}'),
        ("manifest.json", '["format"]'),
        ("manifest.json", "{"),
    ],
)
def test_a_folder_that_is_not_a_corpus_is_not_changed(settings: CorpusSettings, name: str, text: str) -> None:
    folder = Path(settings.folder)
    folder.mkdir()
    (folder / name).write_text(text)
    before = [(path, path.stat().st_mtime_ns) for path in folder.rglob("*")]
    for force in (False, True):
        with pytest.raises(InputError, match="exists and is not a corpus; name another"):
            made(settings, force=force)
    assert before == [(path, path.stat().st_mtime_ns) for path in folder.rglob("*")]


@pytest.mark.parametrize("name", ["notes.txt", "mine", ".hidden", "train.source.tokens.npy.bak"])
def test_force_keeps_what_it_has_not_made(settings: CorpusSettings, name: str) -> None:
    folder = Path(settings.folder)
    made(settings)
    (folder / name).mkdir()
    with pytest.raises(InputError, match=f"^{folder / name}: was not made by this program, and {folder} would be"):
        made(settings, force=True)
    assert (folder / name).exists()
    assert text_of(settings) == pairs_of_text(400, 1)
    made(settings)  # which changes nothing


def test_force_keeps_the_texts(settings: CorpusSettings, tmp_path: Path) -> None:
    made(settings)
    text = Path(settings.folder) / "validation.source.txt"
    target = tmp_path / "target"
    target.write_bytes(text.read_bytes())
    own = replace(settings, validation=[TextSource(str(text), str(target))])
    with pytest.raises(
        InputError, match=f"^{text}: is read by this command, and {text.parent} would be replaced; give"
    ):
        made(own, force=True)
    assert text.exists()


@pytest.mark.parametrize("exists", [True, False])
def test_what_was_put_into_a_corpus_meanwhile_is_kept(
    settings: CorpusSettings, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    if exists:
        made(settings)
    notes = Path(settings.folder) / "notes.txt"
    notes.parent.mkdir(exist_ok=True)
    monkeypatch.setattr(preparation, "check_text", lambda given: notes.touch() or check_text(given))
    with pytest.raises(InputError, match="^" + re.escape(f"{notes}: was not made by this program")):
        made(settings, force=exists)
    assert notes.exists()


def test_force_replaces_all_that_versions_1_made(settings: CorpusSettings) -> None:
    """With variants, a file of 1.0.0, a tokenizer that is its own, and a manifest that lacks keys."""
    folder = Path(settings.folder)
    varied = replace(settings, variants=2, noise=NoiseSettings(lower_case=0.5))
    made(varied)
    (folder / ".runs").touch()
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({"format": manifest["format"]}))
    before = contents(folder)
    made(replace(varied, tokenizer=str(folder)), force=True)
    assert contents(folder).keys() == before.keys() - {".runs"}
    assert (folder / "tokenizer.model").read_bytes() == before["tokenizer.model"]
