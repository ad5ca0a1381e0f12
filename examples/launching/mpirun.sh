#!/bin/bash
# A training that MPI's launcher starts. Each process of mpirun is one rank:
#
#   examples/launching/mpirun.sh 2                            examples/digits.py, two ranks on this machine
#   examples/launching/mpirun.sh 2 train.py --lr 0.1          another script
#   HOSTS=a:4,b:4 examples/launching/mpirun.sh 8              four ranks on each of two hosts
#
# paceline.init() finds rank and world size in what mpirun sets. On several hosts it must be told where the ranks meet:
# on the first one.
set -eu

options=(-n "${1:?how many ranks?}" --bind-to none)
shift
if [ -n "${HOSTS:-}" ]; then
    first=${HOSTS%%,*}
    options+=(--host "$HOSTS" -x "MASTER_ADDR=${first%%:*}" -x "MASTER_PORT=${MASTER_PORT:-29500}")
fi
if [ $# -eq 0 ]; then
    set -- examples/digits.py
fi
exec mpirun "${options[@]}" python "$@"
