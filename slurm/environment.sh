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

# Lines of this script in the log, told from those of the ranks.
say() { echo "$(date '+%F %T') ${SLURM_JOB_NAME:-} ${SLURM_JOB_ID:-}: $*" >&2; }

if [[ $0 == *.sbatch && -z ${SLURM_JOB_ID:-} ]]; then
    say "this is no job; give it to sbatch: sbatch $0 $*"
    exit 2
fi
read -r -a python <<<"$PYTHON"
if ! command -v "${python[0]}" >/dev/null; then
    say "$PWD: there is no $PYTHON; run make .venv/installed here, or set PYTHON in slurm/environment.sh"
    exit 2
fi

# srun does not take this from the job by itself; without the other each rank takes all cores of its node.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
fi
export PYTHONUNBUFFERED=1

# A script's arguments begin with a recipe.
need_recipe() {
    [[ ${2:--} == -* ]] || return 0
    say "give a recipe first: sbatch slurm/$1.sbatch configs/mine.yaml"
    exit 2
}

# Run a command on all tasks and wait for it, past signals: what they ask for is up to the command.
# The first task that ends badly ends them all.
step() {
    # Counted anew: a job may come back from the queue with fewer nodes.
    local tasks=$((${SLURM_NNODES:-1} * ${SLURM_NTASKS_PER_NODE:-1}))
    srun --ntasks="$tasks" --kill-on-bad-exit=1 "${python[@]}" -m pipeline "$@" &
    local pid=$! code
    while true; do
        wait "$pid"
        code=$?
        kill -0 "$pid" 2>/dev/null || return "$code"
    done
}

# The file is there until training has begun.
count_from_here() { [[ -e $FAILURES_FILE ]] || echo 0 >"$FAILURES_FILE"; }

# Copy a folder to the same place on each node's own disk.
stage() {
    count_from_here
    local each=(srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1)
    "${each[@]}" mkdir -p "$2" || hand_back $?
    "${each[@]}" rsync --archive "$1/" "$2/" || hand_back $?
}

# Train a recipe, from the top or from where it stands; ends the script.
train() {
    need_recipe train "$@"
    count_from_here
    export MISTAKE_FILE FAILURES_FILE
    # When a collective hangs, NCCL ends the rank and leaves what it was doing (torch's flight recorder) for each rank.
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=1 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_BUFFER_SIZE=2000
    export TORCH_FR_DUMP_TEMP_FILE=$PWD/nccl-$SLURM_JOB_ID-rank-

    # What is wrong is said before time is spent; the same job would find it again.
    step doctor --config "$@"
    local code=$?
    if [[ -e $MISTAKE_FILE || ($code -ne 0 && $code -lt 128) ]]; then
        rm -f "$MISTAKE_FILE" "$FAILURES_FILE"
        say "doctor has found what is WRONG above; not requeued"
        exit 2
    fi
    [[ $code -eq 0 ]] || hand_back "$code"

    step fit --config "$@"
    code=$?
    if [[ $code -eq 0 ]]; then
        rm -f "$FAILURES_FILE"
        exit 0
    fi
    if [[ $code -eq 2 || -e $MISTAKE_FILE ]]; then
        rm -f "$MISTAKE_FILE" "$FAILURES_FILE"
        say "ended by the mistake above; not requeued"
        exit 2
    fi
    hand_back "$code"
}

# Back into the queue, to start from the top: after exit code 75, of a run that was asked to stop, has saved and can go
# on, and after any failure. Once training has begun `fit` counts them, and ends with a mistake when they repeat.
hand_back() {
    local code=$1 job=$SLURM_JOB_ID left state failures why=""
    # An array's last task has the array's own number: that would requeue all of them.
    [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    # A job that its owner cancels ends too, and is to stay so.
    read -r left state <<<"$(squeue --noheader --jobs="$job" --format='%L %T %r')"
    if [[ $state == CANCELLED* || $state == "COMPLETING None" ]]; then
        rm -f "$FAILURES_FILE"
        say "cancelled (exit code $code)"
        exit "$code"
    fi
    [[ $code -ne 137 ]] || why=" (killed: is --mem too small?)"
    # Those that came before are counted here. 138: doctor, or preparing the corpus, ended by SIGUSR1. Asked to stop, a
    # job whose time is nearly up would not come further the next time; one that others have driven out might.
    if [[ -e $FAILURES_FILE && ($code -ne 75 && $code -ne 138 || $left =~ ^0?[0-4]:..$) ]]; then
        [[ $code -ne 75 && $code -ne 138 ]] || why=" (asked to stop; is --time too short to begin training?)"
        failures=$(($(cat "$FAILURES_FILE") + 1))
        if [[ $failures -ge 3 ]]; then
            rm -f "$FAILURES_FILE"
            say "exit code $code$why, $failures times before training began; see above why, then submit it again"
            exit "$code"
        fi
        echo "$failures" >"$FAILURES_FILE"
    fi
    say "exit code $code$why; requeued"
    scontrol requeue "$job" || say "could not be requeued; submit it again, it goes on where it was"
    exit "$code"
}

# Bash ends no script before the step it waits for has saved.
trap : TERM USR1
# srun's exit code may be that of tasks it has killed; a mistake is told by this file.
MISTAKE_FILE=$PWD/.mistake-${SLURM_JOB_ID:-}
# Counts failures from one start to the next, until training has begun.
FAILURES_FILE=$PWD/.failures-${SLURM_JOB_ID:-}
rm -f "$MISTAKE_FILE"
[[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]] || rm -f "$FAILURES_FILE"
