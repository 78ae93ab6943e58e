#!/usr/bin/env bash
# Cleans up after a test harness that may die without a word (SIGKILL, a panic in a destructor).
# The harness holds the other end of our stdin and reports what it starts; at EOF, for any
# reason, all of that goes away. Usage: reaper.sh [LOG], spawned in a process group of its own.
#
#   pid PID STARTTIME   a process; STARTTIME is field 22 of /proc/PID/stat, against reused PIDs
#   dir PATH            a directory below /tmp, $TMPDIR or /run, absolute
#   netns NAME          a network namespace as `ip netns` names it
#
# Order: processes, with their group (if they lead one) and descendants, and the control groups that machines have named
# after theirs; mounts below the directories; namespaces; directories. Nothing else is touched.
set -euo pipefail

# Not on our inherited stdout and stderr: a test runner would wait for us to close them.
exec >>"${1:-/dev/null}" 2>&1
# Ctrl-C and a closing terminal are what we are here for.
trap '' INT TERM HUP PIPE
PATH=$PATH:/usr/sbin:/sbin
cd / # hold no directory

say() { printf 'reaper: %s\n' "$*"; }

# Sets state, group and started of a process; state is X when there is none. The name, in
# parentheses, may itself hold blanks and parentheses: what follows the last one counts. No
# subshells here: this is called often.
look_at() { # PID
  local stat='' fields
  { read -r -d '' stat <"/proc/$1/stat"; } 2>/dev/null || [[ -n $stat ]] || stat=') X'
  read -r -a fields <<<"${stat##*) }"
  state=${fields[0]} group=${fields[2]-0} started=${fields[19]-0}
}

is() { # PID STARTTIME
  look_at "$1"
  [[ $state != [XZ] && $started == "$2" ]]
}

# Stopped first, so that none forks while we look; parents before children.
declare -A doomed=() # PID -> STARTTIME
doom() { # PID
  local pid=$1 list child children=()
  [[ -z ${doomed[$pid]-} ]] && ((pid != $$)) || return 0
  kill -STOP "$pid" 2>/dev/null || return 0
  look_at "$pid"
  doomed[$pid]=$started
  # Every thread has a list of its own.
  for list in "/proc/$pid/task/"*/children; do
    { read -r -a children <"$list"; } 2>/dev/null || true
    for child in "${children[@]}"; do doom "$child"; done
  done
}

kill_all() {
  local pid groups=() tries
  for pid in "${!processes[@]}"; do
    is "$pid" "${processes[$pid]}" || continue
    if ((group == pid)); then groups+=("$pid"); fi
    # A stopped leader keeps its PID, and with it the number of its group, from being reused.
    doom "$pid"
  done
  for pid in "${groups[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
  for pid in "${!doomed[@]}"; do
    if is "$pid" "${doomed[$pid]}"; then
      kill -KILL "$pid" 2>/dev/null || true
      kill -CONT "$pid" 2>/dev/null || true
    fi
  done
  # A process dies only when the kernel lets it: wait, but not for ever.
  for ((tries = 0; tries < 100; tries++)); do
    for pid in "${!doomed[@]}"; do
      is "$pid" "${doomed[$pid]}" || unset "doomed[$pid]"
    done
    ((${#doomed[@]})) || return 0
    sleep 0.05
  done
  say "still alive after 5 s: ${!doomed[*]}"
}

# The path without symbolic links or `..`, if it is one that we may remove.
allowed() { # PATH
  local path root
  [[ $1 == /* ]] || return 1
  path=$(realpath -m -- "$1")
  for root in /tmp /run "${TMPDIR-}"; do
    [[ $root == /?* ]] || continue
    root=$(realpath -m -- "$root")
    if [[ $root != / && $path == "$root"/?* ]]; then
      printf '%s\n' "$path"
      return
    fi
  done
  return 1
}

unmount_below() { # PATH
  local point points=()
  # Field 5 is the mount point, with blanks and the like in octal. Last mounted, first off; lazily,
  # since a server that hangs must not hang us.
  while read -r _ _ _ _ point _; do
    printf -v point '%b' "$point"
    if [[ $point == "$1" || $point == "$1"/* ]]; then points=("$point" "${points[@]}"); fi
  done </proc/self/mountinfo
  for point in "${points[@]}"; do umount --lazy -- "$point" || say "could not unmount $point"; done
}

declare -A processes=() # PID -> STARTTIME
dirs=() namespaces=()
# A last line without its end is not taken: of `dir /tmp/ab` it might be the `dir /tmp/a`.
while read -r kind value more; do
  case $kind in
    pid)
      if [[ $value =~ ^[0-9]+$ && $more =~ ^[0-9]+$ ]] && ((value > 1)); then
        processes[$value]=$more # reported again: the newer one, the PID was reused
      else
        say "refused: pid $value $more"
      fi
      ;;
    dir)
      value=$value${more:+ $more} # blanks in a path
      if allowed "$value" >/dev/null; then dirs+=("$value"); else say "refused: dir $value"; fi
      ;;
    netns)
      if [[ $value =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]*$ && -z $more ]]; then
        namespaces+=("$value")
      else
        say "refused: netns $value $more"
      fi
      ;;
    *) say "not understood: $kind $value $more" ;;
  esac
done

kill_all
for pid in "${!processes[@]}"; do
  for group in "/sys/fs/cgroup/prepull-$pid" /sys/fs/cgroup/*/"prepull-$pid"; do
    [[ -d $group ]] || continue
    # The last processes of a machine die a moment after its first one.
    for ((tries = 0; tries < 40; tries++)); do
      find "$group" -depth -type d -exec rmdir {} + 2>/dev/null && break
      sleep 0.05
    done
  done
done
for dir in "${dirs[@]}"; do
  # Again: it may have become a symbolic link since.
  if dir=$(allowed "$dir"); then unmount_below "$dir"; fi
done
for name in "${namespaces[@]}"; do
  if [[ -e /run/netns/$name ]]; then ip netns delete "$name" || say "could not delete netns $name"; fi
done
for dir in "${dirs[@]}"; do
  # A mount that could not be taken off is not emptied.
  if dir=$(allowed "$dir"); then rm -rf --one-file-system -- "$dir" || say "could not remove $dir"; fi
done
