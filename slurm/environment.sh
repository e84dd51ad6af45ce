# Sourced by all scripts in this folder: the Python environment, and functions that run and requeue jobs.
# shellcheck shell=bash

# ---- Edit this section for your cluster ----------------------------------------------------------------------------
# module load python/3.11 cuda/13.0
# A container: PYTHON="apptainer exec --nv /path/to/image.sif python"
PYTHON=${PYTHON:-.venv/bin/python}
# A program with your own extensions (docs/extending.md): PROGRAM="my_pipeline.py"
PROGRAM=${PROGRAM:--m pipeline}
# If `doctor` reports that a node's name resolves to the node itself, name the interface between the nodes:
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
# --------------------------------------------------------------------------------------------------------------------

set -uo pipefail

# Recipes hold paths relative to the folder that the job was submitted from.
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2

# Print a log line with time and job, which tells it from those of the ranks.
say() { echo "$(date '+%F %T') ${SLURM_JOB_NAME:-} ${SLURM_JOB_ID:-}: $*" >&2; }

if [[ $0 == *.sbatch && -z ${SLURM_JOB_ID:-} ]]; then
    say "this script runs as a job; submit it: sbatch $0 $*"
    exit 2
fi
read -r -a python <<<"$PYTHON"
read -r -a program <<<"$PROGRAM"
if ! command -v "${python[0]}" >/dev/null; then
    say "$PWD: $PYTHON does not exist; run make .venv/installed here, or set PYTHON in slurm/environment.sh"
    exit 2
fi

# srun does not inherit --cpus-per-task. Without OMP_NUM_THREADS, each rank would use all cores of its node.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
fi
export PYTHONUNBUFFERED=1

# Exit unless the script's first argument is a recipe.
need_recipe() {
    [[ ${2:--} == -* ]] || return 0
    say "the first argument must be a recipe: sbatch slurm/$1.sbatch configs/mine.yaml"
    exit 2
}

# Run a pipeline command on all tasks and return its exit code. If one task fails, srun ends all of them.
# A signal interrupts `wait`; the command handles signals itself, so wait again until it has ended.
step() {
    # SLURM_NTASKS may be stale: a requeued job can have fewer nodes.
    local tasks=$((${SLURM_NNODES:-1} * ${SLURM_NTASKS_PER_NODE:-1}))
    srun --ntasks="$tasks" --kill-on-bad-exit=1 "${python[@]}" "${program[@]}" "$@" &
    local pid=$! code
    while true; do
        wait "$pid"
        code=$?
        kill -0 "$pid" 2>/dev/null || return "$code"
    done
}

# Start to count failures; `fit` removes the file once training has begun.
count_from_here() { [[ -e $FAILURES_FILE ]] || echo 0 >"$FAILURES_FILE"; }

# Copy a folder to the local disk of each node: stage FOLDER LOCAL_FOLDER
stage() {
    count_from_here
    local each=(srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1)
    "${each[@]}" mkdir -p "$2" || hand_back $?
    "${each[@]}" rsync --archive "$1/" "$2/" || hand_back $?
}

# Start or resume training a recipe, then exit: train RECIPE [ARGUMENT ...]
train() {
    need_recipe train "$@"
    count_from_here
    export MISTAKE_FILE FAILURES_FILE
    # Where PyTorch dumps a rank's last collectives when NCCL hangs. The other defaults of its watchdog are right.
    export TORCH_FR_DUMP_TEMP_FILE=$PWD/nccl-$SLURM_JOB_ID-rank-

    # Check the job and the recipe first. A mistake that doctor reports would recur, so the job is not requeued.
    step doctor --config "$@"
    local code=$?
    if [[ -e $MISTAKE_FILE || ($code -ne 0 && $code -lt 128) ]]; then
        rm -f "$MISTAKE_FILE" "$FAILURES_FILE"
        say "doctor has reported errors (WRONG) above; not requeued"
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
        say "ended by the error above; not requeued"
        exit 2
    fi
    hand_back "$code"
}

# Requeue the job and exit: hand_back EXIT_CODE. For exit code 75, which means that the run was asked to stop and has
# saved a checkpoint, and for failures. Before training begins, repeated failures are counted here, later by `fit`.
hand_back() {
    local code=$1 job=$SLURM_JOB_ID left state failures why=""
    # The last task of an array has the array's job id, which would requeue all tasks.
    [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    # A job that its owner has cancelled must not be requeued.
    read -r left state <<<"$(squeue --noheader --jobs="$job" --format='%L %T %r')"
    if [[ $state == CANCELLED* || $state == "COMPLETING None" ]]; then
        rm -f "$FAILURES_FILE"
        say "cancelled (exit code $code)"
        exit "$code"
    fi
    [[ $code -ne 137 ]] || why=" (killed; is --mem too small?)"
    # Exit code 138: SIGUSR1 ended doctor or the preparation of the corpus. A request to stop counts as a failure if it
    # came from the time limit, less than five minutes away, since the next start would get no further; not if the job
    # was preempted.
    if [[ -e $FAILURES_FILE && ($code -ne 75 && $code -ne 138 || $left =~ ^0?[0-4]:..$) ]]; then
        [[ $code -ne 75 && $code -ne 138 ]] || why=" (time limit; is --time too short to begin training?)"
        failures=$(($(cat "$FAILURES_FILE") + 1))
        if [[ $failures -ge 3 ]]; then
            rm -f "$FAILURES_FILE"
            say "exit code $code$why, $failures times before training began; fix the cause above, then submit again"
            exit "$code"
        fi
        echo "$failures" >"$FAILURES_FILE"
    fi
    say "exit code $code$why; requeued"
    scontrol requeue "$job" || say "cannot be requeued; submit the job again to resume"
    exit "$code"
}

# Keep bash alive while the step saves a checkpoint.
trap : TERM USR1
# Created by a rank that ends with a user's mistake: srun's exit code may be that of the ranks it has killed.
MISTAKE_FILE=$PWD/.mistake-${SLURM_JOB_ID:-}
# Number of failures before training has begun, kept between the starts of a job.
FAILURES_FILE=$PWD/.failures-${SLURM_JOB_ID:-}
rm -f "$MISTAKE_FILE"
[[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]] || rm -f "$FAILURES_FILE"
