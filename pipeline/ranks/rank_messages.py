"""Messages between ranks: JSON, in tensors or in the key-value store. Nothing is unpickled.

Messages in the store are signed, because any process that finds the store's port can write to it. The key follows from
the name of the start, which keeps two starts apart, and from the token in the environment, which is never sent. Without
a token, strangers can sign as well.
"""

import hmac
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from data_module.errors import printable
from pipeline.runtime.console import RendezvousError

RANKS_TOKEN = "RANKS_TOKEN"
"""Environment variable: the secret token of a start. Job scripts and `fit` on one machine give each start another."""
_MOST_CHARACTERS = 2000
_MOST_BYTES = 1 << 26
_key = b""
"""Signs this process's messages. It is global, like the default process group."""


class StrangerError(RendezvousError):
    """A message was not signed by a rank of this start."""

    strerror = "another run or program listens there"


def set_key(start: str) -> None:
    """From now on, sign and check messages with a key that is derived from the token and the name of the start."""
    global _key
    _key = hmac.digest(os.environ.get(RANKS_TOKEN, "").encode(), start.encode(), "sha256")


def signature(*parts: str) -> str:
    """Return the signature of some texts, which only a rank of this start can compute."""
    return hmac.new(_key, json.dumps(parts).encode(), "sha256").hexdigest()


def signed(name: str, value: object) -> str:
    """Return a message: a value that JSON can hold, with its signature under a name that is used once."""
    text = json.dumps(value)
    return signature(name, text) + text


def verified(name: str, message: bytes) -> Any:
    """Return the value of a message, made `plain`.

    Raises StrangerError if no rank of this start has signed it under that name.
    """
    given, text = message[:64], message[64:].decode(errors="replace")
    if not hmac.compare_digest(given, signature(name, text).encode()):
        raise StrangerError(
            "a stranger on the cluster has written to the ranks' store; start again, and tell its administrators"
        )
    return plain(json.loads(text))


def post(store: dist.Store, name: str, value: object) -> None:
    """Store a value that JSON can hold under a name that is used once."""
    store.set(name, signed(name, value))


def read(store: dist.Store, name: str) -> Any:
    """Return a value that a rank has posted, made `plain`; raise StrangerError if no rank of this start posted it."""
    return verified(name, store.get(name))


def silent_ranks(store: dist.Store, names: Sequence[str]) -> list[int]:
    """Return the ranks that have stored nothing under their name in `names`."""
    return [rank for rank, name in enumerate(names) if not store.check([name])]


def plain(value: object) -> Any:
    """Return a JSON value with its control characters escaped and its strings cut to a bounded length."""
    if isinstance(value, str):
        return printable(value[:_MOST_CHARACTERS])
    if isinstance(value, list):
        return [plain(one) for one in value]
    return {key: plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def value_of_each_rank(value: object) -> list[Any]:
    """Return the values of all ranks, as JSON holds them: a tuple becomes a list. All ranks call this."""
    text = json.dumps(value).encode()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [json.loads(text)]
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    # One tensor for all ranks, so that the host waits for a GPU once, and not for each rank.
    sizes = torch.zeros(dist.get_world_size(), 1, dtype=torch.int64, device=device)
    dist.all_gather(list(sizes), torch.tensor([len(text)], device=device))
    longest = int(sizes.max())
    if longest > _MOST_BYTES:
        raise RendezvousError(f"a rank sends {longest:,} bytes in place of a short message; start again")
    texts = torch.zeros(len(sizes), longest, dtype=torch.uint8, device=device)
    dist.all_gather(list(texts), torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device))
    return [json.loads(one.tobytes()) for one in texts.cpu().numpy()]
