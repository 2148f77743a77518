from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slimctl.store.ledger import Ledger, open_ledger
from tests.store.results import artifact
from tests.store.servers import s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    """Environment of a running S3 server."""
    with s3_server() as environment:
        yield environment


@pytest.fixture
def bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Makes a store of its own on the server; gives its URL."""
    import boto3

    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")

    def make() -> str:
        name = f"bucket-{next(_NUMBERS)}"
        client.create_bucket(Bucket=name)
        return f"s3://{name}/models"

    return make


_NUMBERS = itertools.count()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def ledger(store: Path) -> Ledger:
    return open_ledger(str(store))


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., list[Path]]:
    """Makes an artifact in a folder of its own; see ``artifact``."""
    numbers = itertools.count()
    return lambda *args, **options: artifact(
        tmp_path / f"made{next(numbers)}" / "net", *args, **options
    )
