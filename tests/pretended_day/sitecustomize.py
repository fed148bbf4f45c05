"""A machine with two small GPUs, for `make gpu`: each Python that has this folder on its path has them from its start.

They are those of `pretend_card`, so that all that is run computes, on a CPU. What would take that one hours is smaller,
and kernels run in Triton's interpreter where they are looked at one by one.
"""

import os
import sys
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]
words = sys.orig_argv
# Triton asks at import
kernels = "--figure" in words or "tests/unit/kernel_numbers.py" in words
if kernels:
    os.environ["TRITON_INTERPRET"] = "1"
coverage.process_startup()
sys.path += [str(ROOT), str(ROOT / "tests")]

from pretend_card import pretend_cards  # noqa: E402

cards = pretend_cards(2, total=3 * 10**9)
cards.__enter__()

import torch  # noqa: E402

from sana_core.kernels import trial  # noqa: E402

# Dynamo asks for a driver; tests/unit/test_compile.py compiles
torch.compile = lambda model, **options: model
# what is recorded is computed again
torch.cuda.make_graphed_callables = lambda function, sample: function
if kernels:
    import interpreted

    interpreted.install()
if "tests/unit/kernel_numbers.py" not in words:
    # a step would take minutes
    trial.TRIALS.clear()
if "--figure" in words:
    import functools

    from transformers import Gemma2Config

    from benchmarks import sampling_gpu
    from sana_core.doctor import arithmetic, figures, report
    from sana_core.model.known_models import VARIANTS

    sampling_gpu.SIDE, sampling_gpu.RUNS = 256, 1
    arithmetic.SIDE = 4
    VARIANTS["0.6B"] = VARIANTS["1.6B"] = VARIANTS["0.6B"]._replace(layers=1)
    figures.STEPS, figures.DECODES = {True: (("1.6B", 128),)}, {True: (128,)}
    narrow = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 100}
    Gemma2Config.__init__ = functools.partialmethod(Gemma2Config.__init__, **narrow)
    arithmetic.kernels_on = lambda device, dtype: {"linear_attention"}
    # however slow the CPU is
    report.Report.late = lambda report, section, what: False
