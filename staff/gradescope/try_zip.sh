#!/usr/bin/env bash
# Tries autograder.zip as Gradescope would: as root, in a root folder of its own with nothing of this machine but the
# system's programs, unpacked into /autograder; setup.sh, run_autograder, then results.json on stdout.
#
#     staff/gradescope/try_zip.sh dist/autograder.zip SUBMISSION_FOLDER [VIRTUAL_ENVIRONMENT]
#
# With a virtual environment setup.sh finds all it needs in it; without one it installs, which takes minutes.
set -euo pipefail
zip=$(realpath "$1") submission=$(realpath "$2") environment=${3:+$(realpath "$3")}
export zip submission environment

exec unshare --mount --pid --fork --kill-child bash -euo pipefail -c '
  root=$(mktemp -d)
  mount -t tmpfs -o size=12g none "$root"
  for folder in bin sbin lib lib64 usr etc dev; do
    if [ -L "/$folder" ]; then cp -P "/$folder" "$root/"
    elif [ -d "/$folder" ]; then mkdir "$root/$folder" && mount --rbind "/$folder" "$root/$folder"; fi
  done
  mkdir -p "$root"/{proc,tmp,root,autograder/{source,results,python}}
  chmod 1777 "$root/tmp"
  mount -t proc proc "$root/proc"
  if [ -n "$environment" ]; then
    mount --bind "$environment" "$root/autograder/python"
    home=$(dirname "$(sed -n "s/^home = //p" "$environment/pyvenv.cfg")") # the Python that the environment is made of
    mkdir -p "$root$home" && mount --bind "$home" "$root$home"
  fi
  python3 -m zipfile -e "$zip" "$root/autograder/source"
  cp -r "$submission" "$root/autograder/submission"
  cp "$root/autograder/source/run_autograder" "$root/autograder/"
  chmod +x "$root/autograder/run_autograder"
  chroot "$root" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    COS598D_PYTHON=/autograder/python/bin/python bash -euo pipefail -c "
      bash /autograder/source/setup.sh >&2
      cd /autograder && ./run_autograder >&2"
  cat "$root/autograder/results/results.json"
'
