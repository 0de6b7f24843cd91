#!/bin/bash
# One run on several nodes of Slurm: sbatch docs/slurm.sh experiment=grpo_qwen seed=1
# Tried without Slurm, by its variables (tests/scale/test_nodes.py): see what your site needs.
#SBATCH --job-name=leash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8     # a rank a GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300       # five minutes before the end all ranks save and stop, code 143
#SBATCH --requeue
#SBATCH --open-mode=append
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
run=outputs/slurm/$SLURM_JOB_ID # on a disk that all nodes share; the same one when queued again
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
if [ -e "$run/config.yaml" ]; then set -- "resume=$run"; else set -- "$@" "output_dir=$run"; fi
srun --kill-on-bad-exit=0 "${PYTHON:-.venv/bin/python}" "${TRAIN:-train.py}" "$@"
code=$?
[ $code != 143 ] || scontrol requeue "$SLURM_JOB_ID"
exit $code
