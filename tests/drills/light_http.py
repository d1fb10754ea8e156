"""A client of HTTP/1.1 that costs a load generator next to nothing: JSON in and out, connections kept, no redirects, no chunks."""

import asyncio
import json
from urllib.parse import urlsplit


class LightHttp:
    """One service at `url`; as many connections as requests are in flight."""

    def __init__(self, url):
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._idle = []

    async def ask(self, method, path, body=None):
        """(status, headers by lower-case name, bytes of the body). A kept connection that the server has closed is replaced."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        while self._idle:
            reader, writer = self._idle.pop()
            if reader.at_eof() or writer.is_closing():
                writer.close()
                continue
            break
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(head.encode() + content)
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
            }
            answer = await reader.readexactly(int(headers["content-length"]))
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer))
        return int(first.split()[1]), headers, answer

    def close(self):
        """Hang up."""
        for _, writer in self._idle:
            writer.close()
