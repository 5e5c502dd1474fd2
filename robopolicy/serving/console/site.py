"""Web server of the console: pages, one websocket per browser that receives the robots' state and sends orders, and one
per robot that reports over the network.

A camera frame is a binary message: robot (2 bytes), length of the camera's name (1 byte), name, JPEG. Everything else
is JSON. The server runs in a thread of its own, so that no browser can delay a robot.
"""

import asyncio
import io
import json
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from aiohttp import WSCloseCode, WSMsgType, web

from robopolicy.client.protocol import pack
from robopolicy.client.supervision import PATH
from robopolicy.core.arrays import Array
from robopolicy.core.errors import ServingError, SpecError
from robopolicy.serving.configuration import ConsoleConfig
from robopolicy.serving.connections import server_tls
from robopolicy.serving.console.access import Access, is_own_page
from robopolicy.serving.console.fleet import Fleet
from robopolicy.serving.console.robots import LIMITS, RobotReports

FOLDER = Path(__file__).parent
FILES = {"console.js": "text/javascript", "console.css": "text/css"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer a form is sent with the origin "null"
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATE_SECONDS = 0.05
"""Minimum seconds between two states that a browser receives."""
IMAGE_SECONDS = 0.12
"""Minimum seconds between two rounds of camera frames."""
SHOWN = "shown"
"""Message of a browser that has shown the last state."""
HEARTBEAT = 6.0
"""Seconds between two pings of a browser; without an answer within half of it, the connection is lost."""
MESSAGE_BYTES = 4096
"""Longest message of a browser."""
BROWSERS = 16
"""Most browsers at a time."""


class Console:
    """A running console of a fleet; use it as a context manager. address: URL of the page.

    Raises ServingError when the port is in use, or the console would be open to a network without a key.
    """

    def __init__(self, fleet: Fleet, config: ConsoleConfig):
        self.fleet, self.config = fleet, config
        self.access = Access(config)
        self.reports = RobotReports(fleet)
        self._loop = asyncio.new_event_loop()
        self._ready: Future[int] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()
        scheme = "http" if config.certificate is None else "https"
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.address = f"{scheme}://{host}:{self._ready.result()}/"

    def close(self) -> None:
        """Disconnect all browsers and stop the server."""
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def application(self) -> web.Application:
        """Return the web application."""
        app = web.Application(middlewares=[self._guard], client_max_size=MESSAGE_BYTES)
        app.add_routes(
            [
                web.get("/", self._page),
                web.post("/login", self._login),
                web.get("/live", self._live),
                web.get(PATH, self._robot),
                web.get("/{name}", self._file),
            ]
        )
        return app

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        config = self.config
        context = server_tls(config.certificate, config.certificate_key)
        try:
            runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, config.host, config.port, ssl_context=context).start()
        except OSError as error:
            raise ServingError(f"The console cannot listen on {config.host}:{config.port}: {error}") from error
        self._ready.set_result(runner.addresses[0][1])
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Show nothing to those who may not see it, and add security headers to every response."""
        public = request.path == "/login" or request.path == "/console.css"
        answer: web.StreamResponse
        if not self.access.key and not self.access.allows(request):
            answer = web.Response(status=421, text="Open this page as http://localhost or 127.0.0.1.")
        elif not public and not self.access.allows(request):
            answer = self._door(401)
        else:
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                error.headers.update(HEADERS)
                raise
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    def _door(self, status: int, text: str = "") -> web.Response:
        page = (FOLDER / "login.html").read_text().replace("{{ text }}", text)
        return web.Response(status=status, text=page, content_type="text/html")

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(FOLDER / "console.html")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in FILES:
            raise web.HTTPNotFound(text="There is no such page. The console: /")
        return web.Response(text=(FOLDER / name).read_text(), content_type=FILES[name])

    async def _login(self, request: web.Request) -> web.StreamResponse:
        if not is_own_page(request):
            return self._door(403, "This form was sent from another website.")
        if seconds := self.access.locked_for(request):
            await asyncio.sleep(1.0)
            note = f"Too many wrong keys: further ones are answered slowly for {seconds} s."
        else:
            note = "That is not the key."
        response: web.StreamResponse = web.Response(status=303, headers={"Location": "/"})
        key = str((await request.post()).get("key", ""))
        return response if self.access.enter(request, key, response) else self._door(401, note)

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Exchange state and orders with a browser until it disconnects."""
        if not is_own_page(request):
            raise web.HTTPForbidden(text="Another website may not use the console.")
        if self.fleet.watched >= BROWSERS:
            raise web.HTTPServiceUnavailable(text=f"{BROWSERS} browsers watch already.")
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=MESSAGE_BYTES, compress=False)
        await socket.prepare(request)
        name = self.fleet.join()
        shown = asyncio.Event()
        sender = asyncio.create_task(self._send(socket, name, shown))
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                if message.data == SHOWN:
                    shown.set()
                elif problem := self._ordered(name, message.data):
                    await socket.send_json({"problem": problem})
        finally:
            self.fleet.leave(name)
            sender.cancel()
        return socket

    async def _robot(self, request: web.Request) -> web.StreamResponse:
        """Take a robot's reports and answer with orders until it disconnects."""
        if request.headers.get("Origin") is not None:
            raise web.HTTPForbidden(text="Robots connect here, not web pages.")
        socket = web.WebSocketResponse(heartbeat=2.0, max_msg_size=LIMITS.message, compress=False)
        await socket.prepare(request)
        row: int | None = None
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    break
                if row is None:
                    row = self.reports.join(message.data)
                else:
                    await socket.send_bytes(pack(self.reports.exchange(row, message.data)))
        except SpecError as error:
            await socket.close(code=WSCloseCode.INVALID_TEXT, message=str(error).encode()[:120])
        finally:
            if row is not None:
                self.reports.leave(row)
        return socket

    def _ordered(self, name: str, text: str) -> str:
        try:
            message = json.loads(text)
        except ValueError:
            return "Orders are JSON."
        return self.fleet.order(name, message) if isinstance(message, dict) else "An order is a JSON object."

    async def _send(self, socket: web.WebSocketResponse, name: str, shown: asyncio.Event) -> None:
        """Send states and camera frames, the next ones once the browser has `shown` the last: nothing piles up in a
        slow one.
        """
        await socket.send_json({"about": self.fleet.about()})
        seen: dict[tuple[int, str], int] = {}
        images_due = 0.0
        while not socket.closed:
            shown.clear()
            if (now := time.monotonic()) >= images_due:
                images_due = now + IMAGE_SECONDS
                for row, camera, number, image in self.fleet.images(seen):
                    seen[row, camera] = number
                    data = await asyncio.to_thread(jpeg, image)
                    label = camera.encode()[:255]
                    await socket.send_bytes(row.to_bytes(2, "big") + bytes([len(label)]) + label + data)
            await socket.send_json({"state": self.fleet.state(name)})
            await asyncio.gather(asyncio.sleep(STATE_SECONDS), shown.wait())


def jpeg(image: Array) -> bytes:
    """Return a uint8 image [height, width, 3] as JPEG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
