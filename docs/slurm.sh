#!/bin/bash
# One run on several nodes of Slurm: sbatch docs/slurm.sh experiment=grpo_qwen seed=1
# Tried without Slurm (tests/trainer/scale/test_nodes.py): see what your site needs.
#SBATCH --job-name=leash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1     # torchrun, which starts a rank a GPU; a task each would be a run each
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300       # five minutes before the end all ranks save and stop
#SBATCH --requeue               # after the failure of a node; then the run goes on
#SBATCH --open-mode=append
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280 # seconds from TERM to KILL (30): an iteration and a save
run=outputs/slurm/$SLURM_JOB_ID # on a disk that all nodes share; the same one when queued again
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=0 "${TORCHRUN:-.venv/bin/torchrun}" --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts 3 --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d --rdzv-endpoint "$first:${MASTER_PORT:-29500}" \
    "${TRAIN:-train.py}" "$@" "output_dir=$run"
code=$?
grep -q '"state": "preempted"' "$run/status.json" && scontrol requeue "$SLURM_JOB_ID" # saved in time
exit $code
