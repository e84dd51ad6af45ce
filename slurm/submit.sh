#!/usr/bin/env bash
# Submit four jobs that prepare, train, evaluate and export a recipe, each after the one before it:
#   slurm/submit.sh configs/wmt14_en_de_base.yaml [--config OVERLAY] [--section.key value]
# If a job fails, the jobs after it are cancelled. The evaluation uses the recipe's corpus.test, or without one the
# validation text. Options for sbatch, for all jobs and for training:
#   JOB_OPTIONS="--account=mine" TRAIN_OPTIONS="--nodes=4" slurm/submit.sh RECIPE
set -euo pipefail
cd "$(dirname "$0")/.."
# Inside a job, such as an interactive session, these variables would lead to that job's folder and files.
unset SLURM_SUBMIT_DIR SLURM_JOB_ID
# shellcheck source=slurm/environment.sh
source slurm/environment.sh
if [[ $# -eq 0 ]]; then
    echo "a recipe is required: slurm/submit.sh configs/wmt14_en_de_base.yaml" >&2
    exit 2
fi
read -r -a more <<<"${TRAIN_OPTIONS:-}"

# One path per line: the run folder and, if the recipe has no corpus.test, the texts to evaluate on.
paths=$("${python[@]}" "${program[@]}" recipe paths --config "$@") || exit 2
mapfile -t paths <<<"$paths"
paths=("${paths[@]/#-/./-}") # so that none is taken for an option
run=${paths[0]}

submit prepare slurm/prepare.sbatch "$@"
submit train "${more[@]}" slurm/train.sbatch "$@"
submit evaluate slurm/evaluate.sbatch "${paths[@]}"
submit export slurm/export.sbatch "$run" "exports/$(basename -- "$run")"
