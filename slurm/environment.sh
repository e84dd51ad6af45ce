# Sourced by all scripts of this folder: where Python is, and how a job goes back to the queue.
# shellcheck shell=bash

# ---- Put here what makes Python run on your cluster ----------------------------------------------------------------
# module load python/3.11 cuda/13.0
# A container: PYTHON="apptainer exec --nv /path/to/image.sif python"
PYTHON=${PYTHON:-.venv/bin/python}
# Where nodes are really apart and `doctor` says that their names lead to themselves, name the interface between them:
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
# --------------------------------------------------------------------------------------------------------------------

set -uo pipefail

# Relative paths of recipes are those of the folder that the job was submitted from.
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if [[ ! -d pipeline || ! -d slurm ]]; then
    echo "$PWD: is not the project's folder; submit from there: cd PROJECT && sbatch slurm/..." >&2
    exit 2
fi
read -r -a python <<<"$PYTHON"

# srun does not take this from the job by itself.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export PYTHONUNBUFFERED=1

# Lines of this script in the log, told from those of the ranks.
say() { echo "$(date '+%F %T') ${SLURM_JOB_NAME:-} ${SLURM_JOB_ID:-}: $*" >&2; }

# Run a step on all tasks, or with `one` on one, and wait for it, past signals: what they ask for is up to the step.
# The first task that ends badly ends the step.
step() {
    local only=()
    if [[ $1 == one ]]; then only=(--nodes=1 --ntasks=1 --gpus-per-node="${SLURM_GPUS_ON_NODE:-0}"); shift; fi
    srun --kill-on-bad-exit=1 "${only[@]}" "${python[@]}" -m pipeline "$@" &
    local pid=$! code
    while true; do
        wait "$pid"
        code=$?
        kill -0 "$pid" 2>/dev/null || return "$code"
    done
}

# Called with what a step of this script has ended with: 0 goes on, a user's mistake ends the job, and anything else
# (75 is a run that was asked to stop, has saved, and can go on) puts it back into the queue, to start from the top.
go_on_or_hand_back() {
    local code=$1
    [[ $code -ne 0 ]] || return 0
    if [[ $code -eq 2 || -e $MISTAKE_FILE ]]; then
        rm -f "$MISTAKE_FILE"
        say "ended by the mistake above; not requeued"
        exit 2
    fi
    # An array's last task has the array's own number: that would requeue all of them.
    local job=$SLURM_JOB_ID
    [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    # A job that its owner cancels ends too, and is to stay so.
    local state
    state=$(squeue --noheader --jobs="$job" --format='%T %r')
    if [[ $state == CANCELLED* || $state == "COMPLETING None" ]]; then
        say "cancelled (exit code $code)"
        exit "$code"
    fi
    say "exit code $code; requeued"
    scontrol requeue "$job" || say "could not be requeued; submit it again, it goes on where it was"
    exit "$code"
}

# Bash ends no script before the step it waits for has saved.
trap : TERM USR1
# srun's exit code may be that of tasks it has killed; a mistake is told by this file.
export MISTAKE_FILE=$PWD/.mistake-$SLURM_JOB_ID
rm -f "$MISTAKE_FILE"
