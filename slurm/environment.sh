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
    local nodes=${SLURM_NNODES:-1} where=() pid watcher code
    if [[ ${#NODES[@]} -gt 0 ]]; then
        nodes=${#NODES[@]}
        # The last step may still hold resources, until SLURM has given up a lost node.
        where=(--overlap --nodes="$nodes" --nodelist="$(IFS=, && echo "${NODES[*]}")")
    fi
    srun --ntasks=$((nodes * ${SLURM_NTASKS_PER_NODE:-1})) "${where[@]}" --kill-on-bad-exit=1 \
        bash -c "$NOTE_FIRST_TASK" "$FIRST_TASK_FILE" "${python[@]}" "${program[@]}" "$@" &
    pid=$!
    abandon_when_over "$pid" &
    watcher=$!
    while true; do
        wait "$pid"
        code=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    kill "$watcher" 2>/dev/null
    rm -f "$FIRST_TASK_FILE"
    return "$code"
}

# What a task runs: the first one notes its node and process id; then the task becomes the command.
# shellcheck disable=SC2016
NOTE_FIRST_TASK='[[ $SLURM_PROCID -ne 0 ]] || echo "$SLURMD_NODENAME $SLURM_TASK_PID" >"$0"; exec "$@"'

# Kill an srun that has not returned 40 s after its first task has ended: abandon_when_over PID. It would wait for a lost
# node until SLURM gives it up (SlurmdTimeout, often 300 s). Tasks that are asked to end are killed after KillWait (30 s).
abandon_when_over() {
    local pid=$1 node task seen=""
    while sleep 1; do
        read -r node task 2>/dev/null <"$FIRST_TASK_FILE" || continue
        [[ $node == "${SLURMD_NODENAME:-}" ]] || return
        if kill -0 "$task" 2>/dev/null; then
            seen=yes
        elif [[ -n $seen ]]; then
            sleep 40
            say "the first rank has ended 40 s ago and srun has not; a node may be lost, so it is not waited for"
            kill -KILL "$pid"
            return
        fi
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
    export MISTAKE_FILE FAILURES_FILE MIN_NODES
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

    watch_first_node
    while true; do
        count_from_here
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
        restart_here "$code" || hand_back "$code"
    done
}

# Prepare to start the step again inside the job, on the nodes that are left: restart_here EXIT_CODE. Fails if the job has
# to be requeued instead.
restart_here() {
    local code=$1 left state needed=${MIN_NODES:-$SLURM_NNODES}
    # It was asked to stop; see hand_back.
    [[ $code -ne 75 && $code -ne 138 ]] || return 1
    read -r left state <<<"$(job_state)"
    [[ $state == RUNNING* && ! $left =~ $LESS_THAN_5_MINUTES ]] || return 1
    end_steps
    mapfile -t NODES < <(answering_nodes)
    if [[ ${#NODES[@]} -lt $needed || " ${NODES[*]} " != *" $SLURMD_NODENAME "* ]]; then
        say "${#NODES[@]} of $SLURM_NNODES nodes answer (${NODES[*]:-none}); $needed are needed, the first one among them"
        return 1
    fi
    count_failure "$code" ""
    # GPUs of all nodes together: without it, the step gets those that the job has on the nodes of the step.
    unset SLURM_GPUS
    export RESTARTS_IN_JOB=$((${RESTARTS_IN_JOB:-0} + 1))
    say "exit code $code; starting again on ${#NODES[@]} of $SLURM_NNODES nodes: ${NODES[*]}"
    watch_first_node
}

# Print the time left, the state and its reason.
job_state() { squeue --noheader --jobs="$(job_id)" --format='%L %T %r'; }

# Print the job's id. The last task of an array has the array's job id, which stands for all tasks.
job_id() { echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"; }

# End what is left of the job's steps: tasks whose srun was abandoned, and the watch of the first node.
end_steps() {
    local one
    for one in $(squeue --noheader --steps --jobs="$(job_id)" --format=%i); do
        [[ ! $one =~ \.[0-9]+$ ]] || scancel --signal=KILL "$one" 2>/dev/null
    done
}

# Print the job's nodes that answer within 20 s and whose GPUs do. SLURM may not have noticed yet that a node is lost.
answering_nodes() {
    local node probe='! command -v nvidia-smi || nvidia-smi --list-gpus'
    for node in $(scontrol show hostnames "$(squeue --noheader --jobs="$(job_id)" --format=%N)"); do
        {
            timeout --kill-after=5 20 env -u SLURM_GPUS srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \
                --input=none --quiet bash -c "$probe" &>/dev/null && echo "$node"
        } &
    done | sort --version-sort
}

# Let the last node watch the first one, which runs this script: watch_first_node. SLURM takes a lost node away from a job
# with --no-kill, also the first one, and the job would then hold its nodes without a script until its time limit.
watch_first_node() {
    local nodes=("${NODES[@]}")
    [[ ${#nodes[@]} -gt 0 ]] || mapfile -t nodes < <(scontrol show hostnames)
    [[ ${#nodes[@]} -gt 1 ]] || return 0
    local log
    log=$(scontrol -o show job "$SLURM_JOB_ID" | grep -o ' StdOut=[^ ]*')
    env -u SLURM_GPUS -u SLURM_GPUS_PER_NODE -u SLURM_GPUS_PER_TASK srun --overlap --gres=none --nodes=1 --ntasks=1 \
        --nodelist="${nodes[-1]}" --input=none --quiet \
        bash -c "$REQUEUE_WHEN_LOST" "$SLURMD_NODENAME" "$(job_id)" "${log#*=}" &>/dev/null &
}

# What the last node runs, with the first node's name, the job's id and its log.
# shellcheck disable=SC2016
REQUEUE_WHEN_LOST='while sleep 20; do
    read -r state nodes <<<"$(squeue --noheader --jobs="$1" --format="%T %N")"
    if [[ $state == RUNNING && -n $nodes ]] && ! scontrol show hostnames "$nodes" | grep --quiet --line-regexp "$0"; then
        echo "$(date "+%F %T") $SLURM_JOB_NAME $SLURM_JOB_ID: the first node $0 is lost; requeued" >>"$2"
        scontrol requeue "$1"
    fi
done'

# Requeue the job and exit: hand_back EXIT_CODE. For exit code 75, which means that the run was asked to stop and has
# saved a checkpoint, and for failures.
hand_back() {
    local code=$1 left state why=""
    # A job that its owner has cancelled must not be requeued.
    read -r left state <<<"$(job_state)"
    if [[ $state == CANCELLED* || $state == "COMPLETING None" ]]; then
        rm -f "$FAILURES_FILE"
        say "cancelled (exit code $code)"
        exit "$code"
    fi
    [[ $code -ne 137 ]] || why=" (killed; is --mem too small?)"
    # Exit code 138: SIGUSR1 ended doctor or the preparation of the corpus. A request to stop counts as a failure if it
    # came from the time limit, less than five minutes away, since the next start would get no further; not if the job
    # was preempted.
    if [[ $code -ne 75 && $code -ne 138 ]]; then
        count_failure "$code" "$why"
    elif [[ $left =~ $LESS_THAN_5_MINUTES ]]; then
        count_failure "$code" " (time limit; is --time too short to begin training?)"
    fi
    say "exit code $code$why; requeued"
    scontrol requeue "$(job_id)" || say "cannot be requeued; submit the job again to resume"
    exit "$code"
}

# Count a failure, and end the job after the third: count_failure EXIT_CODE REASON. Once training has begun, `fit` counts.
count_failure() {
    [[ -e $FAILURES_FILE ]] || return 0
    local failures=$(($(cat "$FAILURES_FILE") + 1))
    if [[ $failures -ge 3 ]]; then
        rm -f "$FAILURES_FILE"
        say "exit code $1$2, $failures times before training began; fix the cause above, then submit again"
        exit "$1"
    fi
    echo "$failures" >"$FAILURES_FILE"
}

# Keep bash alive while the step saves a checkpoint.
trap : TERM USR1
# Nodes of the next step; empty for all nodes of the job.
NODES=()
# What squeue prints as the time left of a job that ends in less than five minutes.
LESS_THAN_5_MINUTES='^0?[0-4]:..$'
# Node and process id of the first task of the current step.
FIRST_TASK_FILE=$PWD/.first-task-${SLURM_JOB_ID:-}
# Created by a rank that ends with a user's mistake: srun's exit code may be that of the ranks it has killed.
MISTAKE_FILE=$PWD/.mistake-${SLURM_JOB_ID:-}
# Number of failures before training has begun, kept between the starts of a job.
FAILURES_FILE=$PWD/.failures-${SLURM_JOB_ID:-}
rm -f "$MISTAKE_FILE" "$FIRST_TASK_FILE"
[[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]] || rm -f "$FAILURES_FILE"
