"""Which paths of a config are URLs, and which URLs forebay opens. Nothing here reaches a network."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from forebay.errors import ConfigError

SCHEMES = ("s3", "gs", "az", "https", "http")
"""Schemes that a store of the network answers. `file://` is a local path by another name."""

ALLOW_HTTP = "FOREBAY_ALLOW_HTTP"
"""Environment variable by which a user, not a config, allows plain http beyond this machine: set to 1."""


@dataclass(frozen=True, slots=True)
class Url:
    """A place in a store: `scheme://bucket/key`.

    bucket: bucket or container; of https the host, with its port. key: without a slash at either end.
    """

    scheme: str
    bucket: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.key}" if self.key else "")

    def __truediv__(self, name: str) -> Url:
        """The place of this name below. Raises ConfigError for a name that leads out."""
        parts = name.split("/")
        if not name or name.startswith("/") or any(part in ("", ".", "..") for part in parts):
            raise ConfigError(f"{name!r} is no name below {self}: names have no '.', '..' or empty parts")
        return Url(self.scheme, self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part of the key, or the bucket where there is no key."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> Url:
        """The place above. That of a bucket is the bucket."""
        return Url(self.scheme, self.bucket, self.key.rpartition("/")[0])


def is_url(text: object) -> bool:
    """Returns whether a path of a config is a URL of a store, and no local path."""
    return isinstance(text, str) and text.partition("://")[0].lower() in SCHEMES and "://" in text


def local_path(text: str) -> str:
    """Returns the path that a `file://` URL names, and any other text as it is. Raises ConfigError for another host."""
    if text[:7].lower() != "file://":
        return text
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{text} names the host {parts.netloc!r}; file:// is of this machine: file:///folder")
    return unquote(parts.path)


_COLLAPSED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)", re.IGNORECASE)


def place_of(path: str | os.PathLike[str]) -> str:
    """Returns the URL of a store, or the local path, that a string or a Path names.

    Raises ConfigError as `parse_url` does, and for a Path that was made of a URL: it has lost one of the two slashes.
    """
    text = os.fspath(path)
    if is_url(text):
        return str(parse_url(text))
    if _COLLAPSED.match(text):
        raise ConfigError(
            f"{text!r} is what a Path makes of a URL: two slashes become one; give a string: "
            f"{text.replace(':/', '://', 1)!r}"
        )
    return local_path(text)


def parse_url(text: str) -> Url:
    """Returns the place that a URL names.

    Raises ConfigError for another scheme, for no bucket, for credentials or a query inside of it, for a name that leads
    out, and for a host that forebay does not ask: see `check_host`.
    """
    parts = urlsplit(text)
    scheme = parts.scheme.lower()
    if scheme not in SCHEMES:
        raise ConfigError(f"{_shown(text)} is no URL of a store; wanted one of {', '.join(s + '://' for s in SCHEMES)}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"{_shown(text)} holds a user, a query or a fragment; a URL of a config holds no credentials: they come "
            "from the environment or the profile"
        )
    if not parts.netloc:
        raise ConfigError(f"{_shown(text)} names no bucket; for example {scheme}://bucket/folder")
    if scheme in ("http", "https"):
        check_host(text)
    url = Url(scheme, parts.netloc)
    key = (unquote(parts.path) if scheme in ("http", "https") else parts.path).strip("/")
    return url / key if key else url


def check_host(endpoint: str) -> None:
    """Raises ConfigError for a host that is never asked, and for plain http to another machine.

    Link-local addresses (169.254.0.0/16, fe80::/10) answer with the machine's own credentials at many providers. Plain
    http is for this machine, or for a user who sets FOREBAY_ALLOW_HTTP=1.
    """
    parts = urlsplit(endpoint)
    host = (parts.hostname or "").rstrip(".").lower()
    address = _address(host)
    if not host:
        raise ConfigError(f"{_shown(endpoint)} names no host; for example https://storage.example.com")
    if (address is not None and address.is_link_local) or host in ("metadata.google.internal", "metadata"):
        raise ConfigError(f"{_shown(endpoint)}: {host} is a link-local address, which no store has")
    is_loopback = host == "localhost" or (address is not None and address.is_loopback)
    if parts.scheme.lower() == "http" and not is_loopback and os.environ.get(ALLOW_HTTP) != "1":
        raise ConfigError(
            f"{_shown(endpoint)}: plain http to {host}; anybody on the way can read and change what is sent: use "
            f"https, or set {ALLOW_HTTP}=1 in the environment"
        )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the address that a host is written as, also in the short and the numeric forms that resolvers take."""
    import socket

    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        try:
            return ipaddress.ip_address(socket.inet_aton(host))
        except OSError:
            return None
    mapped = getattr(found, "ipv4_mapped", None)
    return mapped or found


def _shown(text: str) -> str:
    """A URL without what may be a secret in it."""
    parts = urlsplit(text)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
