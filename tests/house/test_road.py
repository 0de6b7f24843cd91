"""The road: what a run loads. TorchRL's rooms and features of other runs stand beside it."""

import json
import subprocess
import sys

from support.runs import ROOT

RUN = """
import sys, train
sys.argv = ["train.py", "experiment=grpo_tiny", "policy.model=tiny", "trainer.num_iterations=1"]
sys.argv += ["trainer.prompts_per_iteration=2", "algorithm.group_size=2", "eval.every=0"]
sys.argv += ["policy.max_new_tokens=4", "launch.in_process=true", "output_dir=" + {folder!r}]
assert train.main() == 0
import json; print(json.dumps(sorted(sys.modules)))
"""


# Rooms and files of features that this run does not have.
BESIDE = (".torchrl", ".dry_run", ".lora", ".shard", "envs.data", "sweep", "conf.modes")
BESIDE += ("conf.resume", "unknown_names", "next_turn", "experiment_models")


def test_a_run_loads_no_feature_that_it_lacks(tmp_path):
    code = RUN.format(folder=str(tmp_path / "run"))
    out = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    loaded = json.loads(out.splitlines()[-1])
    assert "trainer.update" in loaded
    rooms = ("conf", "envs", "policies", "trainer")
    ours = [name for name in loaded if name.partition(".")[0] in rooms]
    assert not [name for name in ours if any(part in name for part in BESIDE)]
