#!/bin/bash
#SBATCH --ntasks=2 --requeue --signal=TERM@120 --open-mode=append
# A job of SLURM that asks for its requeue after the run has saved. Arguments: Python, and those of
# train.py, the first of which is an absolute path.
trap "" TERM  # a preemption sends it to this shell too
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=1 "$1" train.py "${@:2}"
code=$?
state=$(scontrol show job "$SLURM_JOB_ID") # after scancel it is no longer running
if [ $code = 143 ] && [[ $state == *JobState=RUNNING* ]]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # SLURM ends the job in this time
fi
exit $code
