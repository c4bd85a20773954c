#!/usr/bin/env bash
# Prints what the figures and failures of a run depend on.
set -euo pipefail
echo "commit:  $(git rev-parse --short HEAD 2>/dev/null || echo 'not a git checkout')"
echo "kernel:  $(uname -srm)"
echo "cores:   $(nproc)"
awk '/^(MemTotal|MemAvailable)/ { printf "%s %.1f GiB\n", $1, $2 / 1048576 }' /proc/meminfo
echo "memlock: $(ulimit -l) KiB"
df -h --output=fstype,avail . | tail -1 | awk '{ print "disk:    " $1 ", " $2 " free" }'
echo "rust:    $(rustc --version)"
