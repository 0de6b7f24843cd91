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
#SBATCH --requeue
#SBATCH --open-mode=append
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280 # seconds from TERM to KILL (30): an iteration and a save
run=outputs/slurm/$SLURM_JOB_ID # on a disk that all nodes share; the same one when queued again
if [ -e "$run/config.yaml" ]; then set -- "resume=$run"; else set -- "$@" "output_dir=$run"; fi
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=0 "${TORCHRUN:-.venv/bin/torchrun}" --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \
    --rdzv-endpoint "$first:${MASTER_PORT:-29500}" "${TRAIN:-train.py}" "$@"
code=$?
# "running" is a run that was killed; after five kills look at its log.
if grep -q '"state": "preempted"' "$run/status.json" ||
    { grep -q '"state": "running"' "$run/status.json" && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
