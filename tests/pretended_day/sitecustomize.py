"""Two pretended GPUs for every Python that starts with this folder on its path, to rehearse `make gpu` on a CPU.

The tensors of `pretend_card` compute on the CPU. Kernels run in Triton's interpreter in the part that calls them one by
one, and nowhere else, since a step would take minutes.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTERPRETED = "--part kernels" in " ".join(sys.orig_argv)
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
sys.path += [str(ROOT), str(ROOT / "tests")]

from pretend_card import pretend_cards  # noqa: E402

import sana_core.engine.process  # noqa: E402, F401  # its processes become threads of this one

cards = pretend_cards(2, total=3 * 10**9)
cards.__enter__()

import torch  # noqa: E402

from sana_core.batch import pipeline  # noqa: E402
from sana_core.kernels import trial  # noqa: E402
from sana_core.sampling.step_graph import Recorder, Recording  # noqa: E402

if INTERPRETED:
    import interpreted

    interpreted.install()
else:
    trial.TRIALS.clear()
# Dynamo needs a driver, and only CUDA has CUDA graphs.
torch.compile = lambda model, **options: model


class ComputingRecorder(Recorder):
    """A replay computes the step again."""

    def __init__(self, device):
        self.device = device

    def run(self, work):
        return work()

    def waits_for_host(self):
        return True

    def capture(self, work):
        out = work()
        return Recording(lambda: out.copy_(work()), out)


pipeline.recorder_for = ComputingRecorder
