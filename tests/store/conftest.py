"""The stores that the conformance suite runs on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.stage import EtcdStore, SqliteStore, Store
from xce_supervisor.testbed.etcd_cluster import EtcdCluster


@pytest.fixture(scope="session")
def etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Three members, for the whole session."""
    binary = shutil.which("etcd")
    assert binary is not None, "tests that ask for this are marked needs('etcd')"
    cluster = EtcdCluster(binary, tmp_path_factory.mktemp("etcd"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=pytest.mark.needs("etcd"))])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A fresh store of each engine, healed afterwards."""
    store: Store = SqliteStore(tmp_path) if request.param == "sqlite" else EtcdStore(request.getfixturevalue("etcd_cluster"))
    yield store
    store.heal()


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[SqliteStore]:
    """A fresh sqlite store."""
    store = SqliteStore(tmp_path)
    yield store
    store.heal()


@pytest.fixture
def etcd_store(etcd_cluster: EtcdCluster) -> Iterator[EtcdStore]:
    """A fresh etcd store."""
    store = EtcdStore(etcd_cluster)
    yield store
    store.heal()
