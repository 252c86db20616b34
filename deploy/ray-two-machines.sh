#!/bin/sh
# Two engines on two machines behind one endpoint, placed by Ray (docs/distributed.md).
#
# Once, on both machines: pip install 'octavo[ray]', the same versions, the model under the same
# name. Then, ADDRESS being the first machine's:
#
#     ray-two-machines.sh head ADDRESS                    on the first
#     ray-two-machines.sh join ADDRESS OWN-ADDRESS        on the second
#     ray-two-machines.sh serve ADDRESS MODEL [FLAG ...]  on the first
#
# `head` makes the cluster's token, ~/.ray/auth_token: copy that file to the second machine before
# `join`. All three stay in the foreground; end them with Ctrl-C, or run them under a supervisor.
# Extra arguments of head and join go to `ray start`, those of serve to `octavo serve`.
#
# Ports: Ray's between both machines (its documentation has a list; 6379 is the head's), and those
# of the engines' sockets on the first: 6400 to 6403, of which the second connects to two.
set -eu

usage() {
    sed -n '/^#     ray/s/^# *//p' "$0" >&2
    exit 2
}

# Without tokens, whoever reaches the cluster may run any program on its machines.
RAY_AUTH_MODE=token
export RAY_AUTH_MODE

[ $# -ge 2 ] || usage
command=$1 head=$2
shift 2

case $command in
head)
    ray get-auth-token --generate >/dev/null
    exec ray start --head --node-ip-address="$head" --port=6379 --include-dashboard=false \
        --disable-usage-stats --block "$@"
    ;;
join)
    [ $# -ge 1 ] || usage
    own=$1
    shift
    if [ ! -f "$HOME/.ray/auth_token" ]; then
        echo "copy ~/.ray/auth_token of $head to this machine first" >&2
        exit 1
    fi
    exec ray start --address="$head:6379" --node-ip-address="$own" --block "$@"
    ;;
serve)
    [ $# -ge 1 ] || usage
    model=$1
    shift
    RAY_ADDRESS="$head:6379"
    export RAY_ADDRESS
    exec octavo serve "$model" --distributed-executor-backend ray --data-parallel-size 2 \
        --data-parallel-address "$head" --data-parallel-rpc-port 6400 --restart-engine "$@"
    ;;
*)
    usage
    ;;
esac
