#!/bin/bash
# A training on several hosts, from one terminal, over your own ssh:
#
#   examples/launching/hosts.sh a:4,b:4                       examples/digits.py, four ranks on each of two hosts
#   examples/launching/hosts.sh a:4,b:4 train.py --lr 0.1     another script
#   examples/launching/hosts.sh localhost:2                   a try on this machine, which needs no ssh
#
# Each host needs an ssh login without a password, the script in this same folder, and Python with the same paceline in
# the same place; --workdir and --python name other ones. docs/launching.md has the rest.
set -eu

hosts=${1:?"which hosts? such as a:4,b:4"}
shift
if [ $# -eq 0 ]; then
    set -- examples/digits.py
fi
exec paceline run --hosts "$hosts" "$@"
