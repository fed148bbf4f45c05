"""A short run of tests/soak/cancelled_queues.py: random queues that are cancelled, fail, or give the right image."""

import pytest
from test_several_gpus import save_files

from tests.soak.cancelled_queues import run_parts


@pytest.mark.usefixtures("one_thread")
def test_thirty_random_queues_leave_every_model_where_comfyui_lists_it(host):
    files = save_files(host)
    try:
        ended = run_parts(host, parts=3, queues=10, seed=11, gpus=(0, 0, 2))
    finally:
        for file in files:
            file.unlink()
    assert sum(ended.values()) == 30 and ended["interrupted"] and ended["finished"]
