"""Stands for Python in a job's script: has the test's own process run the command, which has loaded torch already.

It sends its arguments and its environment to the socket `FAKE_SERVER`, and writes and ends as it is told.
"""

import os
import socket
import sys
from multiprocessing.connection import Client

if __name__ == "__main__":
    assert socket.AF_UNIX
    with Client(os.environ["FAKE_SERVER"], "AF_UNIX") as server:
        server.send((sys.argv[1:], dict(os.environ)))
        code, out, err = server.recv()
    sys.stdout.write(out)
    sys.stderr.write(err)
    sys.exit(code)
