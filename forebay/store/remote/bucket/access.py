"""Who is asked, and as whom: the address of a store, and the credentials that are sent there and nowhere else.

A config is written by anybody, the environment and the profile by the user. So credentials go to the provider's own
hosts, and to an address that the environment or the profile names. An address that only a config names is asked
without any.

Profiles of AWS: what `~/.aws/config` and `~/.aws/credentials` say. obstore does not read these files.
"""

from __future__ import annotations

import configparser
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from forebay.config.remote import RemoteConfig, Url, check_endpoint, check_host, host_of, is_refused, origin
from forebay.errors import ConfigError

_FILES = (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials"))
_ELSEWHERE = ("sso_session", "sso_start_url", "role_arn", "credential_process", "web_identity_token_file")
"""Fields of profiles whose keys are made by a command of AWS, not read from a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """Keys of a profile. They never show."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A profile of the two files. is_named: AWS_PROFILE names it. has: names of its fields. keys: None without any."""

    name: str
    is_named: bool
    has: tuple[str, ...]
    region: str | None = None
    endpoint: str | None = None
    keys: Keys | None = field(default=None, repr=False)

    def required_keys(self) -> Keys:
        """Returns the keys. Raises ConfigError where the files hold none, or no such profile."""
        if self.keys is not None:
            return self.keys
        files = " and ".join(map(str, _paths()))
        if not self.has:
            raise ConfigError(
                f"AWS_PROFILE names the profile {self.name!r}, which is not in {files}; "
                f"run: aws configure --profile {self.name}"
            )
        made = [one for one in _ELSEWHERE if one in self.has]
        because = f"it has {made[0]}, whose keys a command makes" if made else f"it has {', '.join(self.has)}"
        raise ConfigError(
            f"the profile {self.name!r} has no aws_access_key_id and aws_secret_access_key in {files}: {because}; run: "
            f'eval "$(aws configure export-credentials --profile {self.name} --format env)"'
        )


def read_profile() -> Profile:
    """Returns the profile that AWS_PROFILE names, or `default`, perhaps empty; ConfigError for an unreadable file."""
    named = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    name = named or "default"
    config, credentials = _paths()
    # The file of credentials wins, as it does in AWS's own tools.
    values = _section(config, "default" if name == "default" else f"profile {name}") | _section(credentials, name)
    return Profile(
        name=name,
        is_named=bool(named),
        has=tuple(sorted(values)),
        region=values.get("region"),
        endpoint=values.get("endpoint_url"),
        keys=_keys(values),
    )


def _paths() -> list[Path]:
    return [Path(os.environ.get(variable) or Path.home() / ".aws" / file).expanduser() for variable, file in _FILES]


def _keys(values: dict[str, str]) -> Keys | None:
    key, secret = values.get("aws_access_key_id"), values.get("aws_secret_access_key")
    if not key or not secret:
        return None
    return Keys(access_key_id=key, secret_access_key=secret, session_token=values.get("aws_session_token") or None)


def _section(path: Path, name: str) -> dict[str, str]:
    """Returns one section of an ini file, empty where there is no such file or section."""
    parser = configparser.RawConfigParser(default_section="", strict=False)
    try:
        parser.read_string(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except configparser.Error as err:
        # The message of the parser quotes lines, and a line may hold a key.
        raise ConfigError(f"{path} is no ini file ({type(err).__name__}); run: aws configure") from None
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path} cannot be read ({type(err).__name__}); run: ls -l {path}") from None
    return dict(parser[name]) if parser.has_section(name) else {}


_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables that name the address of a store, those that count more first."""
_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_AWS_REGION = r"[a-z]{2}(?:-[a-z]+)+-[0-9]"
_AWS = rf"(?:.+\.)?s3(?:-fips|-accelerate|-{_AWS_REGION})?(?:\.dualstack)?(?:\.{_AWS_REGION})?\.amazonaws\.com(?:\.cn)?"
_GOOGLE = r"(?:.+\.)?storage\.googleapis\.com|storage\.[a-z0-9-]+\.rep\.googleapis\.com"
_OWN = {"s3": re.compile(_AWS), "gs": re.compile(_GOOGLE)}
"""Hosts of the stores themselves. Other hosts of a provider's domain may be those of anybody who rents them."""
_AZURE_SERVICES = ("blob.core.windows.net", "dfs.core.windows.net")
_ROLE_VARIABLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_SECRET = re.compile(r"(AWS|GOOGLE|AZURE)_\w*(KEY|SECRET|TOKEN|SAS|PASSWORD)\w*(?<!_FILE)(?<!_PATH)", re.IGNORECASE)
_REREAD = timedelta(minutes=15)
"""Age at which the keys of a profile are read anew: tools that log in write new ones there while a run goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """How a store is asked.

    endpoint: its address; None: the provider's own. identity: words for whose credentials are sent. keys: those of the
    profile; None: those that obstore finds itself, or none at all where `is_anonymous`.
    """

    endpoint: str | None
    region: str | None
    identity: str
    is_anonymous: bool
    keys: Keys | None = field(default=None, repr=False)

    @property
    def place(self) -> str:
        """Words for the address."""
        return self.endpoint or "the provider's own address"


def decide(url: Url, settings: RemoteConfig) -> Access:
    """Returns how a store is asked. Raises ConfigError for an address that is named by a config alone, and signed."""
    if url.is_web:
        host = f"{url.scheme}://{url.bucket}"
        check_host(host)
        identity = "anonymous, as https:// URLs carry no credentials"
        return Access(endpoint=host, region=None, identity=identity, is_anonymous=True)
    unsigned = os.environ.get(f"{_PREFIXES[url.scheme]}_SKIP_SIGNATURE", "")
    is_anonymous = settings.anonymous or unsigned.lower() in ("1", "true", "yes", "on")
    profile = read_profile() if url.scheme == "s3" and not is_anonymous else None
    named = [os.environ[name] for name in _ENDPOINTS[url.scheme] if os.environ.get(name)]
    if profile is not None and profile.endpoint is not None:
        named.append(profile.endpoint)
    endpoint = settings.endpoint or next(iter(named), None)
    if endpoint is not None:
        check_endpoint(endpoint)
        if not is_anonymous:
            _check_trusted(url, endpoint, named)
    keys, identity = _identity(profile, is_anonymous=is_anonymous)
    is_region_set = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = settings.region or (None if is_region_set or profile is None else profile.region)
    return Access(endpoint=endpoint, region=region, identity=identity, is_anonymous=is_anonymous, keys=keys)


def check_resolved(endpoint: str) -> None:
    """Raises ConfigError for an address whose host leads to a link-local address now.

    A name that does not resolve passes: a proxy may know it, and else the request itself says so.
    """
    host = host_of(endpoint)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for *_, place in found:
        if is_refused(str(place[0])):
            raise ConfigError(
                f"{endpoint}: {host} leads to {place[0]}, a link-local address, which no store has; name another host"
            )


def store_options(url: Url, access: Access) -> dict[str, Any]:
    """Returns what obstore is told. What it would else read from the environment by itself is said outright."""
    if url.is_web:
        return {}
    found: dict[str, Any] = {"skip_signature": access.is_anonymous}
    if url.scheme == "gs":
        return found | ({"base_url": access.endpoint} if access.endpoint else {})
    if url.scheme == "az":
        found |= {"use_emulator": False, "account_name": _account(url, access.endpoint)}
        return found | ({"endpoint": access.endpoint} if access.endpoint else {})
    if access.endpoint:
        found |= {"endpoint": access.endpoint, "aws_endpoint_url_s3": access.endpoint}
    if access.region:
        found["region"] = access.region
    if access.is_anonymous and "AWS_SSE_CUSTOMER_KEY_BASE64" in map(str.upper, os.environ):
        # obstore would send the customer's own key with every request, signed or not.
        found["server_side_encryption"] = "AES256"
    if access.keys is not None:
        found["credential_provider"] = _provider(access.keys)
    return found


def client_options(access: Access, *, timeout_s: float) -> dict[str, Any]:
    """Returns how obstore's client connects. Certificates are always checked. timeout_s: time without a byte."""
    return {
        "allow_http": (access.endpoint or "")[:5].lower() == "http:",
        "allow_invalid_certificates": False,
        "connect_timeout": timedelta(seconds=min(timeout_s, 10.0)),
        "read_timeout": timedelta(seconds=timeout_s),
        # A time for a whole request would end a large object on a slow link.
        "timeout": timedelta(days=30),
    }


def secrets(access: Access) -> set[str]:
    """Returns values that no message may hold."""
    found = {value for name, value in os.environ.items() if _SECRET.fullmatch(name) and len(value) >= 4}
    if access.keys is not None:
        kept = (access.keys.access_key_id, access.keys.secret_access_key, access.keys.session_token)
        found |= {value for value in kept if value}
    return found


def _check_trusted(url: Url, endpoint: str, named: list[str]) -> None:
    if origin(endpoint) in map(origin, named) or _is_own(url, endpoint):
        return
    variable = _ENDPOINTS[url.scheme][0]
    raise ConfigError(
        f"{url}: remote.endpoint is {endpoint}, which neither the environment nor the profile names"
        + (f" (they name {', '.join(named)})" if named else "")
        + f"; credentials are sent to no address that only a config names: set {variable}={endpoint} in the "
        "environment if you trust it, or remote.anonymous = true"
    )


def _is_own(url: Url, endpoint: str) -> bool:
    scheme, host, port = origin(endpoint)
    if scheme != "https" or port != 443:
        return False
    if url.scheme == "az":
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        return account is not None and host in {f"{account}.{service}" for service in _AZURE_SERVICES}
    return _OWN[url.scheme].fullmatch(host) is not None


def _account(url: Url, endpoint: str | None) -> str:
    found = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not found and endpoint is not None:
        found = host_of(endpoint).partition(".")[0]
    if not found:
        raise ConfigError(f"{url}: no storage account; set AZURE_STORAGE_ACCOUNT_NAME in the environment")
    return found


def _identity(profile: Profile | None, *, is_anonymous: bool) -> tuple[Keys | None, str]:
    """Returns the profile's keys, where they are used, and words for whose credentials are sent."""
    if is_anonymous:
        return None, "anonymous"
    if profile is None or (os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY")):
        return None, "the environment"
    is_role = any(os.environ.get(name) for name in _ROLE_VARIABLES)
    if not profile.is_named and (is_role or profile.keys is None):
        return None, "the role of this machine"
    return profile.required_keys(), f"the profile {profile.name!r}"


def _provider(keys: Keys) -> Callable[[], dict[str, Any]]:
    """Returns what obstore calls for keys: at first those of now, later what the file says then."""
    first = [keys]

    def current() -> dict[str, Any]:
        keys_now = first.pop() if first else read_profile().keys or keys
        return {
            "access_key_id": keys_now.access_key_id,
            "secret_access_key": keys_now.secret_access_key,
            "token": keys_now.session_token,
            "expires_at": datetime.now(UTC) + _REREAD,
        }

    return current
