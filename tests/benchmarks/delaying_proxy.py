"""A TCP proxy in this process that hands every byte on after a fixed time: a long link without a network."""

from __future__ import annotations

import asyncio
from contextlib import suppress

READ_BYTES = 1 << 18
UNDER_WAY = 1024  # reads on the way: far more than a window of HTTP/2


class DelayingProxy:
    """Listens on 127.0.0.1 and forwards to `target`; `delay_s` may change while it runs."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.address = ""

    async def start(self) -> None:
        """Binds a free port; `address` names it."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Ends every connection."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._keep(asyncio.create_task(self._forward(source, sink)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Reads at once and writes in time, so that the delay costs no throughput."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(UNDER_WAY)
        writing = asyncio.create_task(self._deliver(under_way, sink))
        loop = asyncio.get_running_loop()
        try:
            with suppress(ConnectionError):
                while data := await source.read(READ_BYTES):
                    await under_way.put((loop.time() + self.delay_s, data))
            await under_way.put((loop.time() + self.delay_s, b""))
            await writing
        finally:
            writing.cancel()
            sink.close()

    @staticmethod
    async def _deliver(under_way: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while True:
                at, data = await under_way.get()
                if (left := at - loop.time()) > 0:
                    await asyncio.sleep(left)
                if not data:
                    return
                sink.write(data)
                await sink.drain()
