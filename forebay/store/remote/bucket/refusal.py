"""Errors of a request: whether asking again may help, and forebay's error, with what the user needs."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from forebay.config.remote import Url, origin
from forebay.errors import RemoteDeniedError, RemoteError, RemoteExistsError, RemoteMissingError, RemoteReplacedError
from forebay.store.remote.bucket.access import Access

_STATUS = re.compile(r"status code: ([0-9]{3})([^:\n]*)")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_CLOCKS = re.compile(r"<(RequestTime|ServerTime)>([0-9TZ:. -]{8,40})</")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*([A-Za-z]+)")
_SYSTEM = re.compile(r'(?:message|error): "([^"]{1,200})"')
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S*")
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_CODES_AGAIN = frozenset({"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "RequestLimitExceeded"})
_SKEWED = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})


class EndedEarlyError(Exception):
    """A body had fewer bytes than its head said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """An error of obstore, read. status, code: of the answer, 0 and "" where none came. words: without any secret."""

    status: int
    code: str
    words: str
    clocks: dict[str, str]
    is_network: bool
    is_token_request: bool

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be answered in a while."""
        return self.is_network or self.status in _AGAIN or self.code in _CODES_AGAIN

    def reached(self, at: int, stop: int) -> Refusal:
        """Returns the refusal of a body that broke off: its words say which byte was reached, of how many."""
        if not (self.is_network and stop):
            return self
        return replace(self, words=f"{self.words}, at byte {at} of {stop}")


def read_refusal(err: BaseException, *, timeout_s: float, secrets: set[str]) -> Refusal:
    """Returns what an error of obstore says. An answer's body may hold tokens: only its code and message are taken."""
    text = str(err)
    head = text.partition("\n\nDebug source")[0]
    status, code, message = _STATUS.search(head), _CODE.search(head), _MESSAGE.search(head)
    is_network = isinstance(err, EndedEarlyError) or (status is None and "HTTP error" in head)
    certificate = _CERTIFICATE.search(text) if is_network else None
    if status is not None:
        words = f"{status[1]}{status[2].rstrip()}"
        told = ": ".join(one[1] for one in (code, message) if one)
        words += f" ({told})" if told else ""
    elif certificate is not None:
        words, is_network = f"its certificate is refused ({certificate[1]})", False
    elif is_network:
        words = _network_words(text, timeout_s)
    else:
        words = head.splitlines()[0][:300] if head else type(err).__name__
    return Refusal(
        status=int(status[1]) if status else 0,
        code=code[1] if code else "",
        words=redacted(words, secrets),
        clocks=dict(_CLOCKS.findall(text)),
        is_network=is_network,
        is_token_request="token request" in head or "169.254." in head,
    )


def redacted(text: str, secrets: set[str]) -> str:
    """Returns a text without the query of any URL in it, which may be signed, and without the secrets."""
    text = _QUERY.sub(r"\1", text)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def error_of(refusal: Refusal, where: Url, access: Access, *, tries: int = 1) -> RemoteError:
    """Returns the error that the user sees: bucket and key, what was answered, as whom it was asked, what to do."""
    asked = f"asked at {access.place} as {access.identity}"
    if refusal.code in _SKEWED:
        clocks = _clocks(refusal, access)
        return RemoteError(
            f"{where}: {refusal.words}: {clocks}; set the clock of this machine: timedatectl set-ntp true", code="FB606"
        )
    if refusal.is_token_request:
        return RemoteError(
            f"{where}: no credentials: the environment and the profile have none, and this machine has no role "
            f"({refusal.words}); set {_CREDENTIALS[where.scheme]}, or remote.anonymous = true for a public bucket",
            code="FB605",
        )
    if refusal.code in _EXPIRED:
        return RemoteError(
            f"{where}: {refusal.words}: the credentials have expired; {asked}; log in again", code="FB605"
        )
    if refusal.status in (401, 403):
        return RemoteDeniedError(f"{where}: denied, {refusal.words}; {asked}; {_allow(access)}")
    if refusal.status == 404:
        found = f": there is no bucket {where.bucket}" if refusal.code == "NoSuchBucket" else " is not there"
        return RemoteMissingError(f"{where}{found} ({refusal.words}; {asked}); name another URL")
    if refusal.status in (301, 307, 400) and access.region is None and where.scheme == "s3":
        return RemoteError(f"{where}: {refusal.words}; {asked}; if the bucket is elsewhere, set remote.region")
    if "certificate" in refusal.words and not refusal.status:
        trust = "set SSL_CERT_FILE to a file of the authority that signed it"
        return RemoteError(f"{where}: {refusal.words}; {asked}; {trust}")
    if not refusal.may_pass:
        return RemoteError(f"{where}: {refusal.words}; {asked}; check the URL and [remote]")
    times = "once" if tries == 1 else f"{tries} times"
    return RemoteError(f"{where}: {refusal.words}; asked {times}; {asked}; {_LATER}", code="FB607")


def replaced(where: Url, *, wanted: str, found: str) -> RemoteReplacedError:
    """Returns the error for an object that is another one than before."""
    return RemoteReplacedError(
        f"{where} was replaced: its etag is {found if found not in ('', wanted) else 'another one'}, wanted {wanted}; "
        "start again, so that all is read of one version"
    )


def exists(where: Url) -> RemoteExistsError:
    """Returns the error for an object that was to be made and is there."""
    return RemoteExistsError(f"{where} is there already, made by somebody else; read that, or name another URL")


_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_LATER = (
    "try again later, or set remote.retries and remote.timeout_s higher; a loop goes on at the next batch by "
    "loader.load_state_dict(loader.state_dict()), else `for` begins the epoch"
)


def _allow(access: Access) -> str:
    if access.is_anonymous:
        return "set credentials and remote.anonymous = false if the bucket is not public"
    return "ask the bucket's owner for the right, or choose other credentials by AWS_PROFILE or the environment"


def _clocks(refusal: Refusal, access: Access) -> str:
    here = refusal.clocks.get("RequestTime") or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    there = refusal.clocks.get("ServerTime") or _clock_of(access.endpoint)
    return f"the clock of this machine says {here}, that of the store {there or 'is not told'}"


def _clock_of(endpoint: str | None) -> str:
    """Returns the date in a store's answer to a request without key or credentials; empty where it has none."""
    if endpoint is None:
        return ""
    import http.client

    scheme, host, port = origin(endpoint)
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    try:
        with contextlib.closing(kind(host, port, timeout=5.0)) as connection:
            connection.request("HEAD", "/")
            return (connection.getresponse().getheader("Date") or "")[:40]
    except (OSError, http.client.HTTPException):
        return ""


def _network_words(text: str, timeout_s: float) -> str:
    if "kind: Timeout" in text or "TimedOut" in text:
        return f"not a byte for remote.timeout_s = {timeout_s:g} s"
    if "IncompleteBody" in text or "UnexpectedEof" in text:
        return "the body ended early"
    if "IncompleteMessage" in text:
        return "the connection ended before an answer"
    found = _SYSTEM.findall(text)
    return found[-1] if found else text.partition("\n")[0].rpartition(" - ")[2][:300]
