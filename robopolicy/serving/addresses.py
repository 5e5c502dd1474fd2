"""Where a policy server is: its address, the proxy on the way there, its certificate, and what went wrong.

Proxies are those of the environment, in the order of the websockets library: ws_proxy or wss_proxy, socks_proxy,
https_proxy, and http_proxy for ws:// alone, but for the hosts in no_proxy. This machine is never reached through one.
"""

import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidProxy, InvalidProxyStatus

from robopolicy.core.errors import ConfigError, ServingError

PORT = 8000
"""Port of a server where nobody says another."""

SCHEMES = ("ws", "wss")


def whole_address(host: str, port: int | None, encrypted: bool) -> str:
    """Return the ws:// or wss:// address of a server.

    host: a name, or a whole address; port: None for the one that a whole address says, PORT for a name; encrypted:
    whether a name is one of a wss:// address. Raises ConfigError where the two say different ports, where a whole
    address is of another kind, and where it is ws:// although it has to be encrypted.
    """
    name = f"[{host}]" if host.count(":") > 1 and "://" not in host and "[" not in host else host  # IPv6
    whole = host if "://" in host else f"{'wss' if encrypted else 'ws'}://{name}"
    try:
        parts = urlsplit(whole)
        own = parts.port
    except ValueError as error:
        raise ConfigError(f"{host} is no address of a server: {error}.") from error
    if parts.scheme not in SCHEMES:
        raise ConfigError(f"{host} is no address of a policy server: those begin with ws:// or wss://.")
    if encrypted and parts.scheme == "ws":
        raise ConfigError(f"A certificate is what a wss:// address is checked against, and {host} is none.")
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"port is {port}: a server listens at one of 1 to 65535.")
    if own is not None and port not in (None, own):
        raise ConfigError(f"{host} says port {own}, and port is {port}: say one of them.")
    if own is not None or (port is None and "://" in host):
        return whole
    return parts._replace(netloc=f"{parts.netloc}:{PORT if port is None else port}").geturl()


def trusting(certificate: Path | str | None) -> ssl.SSLContext:
    """Return what a server's certificate is checked against: a PEM file, None for the authorities that the system
    trusts. Raises ServingError where it cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=None if certificate is None else str(certificate))
    except (OSError, ssl.SSLError) as error:
        raise ServingError(f"The certificate {certificate} cannot be read: {error}") from error


def is_this_machine(host: str) -> bool:
    """Whether `host` is a name or an address of the machine that asks: connections to it leave it through no proxy."""
    name = host.lower().strip("[]").rstrip(".")
    if name in ("localhost", socket.gethostname().lower()) or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.inet_aton(name))  # short forms such as 127.1
        except (OSError, UnicodeError):
            return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any(each.is_loopback or each.is_unspecified for each in (address, mapped or address))


@dataclass(frozen=True)
class Proxy:
    """A proxy on the way to a server.

    url: its address, with the login if the user gave one; setting: what names it, such as https_proxy; host: of the
    server.
    """

    url: str
    setting: str
    host: str

    def __str__(self) -> str:
        """Return where it is and who says so; a login is left out."""
        scheme, _, rest = self.url.partition("://")
        return f"the proxy {scheme}://{rest.rpartition('@')[2]} of {self.setting}"

    @property
    def around(self) -> str:
        """What lets connections to the server go without it."""
        return f" no_proxy={self.host} goes around it."


def proxy_for(address: str) -> Proxy | None:
    """Return the proxy that the environment wants between this machine and a ws:// or wss:// address, None for none."""
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "wss" else 80)
    if is_this_machine(host) or proxy_bypass(f"{host}:{port}"):
        return None
    proxies = getproxies()
    for kind in ("wss", "socks", "https") if parts.scheme == "wss" else ("ws", "socks", "https", "http"):
        if url := proxies.get(kind):
            spelt = [name for name in (f"{kind}_proxy", f"{kind}_proxy".upper()) if os.environ.get(name)]
            url = url if "://" in url else f"http://{url}"
            if kind == "socks" and url.startswith("http://"):
                url = url.replace("http", "socks5h", 1)
            return Proxy(url, spelt[0] if spelt else "this computer's settings", host)
    return None


def unreachable(address: str, proxy: Proxy | None, error: Exception) -> ServingError:
    """Return what it means that connecting to `address`, through `proxy`, raised `error`, and what to do about it."""
    said = str(error).rstrip(".") or type(error).__name__
    if isinstance(error, ConnectionClosed):  # within the handshake, when the end comes before the answer is looked at
        said = "did not receive a valid HTTP response"
    if proxy is None:
        if isinstance(error, ConnectionRefusedError | ConnectionResetError):
            return ServingError(f"Nobody listens at {address}. Start the server first: robopolicy serve CHECKPOINT")
        return ServingError(f"Cannot connect to {address}: {said}.{way_out(address, error)}")
    if isinstance(error, ImportError):
        text = f"{address} is reached through {proxy}, and that takes a package: pip install python-socks."
        return ServingError(text + proxy.around)
    if isinstance(error, InvalidProxy):
        text = f"{proxy.setting} names no proxy ({said}): write {proxy.setting}=http://HOST:PORT."
        return ServingError(f"Cannot connect to {address}: {text}{proxy.around}")
    if isinstance(error, InvalidProxyStatus):
        status = error.response.status_code
        login = " It wants a login: http://USER:PASSWORD@HOST:PORT." if status == 407 else ""
        refused = f"{address} cannot be reached: {proxy} does not let the connection through (HTTP {status})."
        return ServingError(refused + login + proxy.around)
    if isinstance(error, ConnectionRefusedError):
        return ServingError(f"Cannot connect to {address}: nobody listens at {proxy}.{proxy.around}")
    return ServingError(f"Cannot connect to {address} through {proxy}: {said}.{proxy.around}")


def way_out(address: str, error: Exception) -> str:
    """Return what to do about an error that came of connecting to `address`, "" where nobody knows."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if "mismatch" in error.verify_message.lower():
            return " Connect by a name that its certificate holds, or make one that holds this name (subjectAltName)."
        return " Name the file of a certificate to trust, such as a self-signed one: certificate (drive.certificate)."
    if isinstance(error, ssl.SSLError):
        return " If it serves without encryption, its address begins with ws://."
    if isinstance(error, InvalidMessage) and address.startswith("ws://"):
        return (
            " If it serves with a certificate, its address begins with wss://, and one that is self-signed has to be "
            "trusted: certificate (drive.certificate)."
        )
    if isinstance(error, TimeoutError):
        return " Something listens there and does not answer: does it hang?"
    return ""
