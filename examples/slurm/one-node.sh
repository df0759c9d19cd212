#!/usr/bin/env bash
# A job on one node of a Slurm cluster.
#
#   sbatch examples/slurm/one-node.sh job.yaml [options of `moejob run`]
#
# The manifest says `nodes: { profile: gpu, devicesPerNode: 8 }` for a node with eight GPUs, or
# `profile: cpu`. Two minutes before the time limit the job takes a checkpoint and ends; it is put
# into the queue again and goes on from there. docs/slurm.md tells more.
#
#SBATCH --job-name=moejob
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
[ $# -ge 1 ] || { echo "usage: sbatch $0 MANIFEST [options of moejob run]" >&2; exit 2; }

# `scancel` asks this script to end, too: then the job is not to come back.
trap 'echo "one-node.sh: cancelled" >&2; exit 143' TERM

srun --ntasks=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --kill-on-bad-exit=0 \
  "${MOEJOB:-moejob}" run "$@" &
wait $!
code=$?
case $code in
  # Interrupted behind a checkpoint, or another run has its storage: try again.
  130 | 75) scontrol requeue "$SLURM_JOB_ID" ;;
  # Done, or what trying again does not cure.
  *) exit "$code" ;;
esac
