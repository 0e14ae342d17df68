"""Names, addresses and ports of this machine."""

from __future__ import annotations

import errno
import socket

from heavylift.errors import UserError

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def is_this_machine(host: str) -> bool:
    """Whether a name or address means the machine we are on."""
    if host in _LOCAL_NAMES or host in (socket.gethostname(), socket.gethostname().split(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address[0]) for family, _, _, _, address in found)


def resolves(host: str) -> bool:
    """Whether a name has an address here."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def own_address_towards(host: str) -> str:
    """This machine's address on the network that leads to `host`; its name where there is no way to tell."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # nothing is sent: the kernel only chooses the interface
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def check_port_is_free(port: int) -> None:
    """Raises UserError when something on this machine listens on `port`, or it may not be used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger do not count
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            reason = "is in use on this machine" if error.errno == errno.EADDRINUSE else f"{error.strerror}"
            raise UserError(f"--master_port: port {port} {reason}; give another one") from None


def _can_bind(family: int, address: object) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return True
    except OSError:
        return False
