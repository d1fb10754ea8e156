"""The head is lost with all it knew (no Redis): a new one and the same file bring the service back, by no other hand."""

import time


def test_the_file_alone_brings_the_service_back(cluster, file, clients, tell):
    url = f"http://127.0.0.1:{cluster.head_port}"
    cluster.start_head(4)
    cluster.apply(file)
    answer = clients.ask(url)
    before = cluster.replicas()
    assert {row[0] for row in before} == {"unit", "ingress", "bookkeeper"}

    cluster.stop("head")
    assert cluster.status() is None
    started = time.monotonic()
    cluster.start_head(4)
    up = time.monotonic()
    assert not cluster.status()["applications"]  # nothing is there but what the file says
    cluster.apply(file)
    assert clients.ask(url) == answer
    tell(
        "new head, then the file: Ray up after", f"{up - started:.1f} s, answering {time.monotonic() - up:.1f} s later"
    )

    after = cluster.replicas()
    assert {row[2] for row in after}.isdisjoint(row[2] for row in before)


def test_the_same_file_again_restarts_nothing(cluster, file, clients):
    before = cluster.replicas()
    cluster.apply(file)
    assert cluster.replicas() == before
    assert clients.ask(f"http://127.0.0.1:{cluster.head_port}")
