"""`[remote]`, and URLs: which paths of a config are one, and which of them forebay opens. No network is asked here."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit

from forebay.config.data import STRICT, at_least
from forebay.errors import ConfigError

SCHEMES = ("s3", "gs", "az", "https", "http")
"""Schemes that a store of the network answers. `file://` is a local path by another name."""
ALLOW_HTTP = "FOREBAY_ALLOW_HTTP"
"""Environment variable by which a user, not a config, allows plain http beyond this machine: set to 1."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""Names of buckets and containers. A name may become part of a host, so nothing that ends a host is in it."""
_PLACE = re.compile(r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)|\[(?P<v6>[0-9A-Fa-f:.]+)\])(?::(?P<port>[0-9]{0,5}))?")
"""Hosts as they are written, with a port. Other characters (percent signs, full-width digits, backslashes) lead some
readers of URLs to another host than others."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_METADATA = frozenset({"metadata.google.internal", "metadata", "instance-data"})
_METADATA_ADDRESSES = frozenset(
    ipaddress.ip_address(text) for text in ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192")
)
"""Addresses outside of the link-local ranges where providers hand out a machine's credentials."""


@dataclass(frozen=True, slots=True)
class Url:
    """A place, `scheme://bucket/key`. bucket: or container; of https host and port. key: no slash at either end."""

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
    def is_web(self) -> bool:
        """Whether a web server answers, which gives objects and lists none."""
        return self.scheme in ("http", "https")

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
    """Returns the path that a `file://` URL names, and any other text as it is.

    Raises ConfigError for another host, and for a scheme that no store has: a slip of the pen would be a folder here.
    """
    if text[:7].lower() != "file://":
        if (found := _SCHEME.match(text)) is not None:
            known = ", ".join(f"{scheme}://" for scheme in (*SCHEMES, "file"))
            raise ConfigError(
                f"{_shown(text)}: {found[1]}:// is of no store that forebay knows; known are {known}", code="FB111"
            )
        return text
    parts = _split(text)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"{text} names the host {parts.netloc!r}; file:// is of this machine: file:///folder", code="FB111"
        )
    return unquote(parts.path)


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)", re.IGNORECASE)


def url_or_path(path: str | os.PathLike[str]) -> str:
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
    parts = _split(text)
    scheme = parts.scheme.lower()
    if scheme not in SCHEMES:
        raise ConfigError(
            f"{_shown(text)} is no URL of a store; wanted one of {', '.join(s + '://' for s in SCHEMES)}", code="FB111"
        )
    _check_plain(text)
    if not parts.netloc:
        raise ConfigError(f"{_shown(text)} names no bucket; for example {scheme}://bucket/folder", code="FB111")
    if scheme in ("http", "https"):
        check_host(text)
    elif not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(
            f"{_shown(text)}: {parts.netloc!r} is no name of a bucket; such a name has letters, digits, dots, "
            "hyphens and underscores"
        )
    url = Url(scheme, parts.netloc)
    key = (unquote(parts.path) if scheme in ("http", "https") else parts.path).strip("/")
    return url / key if key else url


def check_host(endpoint: str) -> None:
    """Raises ConfigError for a host that is never asked, for plain http to another machine, and for credentials inside.

    Link-local addresses (169.254.0.0/16, fe80::/10) answer with the machine's own credentials at many providers. Plain
    http is for this machine, or for a user who sets FOREBAY_ALLOW_HTTP=1.
    """
    _check_plain(endpoint)
    host = host_of(endpoint)
    if host in _METADATA or is_refused(host):
        raise ConfigError(f"{_shown(endpoint)}: {host} is a link-local address, which no store has; name another host")
    if endpoint[:5].lower() == "http:" and not _is_loopback(host) and os.environ.get(ALLOW_HTTP) != "1":
        raise ConfigError(
            f"{_shown(endpoint)}: plain http to {host}; anybody on the way can read and change what is sent: use "
            f"https, or set {ALLOW_HTTP}=1 in the environment",
            code="FB111",
        )


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError for an address of a store that is no http:// or https:// one, or whose host is never asked."""
    if not endpoint.lower().startswith(("http://", "https://")):
        raise ConfigError(f"{_shown(endpoint)!r} is no address of a store; wanted https://host")
    check_host(endpoint)


def is_refused(host: str) -> bool:
    """Returns whether a host is an address, in whatever form, of a link-local range or of a metadata service."""
    address = _address(host)
    if address is None:
        return False
    return any(one.is_link_local or one in _METADATA_ADDRESSES for one in (address, *_inside(address)))


def origin(endpoint: str) -> tuple[str, str, int]:
    """Returns scheme, host and port of an address: two addresses with one origin are one server."""
    parts = _split(endpoint)
    scheme = parts.scheme.lower()
    return scheme, host_of(endpoint), parts.port or (80 if scheme == "http" else 443)


