"""A cluster draws the bits of `generate`, in the cases of tests/graph/test_ways.py."""

import pytest
from machines import add_node
from ways import CASES, POSTERS, REFERENCES, check, options

import sana_core

# an actor has one core
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("reference", REFERENCES)
def test_a_cluster_draws_what_generate_draws(lasting_cluster, reference):
    if not lasting_cluster.worker_nodes:
        add_node(lasting_cluster)
    groups = {}
    for case in CASES:
        if not case.sprint and not case.control:
            groups.setdefault(str(options(case, reference)), []).append(case)
    for cases in groups.values():
        # pictures of one prompt each, with the same seed
        prompts, settings = [case.prompt for case in cases], options(cases[0], reference)
        remote = sana_core.generate(prompts, POSTERS, cluster=lasting_cluster.address, **settings)
        for case, picture, expected in zip(
            cases, remote, sana_core.generate(prompts, POSTERS, **settings), strict=True
        ):
            check("generate --cluster", case, reference, picture, expected)
