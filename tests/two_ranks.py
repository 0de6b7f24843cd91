"""A script for two ranks, which start once: gradients of invariance.py, whole runs of sharded.py.

The folder has the runs of one rank in one/, and gets gradients.safetensors and the runs in many/.
"""

import sys
from pathlib import Path

import invariance
import sharded

from trainer.runtime import Runtime

if __name__ == "__main__":
    place = Path(sys.argv[1])
    with Runtime(place) as both:
        invariance.write(place, both)
        for case in sharded.FEW:
            sharded.run(case, place / "many" / case, place / "model", ranks=2)
        both.accelerator.wait_for_everyone()
        both.accelerator.end_training()
