#!/bin/bash
# LeNet5_Digits; submit it: sbatch job.sh
# time: a note
#SBATCH --job-name=lenet5-digits
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=2
#SBATCH --mem-per-cpu=1536M
#SBATCH --gpus-per-task=H100:2
#SBATCH --time=92
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

srun --cpus-per-task=2 \
    apptainer exec --nv team/image:1 \
    python -m pipeline +recipe=lenet5_digits train.resume=auto 'note=it'"'"'s "$(id)" `id` $HOME {{x}} #a: b' -x 'a\b' 'ü€😀' '' %s '<&>'
status=$?
# 75: stopped with a checkpoint.
if [ $status -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
