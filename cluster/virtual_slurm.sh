#!/usr/bin/env bash
# Runs a command on a SLURM cluster of four virtual nodes, n1 to n4, on this machine; needs root and Debian's SLURM:
#
#     apt-get install --no-install-recommends slurm-wlm munge
#     cluster/virtual_slurm.sh sbatch --wait cluster/course.sbatch cluster/hello.py
#
# The daemons, their ports and the names of the nodes are in namespaces of their own: they end with the command, and
# nothing else on this machine sees them. Every node says that it has 8 processors and 16 GB, whatever there is.
set -euo pipefail

if [[ ${1:-} != --inside ]]; then
  stop() { echo "error: $1" >&2; exit 2; }
  (($#)) || stop "no command given; for example: $0 sbatch --wait cluster/course.sbatch cluster/hello.py"
  for program in slurmctld slurmd munged unshare ip; do
    command -v "$program" > /dev/null || stop "no $program on this machine; the first lines of $0 say what to install"
  done
  ((EUID == 0)) || stop "$0 needs root, to make namespaces"
  # --kill-child: after kill -9 of this process, nothing is left
  exec unshare --mount --net --pid --fork --kill-child --mount-proc "$BASH" "$0" --inside "$@"
fi

shift
folder=/var/lib/munge # in here an empty folder of its own, in memory
mount -t tmpfs -o mode=755 virtual-slurm "$folder"
ip link set lo up
for number in 1 2 3 4; do
  ip address add "10.0.0.$number/32" dev lo
  echo "10.0.0.$number n$number" >> "$folder/hosts"
done
echo "127.0.0.1 localhost $(hostname)" >> "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts

(umask 077 && head -c 1024 /dev/urandom > "$folder/munge.key")
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munge.pid" \
  --log-file="$folder/munge.log" --seed-file="$folder/munge.seed"

export SLURM_CONF=$folder/slurm.conf
cat > "$SLURM_CONF" << CONF
ClusterName=virtual
SlurmctldHost=$(hostname)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
for number in 1 2 3 4; do
  echo "NodeName=n$number NodeHostname=n$number NodeAddr=10.0.0.$number Port=1700$number CPUs=8 RealMemory=16000"
done >> "$SLURM_CONF"
mkdir "$folder/state"
slurmctld
for node in n1 n2 n3 n4; do unshare --uts bash -c 'hostname "$1" && slurmd -N "$1"' node "$node"; done
for _ in {1..150}; do # each takes a fifth of a second, more while sinfo waits for slurmctld
  if [[ $(sinfo --noheader --states=idle --format=%D 2> /dev/null) == 4 ]]; then
    code=0
    "$@" || code=$? # no exec: the first process of a namespace ignores Ctrl-C
    exit "$code"
  fi
  sleep 0.2
done
echo "error: SLURM's four nodes did not become idle within 30 s:" >&2
tail -n 5 "$folder"/*.log >&2
exit 1
