"""What workers of benchmarks/host_bound.py import as `sana_core`: the real package, with a fake Triton driver."""

import os

from benchmarks import ROOT

__path__ = [str(ROOT / "sana_core")]

from benchmarks.fake_triton import install  # noqa: E402

install(float(os.environ["FAKE_TRITON_SPEED"]))
