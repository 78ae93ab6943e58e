#!/usr/bin/env bash
# A machine of its own on this one: systemd as process 1 in namespaces of its own (but for the network), with this
# system's /usr, read-only, and nothing else of it. It lives as long as this script, and is gone with it.
# Usage: machine.sh NAME ROOT PROGRAM RUNTIME [STATE]: its host name, an empty directory, a program that lies about in
# /root there as if it had been downloaded, the directory that is /run/containerd there, and one that is the agent's
# state directory there.
set -euo pipefail

if [[ ${1-} != --inside ]]; then
  # Groups for its services, below which it sees nothing else.
  # shellcheck source=e2e/setup/control-groups.sh
  source "$(dirname "${BASH_SOURCE[0]}")/control-groups.sh"
  make_groups systemd unified >/dev/null
  enter_groups systemd unified
  exec unshare --mount --pid --fork --kill-child --cgroup --uts --ipc bash "${BASH_SOURCE[0]}" --inside "$@"
fi
shift
name=$1 root=$2 program=$3 runtime=$4 state=${5-}

hostname "$name"
mount --make-rprivate /
mount -t tmpfs machine "$root"
cd "$root"
mkdir -p usr etc/systemd/system var/lib var/log var/tmp run tmp proc sys dev root
chmod 1777 tmp var/tmp
for link in bin sbin lib lib32 lib64 libx32; do [[ ! -L /$link ]] || ln -s "usr/$link" "$link"; done
mount --bind /usr usr
mount -o remount,bind,ro usr
mount -t tmpfs local usr/local
mkdir usr/local/bin
cp -r /etc/passwd /etc/group /etc/nsswitch.conf /etc/ld.so.cache etc/
tr -d - </proc/sys/kernel/random/uuid >etc/machine-id

# What the unit names, and a journal. Nothing that sets up hardware, the clock or the kernel: that is not ours.
mount -t tmpfs units usr/lib/systemd/system
for unit in {basic,sysinit,multi-user,sockets,paths,slices,timers,local-fs,network,network-online,time-set,time-sync,shutdown,umount,final}.target \
  systemd-journald.service systemd-journald.socket systemd-journald-dev-log.socket; do
  cp "/usr/lib/systemd/system/$unit" usr/lib/systemd/system/
done
mkdir etc/systemd/system/sockets.target.wants
ln -s /usr/lib/systemd/system/systemd-journald{,-dev-log}.socket etc/systemd/system/sockets.target.wants/

mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t tmpfs dev dev
for device in null zero full random urandom tty; do
  touch "dev/$device"
  mount --bind "/dev/$device" "dev/$device"
done
mkdir dev/shm dev/pts
mount -t devpts -o newinstance,ptmxmode=0666 pts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd

mount -t tmpfs run run
mkdir run/containerd
mount --rbind "$runtime" run/containerd
# The agent asks the runtime for its data directory and measures the room there. The directory is below /tmp, and the
# unit has a private /tmp.
mkdir -p ".$runtime" usr/lib/systemd/system/edgecore-prepull.service.d
# By hand, commands see the files for registries too, which lie beside it.
mount --bind "$(dirname "$runtime")" ".$(dirname "$runtime")"
mount --rbind "$runtime" ".$runtime"
printf '[Service]\nBindReadOnlyPaths=%s\n' "$runtime" >usr/lib/systemd/system/edgecore-prepull.service.d/runtime.conf
touch root/download
mount --bind "$program" root/download
if [[ $state ]]; then
  mkdir -m 700 var/lib/edgecore-prepull
  mount --bind "$state" var/lib/edgecore-prepull
fi

exec env -i container=prepull-e2e PATH=/usr/local/bin:/usr/bin:/usr/sbin \
  unshare --root=. /lib/systemd/systemd --system --unit=multi-user.target --log-target=journal
