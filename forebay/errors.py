"""Every error raised on purpose. A message names the thing, the two values that disagree, and the next command."""

from __future__ import annotations


class ForebayError(Exception):
    """Base of all errors raised by forebay; the command line prints its message without a traceback."""


class ConfigError(ForebayError, ValueError):
    """A config file or override is wrong: unknown field (with the nearest name), wrong type, impossible value."""


class ManifestError(ForebayError, ValueError):
    """A manifest cannot be used as a whole; the message names file, row and column."""


class MissingExtraError(ForebayError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class SampleError(ForebayError):
    """One sample cannot be used; the build counts it by `reason` and goes on.

    reason: a snake_case word, equal for all samples that fail in one way (`corrupt_audio`, `missing_member`, ...).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[SampleError], tuple[str, str]]:
        return type(self), (self.reason, str(self))


class DecodeError(SampleError):
    """The audio of one sample cannot be decoded, or is not what its header claims."""


class TextError(SampleError):
    """The text of one sample cannot be used (empty, over `max_label_tokens`, ...)."""


class TarError(ForebayError):
    """A tar file or one of its members cannot be read; names the tar, the member and the offset."""


class PlanError(ForebayError, ValueError):
    """A plan cannot be made from these lengths and settings."""


class BuildError(ForebayError):
    """A build stopped; what was finished is kept, and the message says how to go on."""


class CacheError(ForebayError):
    """A cache cannot be used."""


class CacheNotFoundError(CacheError, FileNotFoundError):
    """No cache answers the key; names the folder searched and the nearest cache with its differing field."""


class CacheIncompleteError(CacheError):
    """A cache folder is not sealed; says how many shards are there and how to resume."""


class CacheMismatchError(CacheError):
    """A stored value is not the wanted one; names the field and both values."""


class CacheCorruptError(CacheError):
    """Bytes on disk are not the bytes written; names file, offset, stored and computed checksum."""


class CacheReplacedError(CacheError):
    """An open cache was rebuilt or removed, and what is asked for is gone with its old folder, which is named."""


class RemoteError(ForebayError):
    """A store of the network did not give or take what was asked; names bucket, key and what it answered."""


class RemoteMissingError(RemoteError, FileNotFoundError):
    """A store has no object of this name."""


class RemoteExistsError(RemoteError):
    """A store has an object of this name already, and it was to be made anew."""


class RemoteDeniedError(RemoteError):
    """A store knows who asks, or that nobody does, and refuses."""


class RemoteReplacedError(RemoteError):
    """An object was replaced while it was read, or is not the one that was asked for; names both etags."""


class ResumeError(ForebayError):
    """A loader or training state cannot be continued, and why."""
