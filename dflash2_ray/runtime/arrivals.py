"""Who reads a connection: a thread that waits for an answer reads for itself, and a thread in the background whenever nobody does.

So an answer reaches whoever needs it without a hand-over between threads, and one that nobody waits for, or the end of the
connection, is noticed all the same. It must not know what is read.
"""

import select
import socket

_END = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Arrivals:
    """Waits for one socket. `handed_over` is the caller's to set and read under its own lock: while True, `wait_in_background`
    wakes for the end of the connection only."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._foreground = select.poll()
        self._foreground.register(peer, select.POLLIN | select.POLLRDHUP)
        self._background = select.epoll()
        self._background.register(peer, select.EPOLLIN | _END)
        self.handed_over = False

    def hand_over(self) -> None:
        """From here on the caller reads."""
        self.handed_over = True
        self._background.modify(self._peer, _END)

    def hand_back(self) -> None:
        """The background reads again, also what is there already."""
        self.handed_over = False
        self._background.modify(self._peer, select.EPOLLIN | _END)

    def wait(self, timeout_s: float) -> None:
        """Until something has arrived or ended, or `timeout_s` has passed."""
        self._foreground.poll(timeout_s * 1000)

    def wait_in_background(self) -> None:
        """Until there is something for the background."""
        self._background.poll()

    def close(self) -> None:
        """By the background's thread alone, behind its last wait."""
        self._background.close()
