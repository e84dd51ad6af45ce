# Sourced by all scripts in this folder: the Python environment, and functions that run and requeue jobs.
# shellcheck shell=bash

# Variables of the shell that `sbatch` was called from reach the job, and `srun` takes them for options. Those that only
# srun sets are unset; those that sbatch sets as well stay if a line `#SBATCH` of the script asks for them. `salloc` and
# batch scripts have no SLURM_STEP_ID: resources of their jobs cannot be told from those of this one.
foreign=() maybe=(SLURM_HINT SLURM_DISTRIBUTION SLURM_DIST_PLANESIZE SLURM_THREADS_PER_CORE)
maybe+=(SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_SOCKET)
[[ -z ${SLURM_STEP_ID:-} ]] || maybe+=(SLURM_GPUS "${!SLURM_GPUS_PER@}" "${!SLURM_GPU_@}" "${!SLURM_TRES@}"
    "${!SLURM_MEM_PER@}" SLURM_CPUS_PER_GPU SLURM_NTASKS_PER_GPU SLURM_OVERCOMMIT)
for name in "${maybe[@]}"; do
    option=${name#SLURM_} option=${option/#MEM_PER_NODE/MEM} option=${option//_/-}
    [[ -z ${!name:-} ]] || grep -Eqs "^#SBATCH .*--${option,,}([= ]|$)" "$0" || foreign+=("$name")
done
unset "${foreign[@]}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" "${!SLURM_STEP@}" "${!SLURM_PTY@}" SLURM_EXACT \
    SLURM_EXCLUSIVE SLURM_NTASKS SLURM_NPROCS SRUN_CPUS_PER_TASK SRUN_DEBUG SLURM_GPUS_ON_NODE \
    RESTARTS_IN_JOB
# After `sbatch --export=NONE`, srun would hand none of the variables that are set below on to the tasks.
unset SLURM_EXPORT_ENV SRUN_EXPORT_ENV

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
# Bash executes commands inside a text that it evaluates as a number, such as a[$(...)].
NUMBER='^[0-9]{1,9}$'

# Recipes hold paths relative to the folder that the job was submitted from.
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2

# Print a log line with the time and the job, which tell it from the lines of the ranks.
say() { echo "$(date '+%F %T') ${SLURM_JOB_NAME:-} ${SLURM_JOB_ID:-}: $*" >&2; }

if [[ $0 == *.sbatch && -z ${SLURM_JOB_ID:-} ]]; then
    say "this script runs as a job; submit it: sbatch $0 $*"
    exit 2
fi
[[ ${#foreign[@]} -eq 0 ]] || say "of the shell that called sbatch, ${foreign[*]} are not used; what the job's tasks need" \
    "belongs on a line #SBATCH of the script"
# Variables about the array and the restarts of another job would be taken for those of this one.
if [[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_ARRAY_JOB_ID:-}${SLURM_RESTART_COUNT:-} ]]; then
    while read -r id array restarts; do
        [[ $id == "$SLURM_JOB_ID" && $restarts =~ $NUMBER ]] || continue
        [[ ${SLURM_ARRAY_JOB_ID:-$array} == "$array" ]] || unset "${!SLURM_ARRAY@}"
        export SLURM_RESTART_COUNT=$restarts
    done < <(squeue --noheader --jobs="$SLURM_JOB_ID" --Format=JobID:20,ArrayJobID:20,RestartCnt:20)
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

# Exit unless MIN_NODES is empty or a number of nodes that the job has. A requeued job can have fewer than before.
need_nodes() {
    local restarts=${SLURM_RESTART_COUNT:-0}
    [[ -n ${MIN_NODES:-} ]] || return 0
    [[ $MIN_NODES =~ $NUMBER && $MIN_NODES != 0* && ($MIN_NODES -le $SLURM_NNODES || $restarts -gt 0) ]] && return
    say "MIN_NODES is '$MIN_NODES' and the job has $SLURM_NNODES nodes; set it to a number from 1 to $SLURM_NNODES, leave" \
        "it empty, or request more nodes"
    exit 2
}

# Submit a job after the one before it, with the options of all jobs: submit NAME [OPTION ...] SCRIPT [ARGUMENT ...]
# If sbatch rejects it, the first job is cancelled, and with it those that depend on it.
submit() {
    local id after=(${previous:+--dependency=afterok:$previous --kill-on-invalid-dep=yes})
    read -r -a all <<<"${JOB_OPTIONS:-}"
    if ! id=$(sbatch --parsable "--job-name=$1" "${after[@]}" "${all[@]}" "${@:2}"); then
        say "sbatch rejected the $1 job, see above; the other jobs are cancelled"
        [[ -z $first ]] || scancel "$first"
        exit 2
    fi
    previous=${id%%;*} first=${first:-${id%%;*}}
    echo "$1 $previous"
}
# Ids of the first and of the newest submitted job.
first="" previous=""

# Run a pipeline command on all tasks and return its exit code. If one task fails, srun ends all of them.
# A signal interrupts `wait`; the command handles signals itself, so wait again until it has ended.
step() {
    # Not SLURM_NTASKS: a requeued job can have fewer nodes.
    # --overlap: the last step may still hold resources on a lost node, and other steps watch the first node.
    local nodes=${SLURM_NNODES:-1} where=(--overlap) pid watcher code
    if [[ ${#NODES[@]} -gt 0 ]]; then
        nodes=${#NODES[@]}
        where+=(--nodes="$nodes" --nodelist="$(IFS=, && echo "${NODES[*]}")")
    fi
    # By this secret, the ranks of this step tell one another from strangers.
    RANKS_TOKEN=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n')
    export RANKS_TOKEN
    SLURM_NTASKS_PER_NODE=$TASKS_PER_NODE srun --ntasks=$((nodes * TASKS_PER_NODE)) "${where[@]}" --kill-on-bad-exit=1 \
        bash -c "$NOTE_FIRST_TASK" "$FIRST_TASK_FILE" "${python[@]}" "${program[@]}" "$@" &
    pid=$!
    abandon_when_over "$pid" &
    watcher=$!
    disown "$watcher" # else bash would report that it was killed
    while kill -0 "$pid" 2>/dev/null; do
        wait "$pid" 2>/dev/null
    done
    wait "$pid" 2>/dev/null
    code=$?
    # Not SIGTERM: a script that was started with SIGTERM ignored passes that on to its watcher.
    kill -KILL "$watcher" 2>/dev/null
    KILLED=" (killed; is --mem too small?)"
    [[ ! -e $ABANDONED_FILE ]] || KILLED=" (not waited for)"
    rm -f "$FIRST_TASK_FILE" "$ABANDONED_FILE"
    return "$code"
}

# What each task runs: the first task writes down its node and process id; then the task becomes the command.
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
            seen=$task
        elif [[ $seen == "$task" ]]; then
            sleep 40
            say "the first rank has ended 40 s ago and srun has not; it is not waited for, since a node may be lost"
            touch "$ABANDONED_FILE"
            kill -KILL "$pid"
            return
        fi
    done
}

# Count a start before it can fail or its node be lost, and end the job after three without progress. `fit` removes the
# file after its first new checkpoint, and `translate` after a shard.
count_start() {
    STARTS=""
    read -r STARTS 2>/dev/null <"$FAILURES_FILE"
    [[ $STARTS =~ $NUMBER ]] && STARTS=$((10#$STARTS)) || STARTS=0
    [[ $STARTS -lt 3 ]] || end_if_repeated 1 " (or a lost node)"
    write_starts $((STARTS + 1))
}

# Take a start back that has ended without a failure, unless it has made progress.
uncount_start() { [[ ! -e $FAILURES_FILE ]] || write_starts "$STARTS"; }

# Write the number of starts: write_starts NUMBER. A link in the way is replaced, not followed.
write_starts() {
    local new
    new=$(mktemp "$FAILURES_FILE.XXXXXX") && echo "$1" >"$new" &&
        mv --force --no-target-directory "$new" "$FAILURES_FILE" && return
    rm -f "${new:-}"
    COUNTED=no
}

# Copy a folder to the local disk of each node: stage FOLDER LOCAL_FOLDER
stage() {
    count_start
    local each=(srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1)
    "${each[@]}" mkdir -p "$2" || hand_back $?
    "${each[@]}" rsync --archive "$1/" "$2/" || hand_back $?
    uncount_start
}

# Start or resume training a recipe, then exit: train RECIPE [ARGUMENT ...]
train() {
    need_recipe train "$@"
    need_nodes
    TASKS_PER_NODE=${SLURM_NTASKS_PER_NODE:-1}
    export MISTAKE_FILE FAILURES_FILE
    # Where PyTorch dumps a rank's last collectives when NCCL hangs. The other defaults of its watchdog are right.
    export TORCH_FR_DUMP_TEMP_FILE=$PWD/nccl-$SLURM_JOB_ID-rank-

    local code command
    watch_first_node
    # Check the job and the recipe first.
    for command in doctor fit; do
        while true; do
            count_start
            step "$command" --config "$@"
            code=$?
            [[ $code -ne 0 ]] || break
            exit_after_mistake "$command" "$code"
            restart_here "$code" || hand_back "$code"
        done
        uncount_start
    done
    rm -f "$FAILURES_FILE"
    exit 0
}

# Exit if a command has ended because of a user's mistake, which would recur: exit_after_mistake COMMAND EXIT_CODE. An exit
# code of doctor other than 69 (missing ranks) and those of signals means that a check has failed.
exit_after_mistake() {
    [[ -e $MISTAKE_FILE || $2 -eq 2 || ($1 == doctor && $2 -ne 69 && $2 -lt 128) ]] || return 0
    rm -f "$MISTAKE_FILE" "$FAILURES_FILE"
    say "ended by the error above; not requeued"
    exit 2
}

# Run a command that continues from what it has written, also beside other tasks of an array, then exit:
# go_on COMMAND [ARGUMENT ...]
go_on() {
    count_start
    export FAILURES_FILE MISTAKE_FILE
    step "$@"
    local code=$?
    [[ $code -ne 0 ]] || { rm -f "$FAILURES_FILE" && exit 0; }
    exit_after_mistake "$1" "$code"
    # A preempted task ends by SIGTERM, and it is alone in its step.
    [[ $code -ne 143 ]] || code=75
    hand_back "$code"
}

# Prepare to start the step again inside the job, on the nodes that are left: restart_here EXIT_CODE. It fails if the job
# has to be requeued instead.
restart_here() {
    local code=$1 host left state needed=${MIN_NODES:-$SLURM_NNODES}
    # A requeued job can have fewer nodes than before.
    [[ $needed -le $SLURM_NNODES ]] || needed=$SLURM_NNODES
    ! asked_to_stop "$code" || return 1
    read -r host left state <<<"$(job_state)"
    [[ $host == "$SLURMD_NODENAME" && $state == RUNNING* && ! $left =~ $LESS_THAN_5_MINUTES ]] || return 1
    end_steps
    mapfile -t NODES < <(answering_nodes)
    if [[ ${#NODES[@]} -lt $needed || " ${NODES[*]} " != *" $SLURMD_NODENAME "* ]]; then
        say "${#NODES[@]} of $SLURM_NNODES nodes answer (${NODES[*]:-none}); $needed are needed, the first one among them"
        return 1
    fi
    end_if_repeated "$code" ""
    # It is the number of GPUs of all nodes (--gpus).
    unset SLURM_GPUS
    export RESTARTS_IN_JOB=$((${RESTARTS_IN_JOB:-0} + 1))
    say "exit code $code; starting again on ${#NODES[@]} of $SLURM_NNODES nodes: ${NODES[*]}"
    watch_first_node
}

# Return whether a command has ended because it was asked to: 75 is `fit`'s exit code after it has saved a checkpoint;
# SIGUSR1 ends doctor and the preparation of the corpus with 138. Not 143: srun ends tasks by SIGTERM when one has failed.
asked_to_stop() { [[ $1 -eq 75 || $1 -eq 138 ]]; }

# Print the node of the job's script, the time left, the state and its reason. SLURM may not answer for some minutes.
job_state() { patiently squeue --noheader --jobs="$(job_id)" --format='%B %L %T %r'; }

# Run a command of SLURM until it succeeds, at most ten times in five minutes.
patiently() {
    local attempt
    for attempt in {1..10}; do
        ! "$@" || return 0
        [[ $attempt -eq 10 ]] || sleep 30
    done
    return 1
}

# Print the job's id. The last task of an array has the array's job id, which stands for all tasks.
job_id() { echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"; }

# End what is left of the job's steps: tasks whose srun was abandoned, and the watch of the first node.
end_steps() {
    local step_id
    for step_id in $(squeue --noheader --steps --jobs="$(job_id)" --format=%i); do
        [[ ! $step_id =~ \.[0-9]+$ ]] || scancel --signal=KILL "$step_id" 2>/dev/null
    done
}

# Print the job's nodes that answer within 30 s, with all their GPUs. SLURM may not have noticed yet that a node is lost.
# The one task has to see all GPUs of its node: options that divide them among the job's tasks would hide some from it, and
# no node would answer.
answering_nodes() {
    local node undivided=(env -u SLURM_GPUS -u SLURM_GPUS_PER_TASK -u SLURM_NTASKS_PER_GPU)
    undivided+=(-u SLURM_GPU_BIND -u SLURM_TRES_BIND)
    for node in $(scontrol show hostnames "$(patiently squeue --noheader --jobs="$(job_id)" --format=%N)"); do
        {
            timeout --kill-after=5 30 "${undivided[@]}" srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \
                --input=none --quiet bash -c "$SEES_ITS_GPUS" &>/dev/null && echo "$node"
        } &
    done | sort --version-sort
}

# What `answering_nodes` runs on a node.
# shellcheck disable=SC2016
SEES_ITS_GPUS='! command -v nvidia-smi || (($(nvidia-smi --list-gpus | grep --count "^GPU ") >= ${SLURM_GPUS_ON_NODE:-0}))'

# Let two other nodes watch the first one, which runs this script: watch_first_node. SLURM takes a lost node away from a
# job with --no-kill, also the first one, and the job would then hold its nodes without a script until its time limit.
watch_first_node() {
    local nodes=("${NODES[@]}") node log
    [[ ${#nodes[@]} -gt 0 ]] || mapfile -t nodes < <(scontrol show hostnames)
    [[ ${#nodes[@]} -gt 1 ]] || return 0
    log=$(readlink "/proc/$$/fd/2")
    for node in $(printf '%s\n' "${nodes[1]}" "${nodes[-1]}" | sort --unique); do
        watch_from "$node" "$log" &
    done
}

# Watch the first node from another one: watch_from NODE LOG
watch_from() {
    local started=$SECONDS code
    env -u SLURM_GPUS -u SLURM_GPUS_PER_NODE -u SLURM_GPUS_PER_TASK -u SLURM_CPUS_PER_GPU -u SLURM_MEM_PER_GPU \
        -u SLURM_NTASKS_PER_GPU srun --overlap --gres=none --nodes=1 --ntasks=1 --nodelist="$1" --input=none --quiet \
        bash -c "$REQUEUE_WHEN_LOST" "$SLURMD_NODENAME" "$(job_id)" "$2" &>/dev/null
    code=$?
    [[ $code -ne 1 || $((SECONDS - started)) -gt 10 ]] ||
        say "$1 cannot watch $SLURMD_NODENAME; if that node is lost, the job has to be cancelled by hand"
}

# What the other nodes run, with the first node's name, the job's id and its log. It looks twice, since one answer of SLURM
# may be wrong, and stops when its own node no longer belongs to the job.
# shellcheck disable=SC2016
REQUEUE_WHEN_LOST='lost=0
while sleep 15; do
    read -r state nodes <<<"$(squeue --noheader --jobs="$1" --format="%T %N")"
    nodes=$(scontrol show hostnames "$nodes") && [[ $state == RUNNING && -n $nodes ]] || continue
    grep --quiet --fixed-strings --line-regexp "$SLURMD_NODENAME" <<<"$nodes" || exit
    if grep --quiet --fixed-strings --line-regexp "$0" <<<"$nodes"; then
        lost=0
    elif ((++lost == 2)); then
        echo "$(date "+%F %T") $SLURM_JOB_NAME $SLURM_JOB_ID: the first node $0 is lost; requeueing" >>"$2"
        exec scontrol requeue "$1"
    fi
done'

# Requeue the job and exit: hand_back EXIT_CODE. It is called for failures, and for exit code 75, which means that the run
# was asked to stop and has saved a checkpoint.
hand_back() {
    local code=$1 host left state why=""
    read -r host left state <<<"$(job_state)"
    # This node was cut off, and SLURM has meanwhile requeued the job.
    if [[ $state == RUNNING* && $host != "$SLURMD_NODENAME" ]]; then
        say "exit code $code; the job runs on $host now"
        exit "$code"
    fi
    # A job that its owner has cancelled must not be requeued.
    if [[ $state == CANCELLED* || $state == "COMPLETING None" ]]; then
        rm -f "$FAILURES_FILE"
        say "cancelled (exit code $code)"
        exit "$code"
    fi
    [[ $code -ne 137 ]] || why=$KILLED
    # A request to stop counts as a failure if it came from the time limit, less than five minutes away, since the next
    # start would get no further; not if the job was preempted.
    if ! asked_to_stop "$code"; then
        end_if_repeated "$code" "$why"
    elif [[ $left =~ $LESS_THAN_5_MINUTES ]]; then
        end_if_repeated "$code" " (time limit; is --time too short?)"
    else
        uncount_start
    fi
    say "exit code $code$why; requeued"
    scontrol requeue "$(job_id)" || say "cannot be requeued; submit the job again to resume"
    exit "$code"
}

# End the job if a start without progress was the third: end_if_repeated EXIT_CODE REASON.
end_if_repeated() {
    [[ -e $FAILURES_FILE || $COUNTED == no ]] || return 0
    if [[ $STARTS -ge 2 ]]; then
        rm -f "$FAILURES_FILE"
        say "exit code $1$2, 3 times before $GOAL; not requeued; fix the cause above, then submit again"
    elif [[ $COUNTED == no ]]; then
        say "exit code $1$2; starts cannot be counted in $FAILURES_FILE; make room, then submit again"
    else
        return 0
    fi
    exit "$1"
}

# Keep bash alive while the step saves a checkpoint.
trap : TERM USR1
# Tasks of a step on each node; those of training are the job's.
TASKS_PER_NODE=1
# Nodes of the next step; empty for all nodes of the job.
NODES=()
# What squeue prints as the time left of a job that ends in less than five minutes.
LESS_THAN_5_MINUTES='^0?[0-4]:..$'
# Whether starts can be counted. If not, as on a full disk, the job ends: it would restart endlessly.
COUNTED=yes
# How many starts were counted before this one.
STARTS=0
# What has to happen between failures, for the message of the last one.
GOAL="a new checkpoint"
# Node and process id of the first task of the current step.
FIRST_TASK_FILE=$PWD/.first-task-${SLURM_JOB_ID:-}
# The file exists if the current step was not waited for; KILLED says why a step was killed.
ABANDONED_FILE=$PWD/.abandoned-${SLURM_JOB_ID:-}
KILLED=""
# Created by a rank that ends with a user's mistake: srun's exit code may be that of the ranks it has killed.
MISTAKE_FILE=$PWD/.mistake-${SLURM_JOB_ID:-}
# Number of starts since the last checkpoint or shard, kept between the starts of a job.
FAILURES_FILE=$PWD/.failures-${SLURM_JOB_ID:-}
rm -f "$MISTAKE_FILE" "$FIRST_TASK_FILE" "$ABANDONED_FILE"
[[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]] || rm -f "$FAILURES_FILE"
