#!/usr/bin/env bash
# Sourced by the scripts that make machines: control groups of a machine's own, named after the process that asks. Those
# of machines that were killed go first.

# Prints the roots of the hierarchies: that of cgroup v2, or those of v1, one for each controller.
hierarchies() { # [NAME]... of v1, or all of them
  local name names=("$@") root=/sys/fs/cgroup
  if [[ -e $root/cgroup.procs ]]; then
    printf '%s\n' "$root"
    return
  fi
  (($#)) || mapfile -t names < <(ls "$root")
  for name in "${names[@]}"; do
    # A link is another name of a hierarchy.
    [[ ! -e $root/$name/cgroup.procs || -L $root/$name ]] || printf '%s\n' "$root/$name"
  done
}

# Makes the group `prepull-PID` of this process in each hierarchy, and prints its name.
make_groups() { # [NAME]...
  local tree left file
  while read -r tree; do
    for left in "$tree"/prepull-*; do
      [[ ! -d $left || -d /proc/${left##*-} ]] || find "$left" -depth -type d -exec rmdir {} + 2>/dev/null || true
    done
    mkdir "$tree/prepull-$$"
    # In v1 a new group of cpuset has no processor until it's given some.
    for file in cpuset.cpus cpuset.mems; do
      [[ ! -e $tree/prepull-$$/$file ]] || cat "$tree/$file" >"$tree/prepull-$$/$file" 2>/dev/null || true
    done
  done < <(hierarchies "$@")
  printf 'prepull-%s\n' "$$"
}

# Moves this process into its groups.
enter_groups() { # [NAME]...
  local tree
  while read -r tree; do echo $$ >"$tree/prepull-$$/cgroup.procs"; done < <(hierarchies "$@")
}
