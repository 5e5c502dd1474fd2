"""Where a policy server is: its address, the certificate that it shows, and what went wrong on the way there."""

import ssl
from pathlib import Path
from urllib.parse import urlsplit

from websockets.exceptions import InvalidMessage

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
    whole = host if "://" in host else f"{'wss' if encrypted else 'ws'}://{host}"
    parts = urlsplit(whole)
    try:
        own = parts.port
    except ValueError as error:
        raise ConfigError(f"{host} is no address of a server: {error}.") from error
    if parts.scheme not in SCHEMES:
        raise ConfigError(f"{host} is no address of a policy server: those begin with ws:// or wss://.")
    if encrypted and parts.scheme == "ws":
        raise ConfigError(f"A certificate is what a wss:// address is checked against, and {host} is none.")
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
