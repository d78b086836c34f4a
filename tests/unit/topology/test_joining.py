"""Which cluster a run is on: the config's, that of RAY_ADDRESS, or one of its own."""

from __future__ import annotations

import socket

import pytest

from tests.command_line import TINY
from topology.config import ConfigError, RunConfig, load_config
from topology.joining import cluster_address, connected
from topology.runs import RunError


def config(address: str | None = None) -> RunConfig:
    return load_config(TINY, () if address is None else (f"cluster.address={address}",))


@pytest.mark.parametrize(
    ("address", "variable", "expected"),
    [
        (None, None, None),
        (None, "", None),
        (None, "local", None),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ("head:6379", None, "head:6379"),
        ("head:6379", "10.0.0.1:6379", "head:6379"),
    ],
)
def test_the_config_comes_before_the_environment_and_without_either_a_run_has_its_own(
    address: str | None, variable: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert cluster_address(config(address)) == expected


@pytest.mark.parametrize("address", ["auto", "http://head:8265", "ray://head:10001", "head"])
def test_what_names_no_head_is_refused_with_the_place_it_came_from(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.address: .*host:port"):
        cluster_address(config(address))
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS: .*host:port.*unset it"):
        cluster_address(config())


def test_the_size_of_an_own_cluster_is_refused_where_the_environment_names_one_to_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(ConfigError, match=r"cluster\.cpus: read only .* RAY_ADDRESS is head:6379"):
        cluster_address(load_config(TINY, ("cluster.cpus=4",)))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", None), ("no-such-host.invalid", 6379), ("127.0.0.1", 70000)])
def test_an_address_at_which_nobody_listens_is_told_in_seconds(host: str, port: int | None) -> None:
    with socket.socket() as taken:  # bound, but not listening: nobody else takes the port meanwhile
        taken.bind(("127.0.0.1", 0))
        address = f"{host}:{port or taken.getsockname()[1]}"
        with pytest.raises(RunError, match=f"nobody answers at {address}"), connected(None, address, own=False):
            pass
