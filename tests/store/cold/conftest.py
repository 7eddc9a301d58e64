"""The object store of the tests of stores."""

from tests.remote.conftest import bucket, environment, proxy, server

__all__ = ["bucket", "environment", "proxy", "server"]
