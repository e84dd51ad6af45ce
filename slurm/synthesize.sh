#!/usr/bin/env bash
# Submit the stages of `synthesize` as jobs, each after the one before it; several jobs share a translation:
#   slurm/synthesize.sh back-translation configs/mine.yaml mono.de.gz
#   slurm/synthesize.sh distillation configs/mine.yaml mono.en.gz --teacher runs/large
# Options of `synthesize` and settings of the recipe may follow. If a job fails, the jobs after it are cancelled. Submit
# the same line again to go on: a stage that is done ends at once. Options for sbatch, for all jobs, for training, and
# for translating, which is an array of four jobs:
#   TRAIN_OPTIONS="--nodes=4" TRANSLATE_OPTIONS="--array=0-15" slurm/synthesize.sh back-translation RECIPE mono.de
#   JOB_OPTIONS="--account=mine" slurm/synthesize.sh back-translation RECIPE mono.de
set -euo pipefail
cd "$(dirname "$0")/.."
# Inside a job, such as an interactive session, these variables would lead to that job's folder and files.
unset SLURM_SUBMIT_DIR SLURM_JOB_ID
# shellcheck source=slurm/environment.sh
source slurm/environment.sh
if [[ ${1:--} == -* || ${2:--} == -* ]]; then
    echo "kind and recipe are required: slurm/synthesize.sh back-translation configs/mine.yaml mono.de.gz" >&2
    exit 2
fi
words=("$1" --config "$2")
shift 2
[[ ${1:--} == -* ]] || { words+=(--text "$1") && shift; }
words+=("$@")
read -r -a training <<<"${TRAIN_OPTIONS:-}"
read -r -a translating <<<"${TRANSLATE_OPTIONS:-}"

# A line for each stage: its name, its command and, for prepare and fit, its recipe.
stages=$("${python[@]}" "${program[@]}" synthesize "${words[@]}" --plan) || exit 2
while IFS=$'\t' read -r name command recipe; do
    case $command in
    prepare) job=(slurm/prepare.sbatch "$recipe") ;;
    fit) job=("${training[@]}" slurm/train.sbatch "$recipe") ;;
    translate) job=(--array=0-3 "${translating[@]}" slurm/synthesize.sbatch "${words[@]}" --stage "$name") ;;
    *) job=(slurm/synthesize.sbatch "${words[@]}" --stage "$name") ;;
    esac
    submit "$name" "${job[@]}"
done <<<"$stages"
