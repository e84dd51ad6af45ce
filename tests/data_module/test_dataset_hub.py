"""Data sets by name, downloaded by the library from a local test server."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import pytest
import yaml

from data_module.corpus.manifest import read_manifest
from data_module.errors import InputError
from pipeline.config.recipe import load_recipe
from pipeline.training.fit import ensure_corpus
from tests.conftest import pipeline
from tests.data_module.test_dataset import rows, wmt_like, write_parquet


class Hub(ThreadingHTTPServer):
    """Serves each folder `owner/name` as a repository of one commit."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder
        self.commit = "a" * 40
        self.fetched: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a download needs."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = unquote(urlparse(self.path).path).strip("/").split("/")
        if parts[0] == "datasets":
            self.file(self.server.folder / "/".join(parts[1:3]), "/".join(parts[5:]))
            return
        repository = self.server.folder / "/".join(parts[2:4])
        if len(parts) < 4 or not repository.is_dir():
            self.answer(code=404, error="RepoNotFound")
        elif parts[4:5] == ["tree"]:
            below = sorted((repository / "/".join(parts[6:])).glob("*"))
            self.answer(json.dumps([self.entry(path, repository) for path in below]).encode())
        else:
            self.answer(json.dumps({"id": "/".join(parts[2:4]), "sha": self.server.commit, "siblings": []}).encode())

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        owner, name = urlparse(self.path).path.split("/")[3:5]
        repository = self.server.folder / owner / name
        names = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
        found = [self.entry(repository / name, repository) for name in names if (repository / name).exists()]
        self.answer(json.dumps(found).encode())

    def file(self, repository: Path, name: str) -> None:
        path = repository / name
        if not path.is_file():
            self.answer(code=404, error="EntryNotFound" if repository.is_dir() else "RepoNotFound")
            return
        if self.command == "GET":
            self.server.fetched.append(name)
        self.answer(path.read_bytes())

    def entry(self, path: Path, repository: Path) -> dict[str, Any]:
        size = path.stat().st_size if path.is_file() else 0
        kind = "file" if path.is_file() else "directory"
        return {"type": kind, "path": str(path.relative_to(repository)), "size": size, "oid": "b" * 40}

    def answer(self, body: bytes = b"", code: int = 200, error: str = "") -> None:
        self.send_response(code)
        headers = {"Content-Length": len(body), "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
        for key, value in (headers | {"X-Repo-Commit": self.server.commit, "X-Error-Code": error}).items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as server:
        wmt_like(server.folder / "wmt/wmt14")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    text = {"dataset": "wmt/wmt14", "subset": "de-en"}
    corpus = {
        "folder": str(tmp_path / "corpus"),
        "source_language": "en",
        "target_language": "de",
        "train": text | {"split": "train"},
        "validation": text | {"split": "validation"},
        "vocabulary_size": 60,
    }
    (tmp_path / "hub.yaml").write_text(yaml.safe_dump({"corpus": corpus}))
    return tmp_path / "hub.yaml"


def prepared(hub: Hub, recipe: Path, *arguments: str) -> tuple[int, list[str], dict[str, Any] | None]:
    """Run prepare; return its exit code, lines on standard error, and manifest."""
    environment = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(recipe.parent / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    done = pipeline("prepare", "--config", recipe, *arguments, cwd=recipe.parent, environment=environment)
    lines = done.stderr.decode().splitlines()
    return done.returncode, lines, read_manifest(recipe.parent / "corpus") if done.returncode == 0 else None


def test_by_name_from_the_hub(hub: Hub, recipe: Path) -> None:
    code, lines, manifest = prepared(hub, recipe)
    assert code == 0, lines
    assert manifest is not None
    assert manifest["train"]["pairs_kept"] == 90
    assert manifest["hub_revisions"] == {"wmt/wmt14": "a" * 40}
    names = [f"de-en/train-0000{i}-of-00003.parquet" for i in range(3)] + ["de-en/validation-00000-of-00001.parquet"]
    assert [entry["file"] for entry in manifest["source_files"]] == [f"wmt/wmt14/{name}" for name in names]
    assert sorted(hub.fetched) == ["README.md", *names]  # no file of the other language
    assert [line for line in lines if "pairs are few" not in line] == [
        "looking up wmt/wmt14 on the Hugging Face hub",
        "downloading 3 files of wmt/wmt14, except those in the cache",
        "looking up wmt/wmt14 on the Hugging Face hub",
        "downloading 1 files of wmt/wmt14, except those in the cache",
        "train: 90 pairs read, 90 kept, 0 dropped",
        "validation: 20 pairs read, 20 kept, 0 dropped",
        f"the corpus is in {recipe.parent / 'corpus'}",
    ]

    # A commit that changes the text requires another corpus.
    hub.commit = "d" * 40
    write_parquet(hub.folder / "wmt/wmt14" / names[1], rows(30, 9))
    code, lines, _ = prepared(hub, recipe)
    assert code == 2
    assert f"wmt/wmt14/{names[1]} has changed" in lines[-1]

    # Training does not contact the hub, because compute nodes may have no network.
    settings = load_recipe([recipe]).corpus
    ensure_corpus(settings)
    with pytest.raises(InputError, match=r"inputs or settings: corpus\.max_tokens was 256, now 9"):
        ensure_corpus(load_recipe([recipe], ["--corpus.max_tokens", "9"]).corpus)


def test_a_missing_data_set(hub: Hub, recipe: Path) -> None:
    code, lines, _ = prepared(hub, recipe, "--corpus.train={dataset: wmt/none, split: train}")
    assert code == 2
    assert len(lines) == 2
    assert "error: wmt/none: no such folder, and no such data set on the Hugging" in lines[-1]
