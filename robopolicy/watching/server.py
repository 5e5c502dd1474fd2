"""Web server of the live page: read-only, loopback only, limited to runs.

Other websites in the same browser cannot read it: requests must name this host (against DNS rebinding), pages cannot be
embedded, and only our script runs. A path in a request is never opened; it is looked up in the list of runs.
"""

import asyncio
import errno
import signal
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from robopolicy.core.errors import ConfigError
from robopolicy.evaluation.plots import Rate, success_bars
from robopolicy.watching.listing import Listing, Run
from robopolicy.watching.pages import Pages, run_address

HOST = "127.0.0.1"
NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Accepted Host names."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "media-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MOST_COMPARED = 12


def application(root: Path) -> web.Application:
    """Return the web application that serves the runs below `root`."""
    site = Site(root)
    app = web.Application(middlewares=[guard])
    app.add_routes(
        [
            web.get("/", site.all_runs),
            web.get("/run/{identifier:.*}", site.one_run),
            web.get("/compare", site.comparison),
            web.get("/film", site.film),
            web.get("/refresh.js", site.script),
        ]
    )
    return app


class Site:
    """Request handlers. One thread reads files and another draws plots, so that the list never waits for plots."""

    def __init__(self, root: Path):
        self.listing = Listing(root)
        self.pages = Pages(self.listing)
        self._reader = ThreadPoolExecutor(1)
        self._painter = ThreadPoolExecutor(1)
        self._painter.submit(success_bars, [Rate("", 0.5, 0.4, 0.6)])  # imports matplotlib before the first request

    async def all_runs(self, request: web.Request) -> web.StreamResponse:
        """Respond with the list; if the root is itself a run, redirect to it."""
        runs = await self._aside(self.listing.runs)
        if [run.identifier for run in runs] == [""]:
            raise web.HTTPFound(run_address(runs[0]))
        text = await self._aside(lambda: self.pages.all_runs(request.query.get("sort", "")))
        return web.Response(text=text, content_type="text/html")

    async def one_run(self, request: web.Request) -> web.StreamResponse:
        """Respond with the report of one run."""
        run = await self._known(request.match_info["identifier"])
        return await self._page(lambda: self.pages.one_run(run))

    async def comparison(self, request: web.Request) -> web.StreamResponse:
        """Respond with a comparison of the requested runs."""
        identifiers = dict.fromkeys(request.query.getall("run", []))
        runs = [await self._known(identifier) for identifier in list(identifiers)[:MOST_COMPARED]]
        if not runs:
            raise web.HTTPFound("/")
        return await self._page(lambda: self.pages.comparison(runs, request.query.getall("metric", [])))

    async def film(self, request: web.Request) -> web.StreamResponse:
        """Respond with a video of a run."""
        run = await self._known(request.query.get("of", ""))
        for video in run.path.glob("*.mp4"):
            if video.name == request.query.get("name") and video.is_file() and not video.is_symlink():
                return web.FileResponse(video)
        raise web.HTTPNotFound(text="There is no such video.")

    async def script(self, request: web.Request) -> web.StreamResponse:
        """Respond with the script that refreshes the pages."""
        return web.FileResponse(Path(__file__).with_name("refresh.js"))

    async def _known(self, identifier: str) -> Run:
        run = await self._aside(lambda: self.listing.run(identifier))
        if run is None:
            raise web.HTTPNotFound(text="There is no such run. All runs: /")
        return run

    async def _page(self, make: Callable[[], str]) -> web.Response:
        text = await asyncio.get_running_loop().run_in_executor(self._painter, make)
        return web.Response(text=text, content_type="text/html")

    async def _aside[T](self, make: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, make)


@web.middleware
async def guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse requests for another host, and add security headers to every response."""
    if host_name(request.headers.get("Host", "")) not in NAMES:
        answer: web.StreamResponse = web.Response(status=421, text="Open this page as http://localhost or 127.0.0.1.")
    else:
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
    answer.headers.update(HEADERS)
    return answer


def host_name(header: str) -> str:
    """Return the host name in a Host header without its port; "" if there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def listening(port: int) -> socket.socket:
    """Return a socket bound to loopback. Raises ConfigError if the port is in use."""
    server_socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server_socket.bind((HOST, port))
    except OSError as error:
        server_socket.close()
        problem = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        raise ConfigError(f"Port {port} {problem}: choose another, or any free one with watch.port=0.") from error
    return server_socket


def serve(root: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve the runs below `root` until Ctrl-C or SIGTERM. say: called with the URL."""
    asyncio.run(_serve(application(root), listening(port), say))


async def _serve(app: web.Application, listener: socket.socket, say: Callable[[str], None]) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await web.SockSite(runner, listener, shutdown_timeout=1.0).start()
        say(f"http://{HOST}:{listener.getsockname()[1]}/")
        await stop.wait()
    finally:
        await runner.cleanup()
