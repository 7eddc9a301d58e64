"""Every error raised on purpose. A message names the thing, the two values that disagree, and the next command.

Each error has a stable `code`: that of its class, or a finer one that the place which raises gives (`code="FB101"`).
`forebay explain CODE` prints what forebay/errors.md says of a code. A code never gets another meaning.
"""

from __future__ import annotations


class ForebayError(Exception):
    """Base of all errors raised by forebay; the command line prints its message without a traceback, and its code.

    code: what `forebay explain` knows; it is no part of the message, and pickles keep it.
    """

    code = "FB000"

    def __init__(self, *args: object, code: str | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code


class ConfigError(ForebayError, ValueError):
    """A config file or override is wrong: unknown field (with the nearest name), wrong type, impossible value."""

    code = "FB100"


class ManifestError(ForebayError, ValueError):
    """A manifest cannot be used as a whole; the message names file, row and column."""

    code = "FB200"


class MissingExtraError(ForebayError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""

    code = "FB112"


class SampleError(ForebayError):
    """One sample cannot be used; the build counts it by `reason` and goes on.

    reason: a snake_case word, equal for all samples that fail in one way (`corrupt_audio`, `missing_member`, ...).
    """

    code = "FB220"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[SampleError], tuple[str, str]]:
        return type(self), (self.reason, str(self))


class DecodeError(SampleError):
    """The audio of one sample cannot be decoded, or is not what its header claims."""

    code = "FB221"


class TextError(SampleError):
    """The text of one sample cannot be used (empty, over `max_label_tokens`, ...)."""

    code = "FB222"


class TarError(ForebayError):
    """A tar file or one of its members cannot be read; names the tar, the member and the offset."""

    code = "FB210"


class PlanError(ForebayError, ValueError):
    """A plan cannot be made from these lengths and settings."""

    code = "FB500"


class BuildError(ForebayError):
    """A build stopped; what was finished is kept, and the message says how to go on."""

    code = "FB300"


class CacheError(ForebayError):
    """A cache cannot be used."""

    code = "FB400"


class CacheNotFoundError(CacheError, FileNotFoundError):
    """No cache answers the key; names the folder searched and the nearest cache with its differing field."""

    code = "FB401"


class CacheIncompleteError(CacheError):
    """A cache folder is not sealed; says how many shards are there and how to resume."""

    code = "FB402"


class CacheMismatchError(CacheError):
    """A stored value is not the wanted one; names the field and both values."""

    code = "FB403"


class CacheCorruptError(CacheError):
    """Bytes on disk are not the bytes written; names file, offset, stored and computed checksum."""

    code = "FB410"


class FormError(CacheError, ValueError):
    """A cache declares batches as forebay never writes them; says what was wanted, and what is there."""

    code = "FB141"


class CacheReplacedError(CacheError):
    """An open cache was rebuilt or removed, and what is asked for is gone with its old folder, which is named."""

    code = "FB420"


class RemoteError(ForebayError):
    """A store of the network did not give or take what was asked; names bucket, key and what it answered."""

    code = "FB600"


class RemoteMissingError(RemoteError, FileNotFoundError):
    """A store has no object of this name."""

    code = "FB601"


class RemoteExistsError(RemoteError):
    """A store has an object of this name already, and it was to be made anew."""

    code = "FB602"


class RemoteDeniedError(RemoteError):
    """A store knows who asks, or that nobody does, and refuses."""

    code = "FB603"


class RemoteReplacedError(RemoteError):
    """An object was replaced while it was read, or is not the one that was asked for; names both etags."""

    code = "FB604"


class ResumeError(ForebayError):
    """A loader or training state cannot be continued, and why."""

    code = "FB510"
