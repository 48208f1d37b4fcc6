"""Lists of hosts, in all the forms that people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.launch.hosts import Host, nodes_of, read_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", (Host("a"),)),
        ("a:2, b:2", (Host("a", 2), Host("b", 2))),
        ("me@a:2,10.0.0.7", (Host("me@a", 2), Host("10.0.0.7"))),
        ("[fe80::1]:4,gpu-1.lan", (Host("fe80::1", 4), Host("gpu-1.lan"))),
    ],
)
def test_a_list(text: str, hosts: tuple[Host, ...]) -> None:
    assert read_hosts(text) == hosts


def test_a_list_that_is_longer_than_a_file_name_can_be() -> None:
    names = [f"node{number:03}" for number in range(100)]
    assert read_hosts(",".join(names)) == tuple(map(Host, names))


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# the left rack\n\nnode0\nnode1:4  # half of it\nnode2 slots=8 max_slots=16\ngpu address=10.0.0.5 slots=2\n"
    )
    hosts = read_hosts(str(file))
    assert hosts == (Host("node0"), Host("node1", 4), Host("node2", 8), Host("gpu", 2, "10.0.0.5"))
    assert [host.reached_at for host in hosts] == ["node0", "node1", "node2", "10.0.0.5"]
    assert Host("me@node0").reached_at == "node0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (",", "names no machine"),
        ("a:2,a:2", "names a more than once. Say how many processes: a:2"),
        ("a:x", "'a:x' is not a host"),
        ("-oProxyCommand=x", "is not a host"),
        ("a b", "'b' is not known"),
        ("a:0", "a has no slots"),
        ("./none", "cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_list(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hosts(text)
    assert message in str(caught.value)


def test_a_line_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb cpu=2\n")
    with pytest.raises(ConfigError, match="hosts, line 2: 'cpu=2' is not known"):
        read_hosts(str(tmp_path / "hosts"))


@pytest.mark.parametrize(
    ("hosts", "nodes", "nproc", "sizes"),
    [
        ("a,b", (1, 1), (1,), ((2, 2), (1,))),
        ("a,b", (1, 1), (3,), ((2, 2), (3,))),
        ("a,b", (1, 1), None, ((2, 2), None)),
        ("a:2,b:2", (1, 1), (1,), ((2, 2), (2,))),
        ("a:2,b:4", (1, 1), (1,), ((2, 2), (2, 4))),
        ("a:2,b:4", (1, 1), (2, 4), ((2, 2), (2, 4))),
        ("a:2,b:2,c:4", (2, 2), (1,), ((2, 2), (2,))),
        ("a:2,b:2,c:2", (1, 3), None, ((1, 3), (2,))),
    ],
)
def test_sizes(hosts: str, nodes: tuple[int, int], nproc: tuple[int, ...] | None, sizes: object) -> None:
    assert nodes_of(read_hosts(hosts), nodes, nproc) == sizes


@pytest.mark.parametrize(
    ("hosts", "nodes", "nproc", "message"),
    [
        ("a,b", (3, 3), (1,), "--nodes 3 needs as many hosts, but --hosts names 2"),
        ("a:2,b:2", (1, 1), (3,), "--nproc 3 contradicts --hosts, which says 2,2"),
        ("a:2,b", (1, 1), (1,), "but not of b"),
        ("a:2,b:4", (1, 2), (1,), "the same number of processes on every host"),
    ],
)
def test_sizes_that_contradict(hosts: str, nodes: tuple[int, int], nproc: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        nodes_of(read_hosts(hosts), nodes, nproc)
    assert message in str(caught.value)
