"""Free TCP ports of this machine."""

import socket


def free_ports(count):
    """So many different ones that nobody listened on just now."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
