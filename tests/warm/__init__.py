"""A Python whose processes start in milliseconds.

A process that trains or builds loads torch, transformers and accelerate: 2 to 6 s of CPU before its first line runs,
and the tests start some hundreds of them. So a server (`tests.warm.server`) loads all of it once, runs nothing itself,
and forks. What takes the place of `sys.executable` is a small program (`tests.warm.client`): it hands its arguments,
environment, folder and open files to the server, hands on the signals that it gets, and ends as the process ends.
Workers of a pool (`tests.warm.worker`) ask the server without a program between.

Each is a real process, with its own exit status, signals, memory and files. It differs from a cold one in what is
loaded, in what Python reads at its start, and in that `os.fsync` waits for no disk; so a process whose environment
differs there, that has a sitecustomize.py or takes other options than `-c`, `-m` and `-u` starts cold. With
FOREBAY_TEST_COLD=1 all start cold (`make test COLD=1`, `make test-wide`, `make faults`), and `tests/test_cold.py`
starts each kind of them cold always.
"""
