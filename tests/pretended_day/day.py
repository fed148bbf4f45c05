"""`make gpu` where sitecustomize.py is: with time enough for a CPU, and of the longest stages a part.

Its last argument is the folder of the results, in which the wheels are too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import gpu  # noqa: E402

# test_kernels.py has all numbers; and workflows with all kinds of inputs
CHOSEN = {"kernels": "bfloat16 and rms_norm", "templates in ComfyUI": "1K or Sprint or Gemma"}
LONGER = 30
folder = Path(sys.argv[-1])
gpu.WHEELS, gpu.SITE = folder / "wheels", folder / "site"
gpu.STAGES = tuple(
    (name, (*words, "-k", CHOSEN[name]) if name in CHOSEN else words, LONGER * most) for name, words, most in gpu.STAGES
)
sys.exit(gpu.main())
