"""What sockets take of a host."""

from __future__ import annotations

import resource

from zeroshard.system.this_host import raise_file_limit


def test_the_soft_limit_of_open_files_is_raised_and_never_lowered() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        raise_file_limit()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raised == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
