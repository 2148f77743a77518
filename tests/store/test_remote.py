"""What object storage does differently: conditional puts, credentials, packages."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from slimctl.core.errors import MissingExtraError, StoreError
from slimctl.store.ledger import open_ledger
from slimctl.store.remote import RemoteBackend, _lost

Made = Callable[..., list[Path]]
Bucket = Callable[[], str]


def test_of_two_creations_one_wins(bucket: Bucket) -> None:
    url = bucket()
    backends = [RemoteBackend(url) for _ in range(6)]
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda b=b, n=n: results.append(b.create("log/x", b"%d" % n)))
        for n, b in enumerate(backends)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 5 + [True]


def test_the_loser_takes_the_next_number(
    bucket: Bucket, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = bucket()
    ledger, other = open_ledger(url), open_ledger(url)
    mine, theirs = made((1,)), made((2,))
    from slimctl.store import log

    real, beaten = log.append, []

    def late(backend: Any, name: str, number: int, entry: Any) -> bool:
        if backend is ledger.backend and not beaten:
            beaten.append(other.add("net", theirs, accepted=True).version.number)
        return real(backend, name, number, entry)

    monkeypatch.setattr("slimctl.store.log.append", late)
    assert ledger.add("net", mine, accepted=True).version.number == 2
    assert beaten == [1]
    assert len(other.known("net").versions) == 2


def test_a_put_that_meets_itself_has_won(bucket: Bucket) -> None:
    backend = RemoteBackend(bucket())
    assert backend.create("log/x", b"mine")
    assert backend.create("log/x", b"mine")  # repeated after a lost answer
    assert not backend.create("log/x", b"theirs")


@pytest.mark.parametrize("code", ["PreconditionFailed", "ConditionalRequestConflict"])
def test_servers_say_it_in_several_ways(code: str) -> None:
    error = OSError("failed")
    error.__cause__ = Exception()
    error.__cause__.response = {"Error": {"Code": code}}  # type: ignore[attr-defined]
    assert _lost(error)
    assert not _lost(OSError("something else"))


def test_storage_without_conditional_puts_is_refused(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = RemoteBackend(bucket())
    put = backend._system.pipe_file
    monkeypatch.setattr(
        backend._system, "pipe_file", lambda path, data, mode="overwrite": put(path, data)
    )
    with pytest.raises(StoreError, match="conditional puts"):
        backend.create("log/net/000001.json", b"{}")


def test_refreshing_makes_an_object_young_and_keeps_its_bytes(bucket: Bucket) -> None:
    backend = RemoteBackend(bucket())
    backend.write("objects/aa/b", memoryview(b"content"))
    before = backend.stat("objects/aa/b")
    time.sleep(1.1)
    assert backend.refresh("objects/aa/b")
    after = backend.stat("objects/aa/b")
    assert before is not None and after is not None
    assert after.modified > before.modified
    assert backend.read("objects/aa/b") == b"content"
    assert not backend.refresh("objects/aa/none")


def test_a_bucket_that_is_not_there(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match="does not answer as it should") as caught:
        RemoteBackend("s3://nowhere/models").create("log/x", b"1")
    assert "AWS_ENDPOINT_URL" in caught.value.fix


def test_a_server_that_is_not_there(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    backend = RemoteBackend("s3://nowhere/models")
    backend._system.retries = 1
    with pytest.raises(StoreError, match="does not answer as it should"):
        backend.read("log/x")


def test_an_unknown_kind_of_url() -> None:
    with pytest.raises(StoreError, match="Not a store"):
        open_ledger("nothing://bucket")


@pytest.mark.parametrize("module", ["fsspec", "s3fs"])
def test_packages_that_are_missing(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The name fsspec.registry is a mapping as well, which hides the module.
    known = import_module("fsspec.registry")._registry
    for protocol in ("s3", "s3a"):
        monkeypatch.delitem(known, protocol, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as caught:
        open_ledger("s3://bucket/models")
    assert 'pip install "slimctl[store]"' in caught.value.fix
