#!/usr/bin/env bash
# A machine for a kubelet: a network, mounts, processes and a host name of its own on this system's /usr. It runs nothing
# but a process 1 that reaps; containerd and kubelet are started in it with nsenter. It lives as long as this script.
# Usage: kubelet-machine.sh NAME NETNS DIR KEPT [PATH]...: its host name, the network namespace, a directory with what it keeps
# on disk, containerd's directories with colons between them, which it keeps too, and directories of programs that it has.
# Once it's up, DIR/run/kubernetes/up has the name of its control group.
set -euo pipefail

if [[ ${1-} != --inside ]]; then
  # shellcheck source=e2e/setup/control-groups.sh
  source "$(dirname "${BASH_SOURCE[0]}")/control-groups.sh"
  # shellcheck disable=SC2119 # in all hierarchies
  group=$(make_groups)
  exec nsenter --net="/run/netns/$2" unshare --mount --pid --fork --kill-child --uts --ipc \
    bash "${BASH_SOURCE[0]}" --inside "$group" "$@"
fi
group=$2 name=$3 dir=$5
IFS=: read -ra of_containerd <<<"$6"

hostname "$name"
mount --make-rprivate /
mkdir -p "$dir/root"
mount -t tmpfs machine "$dir/root"
cd "$dir/root"
mkdir -p usr etc var/tmp var/log/pods var/log/containers run tmp proc sys dev root opt/cni/bin old mnt
chmod 1777 tmp var/tmp
for link in bin sbin lib lib32 lib64 libx32; do [[ ! -L /$link ]] || ln -s "usr/$link" "$link"; done
mount --bind /usr usr
mount -o remount,bind,ro usr
cp -r /etc/passwd /etc/group /etc/nsswitch.conf /etc/ld.so.cache etc/
[[ ! -d /etc/alternatives ]] || cp -r /etc/alternatives etc/
printf '127.0.0.1 localhost\n' >etc/hosts
: >etc/resolv.conf
tr -d - </proc/sys/kernel/random/uuid >etc/machine-id

# What outlives a restart of containerd is on disk, where the test finds it too: images are not for memory, and an
# overlay can't have another overlay below it. The agent's directory is no mount of its own, so that it can be removed.
for kept in var/lib var/lib/kubelet etc/ssl/certs etc/cni/net.d etc/credential-providers run/kubernetes \
  "${of_containerd[@]#/}"; do
  mkdir -p "$dir/$kept" "$kept"
  mount --bind "$dir/$kept" "$kept"
done
mount --bind /usr/lib/cni opt/cni/bin
# The programs that the test brings along, at the paths that they have outside.
for given in "${@:7}"; do
  mkdir -p ".$given"
  mount --bind "$given" ".$given"
done

mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev

pivot_root . old
cd /
umount --lazy old
# What a kubelet mounts for a pod has to reach containerd and, where a pod asks for it, the pod.
mount --make-rshared /

printf '%s\n' "$group" >/run/kubernetes/up
trap 'exit 0' TERM
# Shims of containers end up as our children: the shell reaps them.
while :; do
  sleep 3600 &
  wait $!
done
