#!/usr/bin/env bash
# Prepare, train, evaluate and export a recipe, each as a job that waits for the one before it:
#   slurm/submit.sh configs/wmt14_en_de_base.yaml [--config OVERLAY] [--section.key value]
# Where one fails, those that hang on it are cancelled. Scored is the first text of the recipe's corpus.test, where that
# is two files, else its validation text. Options for sbatch:
#   JOB_OPTIONS="--account=mine" TRAIN_OPTIONS="--nodes=4" slurm/submit.sh RECIPE
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=slurm/environment.sh
source slurm/environment.sh
if [[ $# -eq 0 ]]; then
    echo "give a recipe: slurm/submit.sh configs/wmt14_en_de_base.yaml" >&2
    exit 2
fi
read -r -a all <<<"${JOB_OPTIONS:-}"
read -r -a more <<<"${TRAIN_OPTIONS:-}"

# Where the recipe writes, and what it is scored on, a line each.
places=$("${python[@]}" -m pipeline.config.paths --config "$@") || exit 2
{ read -r run; read -r source; read -r reference; } <<<"$places"

submit() {
    local name=$1 after=$2
    shift 2
    local id
    if ! id=$(sbatch --parsable ${after:+--dependency=afterok:$after --kill-on-invalid-dep=yes} "${all[@]}" "$@"); then
        # Those that hang on the first are cancelled with it.
        [[ -z $after ]] || scancel "${prepared##* }"
        say "sbatch refused the $name job, see above; nothing stays queued"
        exit 2
    fi
    echo "$name ${id%%;*}"
}

name=$(basename "$run")
prepared=$(submit prepare "" slurm/prepare.sbatch "$@")
echo "$prepared"
trained=$(submit train "${prepared##* }" "${more[@]}" slurm/train.sbatch "$@")
echo "$trained"
evaluated=$(submit evaluate "${trained##* }" slurm/evaluate.sbatch "$run" "$source" "$reference")
echo "$evaluated"
submit export "${evaluated##* }" slurm/export.sbatch "$run" "exports/$name"