def host_of(endpoint: str) -> str:
    """Returns the host of an address, in small letters. Raises ConfigError where there is none, or no plain one."""
    place = _split(endpoint).netloc
    found = _PLACE.fullmatch(place)
    if not place:
        raise ConfigError(f"{_shown(endpoint)} names no host; for example https://storage.example.com")
    if found is None or int(found["port"] or 0) > 65535:
        raise ConfigError(f"{_shown(endpoint)} names no plain host; for example https://storage.example.com:9000")
    return (found["name"] or found["v6"]).rstrip(".").lower()


def _split(text: str) -> SplitResult:
    """Returns the parts of a URL. Raises ConfigError for control characters, which urlsplit would leave out."""
    if any(character < " " or character == "\x7f" for character in text):
        raise ConfigError(f"{_shown(text)!r} holds a control character; wanted scheme://host/path")
    try:
        return urlsplit(text)
    except ValueError as err:
        raise ConfigError(f"{_shown(text)} is no URL ({err}); wanted scheme://host/path") from None


def _check_plain(text: str) -> None:
    parts = _split(text)
    if "@" in parts.netloc or "?" in text or "#" in text:
        raise ConfigError(
            f"{_shown(text)} holds a user, a query or a fragment; a URL of a config holds no credentials: they come "
            "from the environment or the profile",
            code="FB111",
        )


def _is_loopback(host: str) -> bool:
    address = _address(host)
    mapped = getattr(address, "ipv4_mapped", None) or address
    return host == "localhost" or (mapped is not None and mapped.is_loopback)


def _address(host: str) -> _Address | None:
    """Returns the address that a host is written as, also in the short and the numeric forms that resolvers take."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.ip_address(socket.inet_aton(host))
    except OSError:
        return None


def _inside(address: _Address) -> list[_Address]:
    """Returns the IPv4 addresses that an IPv6 address stands for: mapped, compatible, 6to4, Teredo, NAT64."""
    if address.version == 4:
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if int(address) >> 32 == 0 or address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [one for one in found if one is not None]


def _shown(text: str) -> str:
    """A URL without what may be a secret in it: user, query and fragment."""
    scheme, _, rest = re.split(r"[?#]", text, maxsplit=1)[0].rpartition("://")
    _, at, shown = rest.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{shown}" if scheme else shown


GB = 1_000_000_000
LONGEST_PAUSE_S = 15.0
"""Before a request is made again."""
_REGION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""Regions become part of a host that gets credentials, so nothing that ends a host is in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteConfig:
    """How stores are asked, and what a node keeps of them. Run-time: in no key. Credentials stand in no config."""

    __pydantic_config__ = STRICT

    endpoint: str | None = None
    """Address of a store that is not the provider's own: R2, MinIO and others. Credentials are sent there only if the
    environment or the profile names it too."""
    region: str | None = None
    """Region of the bucket. Left out: that of the environment."""
    anonymous: bool = False
    """Requests are not signed: for public buckets."""
    shard_dir: str | None = field(default=None, metadata={"path": True})
    """Folder, on a local disk, of what this node keeps of stores. All runs of the node share it. Left out: `forebay`
    in `$XDG_CACHE_HOME` or `~/.cache`."""
    cache_size_gb: float = 500.0
    """Bound of that folder, in GB of 10^9 bytes. What is being downloaded counts."""
    max_concurrent: int = 8
    """Downloads of a process at once."""
    prefetch_shards: int = 4
    """Shards that are downloaded ahead of the batches that need them."""
    timeout_s: float = 60.0
    """Seconds without a byte after which a request is given up and tried again."""
    retries: int = 5
    """Times that a request is tried again, with growing pauses."""
    global_shuffle: Literal["refuse", "allow"] = "refuse"
    """What becomes of a plan that shuffles over more data than the node can keep, so that shards are downloaded many
    times. `refuse`: the run ends with the figures. `allow`: it goes on, with a warning."""

    def __post_init__(self) -> None:
        at_least(self, 1, "max_concurrent", "prefetch_shards")
        for name in ("cache_size_gb", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted more than 0")
        at_least(self, 0, "retries")
        if self.region is not None and not _REGION.fullmatch(self.region):
            raise ValueError(f"region is {self.region!r}, wanted small letters, digits and hyphens: eu-central-1")
        if self.endpoint is not None:
            try:
                check_endpoint(self.endpoint)
            except ConfigError as err:
                raise ValueError(f"endpoint: {err}") from err

    @property
    def folder(self) -> Path:
        """The node's folder, whether it is there or not."""
        if self.shard_dir is not None:
            return Path(self.shard_dir)
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay"

    @property
    def patience_s(self) -> float:
        """Seconds for which a request may be made again and again."""
        return (self.retries + 1) * self.timeout_s + self.retries * LONGEST_PAUSE_S

    @property
    def cache_size_bytes(self) -> int:
        """The bound in bytes."""
        return int(self.cache_size_gb * GB)
