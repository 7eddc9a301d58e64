"""Profiles of AWS: what `~/.aws/config` and `~/.aws/credentials` say. obstore does not read these files."""

from __future__ import annotations

import configparser
import os
from dataclasses import dataclass, field
from pathlib import Path

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
    """What the two files say of one profile.

    is_named: AWS_PROFILE names it. has: names of its fields. keys: None where the files hold none.
    """

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
    """Returns the profile that AWS_PROFILE names, or `default`, which may be empty.

    Raises ConfigError where a file cannot be read.
    """
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
