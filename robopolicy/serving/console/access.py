"""Access to the console: everybody on this machine or, with a key, those who know it."""

import hmac
import secrets
from urllib.parse import urlsplit

from aiohttp import web

from robopolicy.client.protocol import Limits
from robopolicy.core.errors import ServingError
from robopolicy.serving.configuration import ConsoleConfig
from robopolicy.serving.connections import ConnectionLimiter, is_loopback

COOKIE = "robopolicy_console"
LASTS = 12 * 3600
"""Seconds after which a browser must send the key again."""
NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Host names under which a console without a key can be reached, against DNS rebinding."""


class Access:
    """Decides about requests. Raises ServingError for a console that is open to a network without a key."""

    def __init__(self, config: ConsoleConfig):
        self.key = config.api_key
        self.encrypted = config.certificate is not None
        self._tokens: set[str] = set()
        self._door = ConnectionLimiter(Limits())
        if not self.key and not is_loopback(config.host):
            raise ServingError(
                f"Listening on {config.host} lets anyone on the network control your robots. Set a key with "
                "ROBOPOLICY_API_KEY=SECRET (or drive.console.api_key=SECRET), or listen on 127.0.0.1."
            )

    def allows(self, request: web.Request) -> bool:
        """Whether a request may see robots: by cookie, by the header that robots send, or without a key on loopback."""
        if not self.key:
            return host_name(request.headers.get("Host", "")) in NAMES
        cookie = request.cookies.get(COOKIE, "")
        if any(hmac.compare_digest(cookie.encode(), token.encode()) for token in self._tokens):
            return True
        header = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape").strip()
        return bool(header) and self._is_right(request, header, f"Api-Key {self.key}".encode())

    def enter(self, request: web.Request, key: str, response: web.StreamResponse) -> bool:
        """Give a browser that knows the key a cookie; return whether it does."""
        if not self.key or not self._is_right(request, key.strip().encode("utf-8", "replace"), self.key.encode()):
            return False
        token = secrets.token_urlsafe(32)
        self._tokens = {*list(self._tokens)[-99:], token}
        response.set_cookie(
            COOKIE, token, max_age=LASTS, httponly=True, samesite="Strict", secure=self.encrypted, path="/"
        )
        return True

    def locked_for(self, request: web.Request) -> int:
        """Return the seconds during which wrong keys of this address are not counted any more, 0 for none."""
        address = request.remote or ""
        return self._door.lockout_left(address) if self._door.locked_out(address) else 0

    def _is_right(self, request: web.Request, given: bytes, expected: bytes) -> bool:
        right = hmac.compare_digest(given, expected)
        if not right and not self._door.locked_out(request.remote or ""):
            self._door.wrong_key(request.remote or "")
        return right


def is_own_page(request: web.Request) -> bool:
    """Whether a browser's request comes from a page of this console, or from no page at all."""
    origin = request.headers.get("Origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("Host")


def host_name(header: str) -> str:
    """Return the host name in a Host header without its port, "" if there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
