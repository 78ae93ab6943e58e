# Sourced by test.sh: the packages, installed in a system of their own: a Debian 12 with its systemd in a container.
# shellcheck shell=bash disable=SC2154 # what test.sh and names.sh have set

# Made once and kept in the cache. The mirror is the one that this machine uses.
system=${XDG_CACHE_HOME:-$HOME/.cache}/prepull-e2e/debian-bookworm-systemd-rpm-1.tar
(
  exec 9>"$system.lock"
  flock 9
  [[ ! -f $system ]] || exit 0
  say "debootstrap: a Debian 12, once (a minute; 270 MB in the cache)"
  mirrors=$(e2e/setup/debian-mirrors.sh)
  debootstrap --variant=minbase --include=systemd,systemd-sysv,rpm bookworm "$scratch/debootstrap" "${mirrors%%$'\n'*}" \
    >"$scratch/log" 2>&1 9>&- || { tail -n 20 "$scratch/log" >&2 && exit 1; }
  rm -rf "$scratch"/debootstrap/var/cache/apt/archives/*.deb "$scratch"/debootstrap/var/lib/apt/lists/*
  tar --create --file "$system.new" --directory "$scratch/debootstrap" .
  mv "$system.new" "$system"
  rm -rf --one-file-system "$scratch/debootstrap"
)

say "a system of its own, with systemd"
mkdir -p "$scratch/system/rootfs"
tar --extract --file "$system" --directory "$scratch/system/rootfs"
root=$scratch/system/rootfs
(
  cd "$scratch/system" || exit
  runc spec
  # What systemd needs; the network is a loopback of its own.
  jq '.process.terminal = false | .process.args = ["/lib/systemd/systemd"] | .process.env += ["container=runc"] |
      .process.noNewPrivileges = false | .root.readonly = false | .linux.maskedPaths = [] | .linux.readonlyPaths = [] |
      ("CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL MKNOD NET_ADMIN NET_BIND_SERVICE SETFCAP SETGID SETPCAP " +
       "SETUID SYS_ADMIN SYS_CHROOT SYS_PTRACE" | split(" ") | map("CAP_" + .)) as $capabilities |
      .process.capabilities |= with_entries(.value = $capabilities) |
      .linux.namespaces += [{type: "cgroup"}] |
      .mounts |= map(if .destination == "/sys/fs/cgroup" then .options -= ["ro"] else . end) |
      .mounts += [{destination: "/run", type: "tmpfs", source: "tmpfs", options: ["mode=755"]}]' config.json >spec.json
  mv spec.json config.json
)
runc --root "$scratch/runc" run --detach --bundle "$scratch/system" system >"$scratch/system/log" 2>&1 </dev/null
inside() { runc --root "$scratch/runc" exec system "$@" </dev/null; }
quietly() { inside "$@" >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2 && die "in the system: $* failed"; }; }
up() { # until systemd answers, and all its units are up
  local tries
  for ((tries = 0; tries < 100; tries++)); do
    [[ $(inside systemctl is-system-running --wait 2>/dev/null) != running ]] || return 0
    sleep 0.1
  done
  inside systemctl --no-pager --failed >&2 || true
  die "systemd does not come up"
}
up

agent=edgecore-prepull.service
settings=etc/edgecore-prepull/config.yaml
state=var/lib/edgecore-prepull
# What a package may leave behind: files, but for those of dpkg, rpm and the running system itself.
files() {
  (cd "$root" && find . \( -path ./proc -o -path ./run -o -path ./sys -o -path ./dev -o -path ./tmp -o -path ./var/tmp -o -path ./packages \
    -o -path ./var/lib/dpkg -o -path ./var/lib/rpm -o -path ./var/log -o -path ./var/cache \) -prune -o -printf '%P %l\n' | LC_ALL=C sort)
}
property() { inside systemctl show --property "$1" --value "$agent"; } # PROPERTY
is() { # WHAT PROPERTY VALUE
  local value
  value=$(property "$2")
  [[ $value == "$3" ]] || { inside systemctl --no-pager status "$agent" >&2 || true; die "$1: the unit's $2 is $value, not $3"; }
}
# The identity that the images had.
pretend_join() {
  install -d -m 700 "$root/$state"
  cp --recursive "$scratch/mounted/pki" "$scratch/mounted/connection.json" "$root/$state/"
}
serves() { # WHAT
  local tries
  is "$1" ActiveState active
  for ((tries = 0; tries < 100; tries++)); do
    # shellcheck disable=SC2016 # of the inner shell
    ! inside bash -c 'exec 3<>/dev/tcp/127.0.0.1/10004 && printf "GET /healthz HTTP/1.0\r\n\r\n" >&3 && grep --quiet "200 OK" <&3' 2>/dev/null || return 0
    sleep 0.1
  done
  inside systemctl --no-pager status "$agent" >&2 || true
  die "$1: the agent does not answer at /healthz"
}
# After the installation of either package: the same files, and nothing that runs before the node has joined.
installed() { # WHAT
  cmp "$root/usr/bin/edgecore-prepull" "$dist/edgecore-prepull-linux-$own"
  cmp "$root/$settings" manifests/edgecore-prepull/config.yaml
  quietly systemd-analyze verify "/usr/lib/systemd/system/$agent"
  is "$1" UnitFileState enabled
  quietly systemctl start "$agent"
  is "$1" ActiveState inactive
  is "$1" ConditionResult no
  pretend_join
  quietly systemctl start "$agent"
  serves "$1"
}
changed() { # an installation, removal and the like, in milliseconds
  local began=${EPOCHREALTIME/[.,]/}
  quietly "$@"
  printf '%d ms' $(((${EPOCHREALTIME/[.,]/} - began) / 1000))
}

deb=edgecore-prepull_${version}_$own.deb rpm_=edgecore-prepull-$version-1.$(uname -m).rpm
mkdir "$root/packages"
cp "$dist/$deb" "$dist/$rpm_" "$root/packages/"
files >"$scratch/before"

say "$deb: installed, joined, upgraded, removed, purged"
row "$deb" "installed in $(changed dpkg --install "/packages/$deb")"
installed "$deb"
# An upgrade leaves changed settings as they are, and restarts the agent.
sed -i 's/^maxTasks: 1/maxTasks: 2/' "$root/$settings"
first=$(property MainPID)
quietly dpkg --install "/packages/$deb"
serves "$deb, upgraded"
[[ $(property MainPID) != "$first" ]] || die "$deb: an upgrade leaves the old agent running"
grep --quiet '^maxTasks: 2' "$root/$settings" || die "$deb: an upgrade overwrites the settings"
# A unit that the user has disabled stays so, and is not started.
quietly systemctl disable --now "$agent"
quietly dpkg --install "/packages/$deb"
is "$deb, upgraded" UnitFileState disabled
is "$deb, upgraded" ActiveState inactive
quietly systemctl enable --now "$agent"
serves "$deb, enabled again"
quietly dpkg --remove edgecore-prepull
is "$deb, removed" ActiveState inactive
[[ ! -e $root/usr/bin/edgecore-prepull ]] || die "$deb: a removal leaves the program"
[[ -f $root/$state/pki/client.key && -f $root/$settings ]] || die "$deb: a removal takes more than a removal may"
# As `edgecore-prepull install` writes them.
touch "$root/${settings%/*}/proxy.env" "$root/${settings%/*}/upgrade.pub"
quietly dpkg --purge edgecore-prepull
files | diff "$scratch/before" - || die "$deb: a purge leaves these"

say "$deb over what \`install\` has put in place, which the package then replaces"
pretend_join
install -m 755 "$dist/edgecore-prepull-linux-$own" "$root/packages/download"
install_again() { # PROGRAM: it finds no cloudcore to connect to, when all is done
  ! inside "$1" install --timeout 1s >"$scratch/log" 2>&1 || die "$1 install: connected to nothing?"
  grep --quiet 'not connected to' "$scratch/log" || { cat "$scratch/log" >&2 && die "$1 install failed"; }
}
install_again /packages/download
serves "installed by a download"
is "installed by a download" FragmentPath "/etc/systemd/system/$agent"
quietly dpkg --install "/packages/$deb"
grep --quiet 'edgecore-prepull install' "$scratch/log" || die "$deb does not say that another unit comes before its own"
install_again /usr/bin/edgecore-prepull
serves "$deb, installed over a download"
is "$deb, installed over a download" FragmentPath "/lib/systemd/system/$agent"
is "$deb, installed over a download" UnitFileState enabled
[[ $(inside readlink "/proc/$(property MainPID)/exe") == /usr/bin/edgecore-prepull ]] || die "$deb: the download still runs"
quietly dpkg --purge edgecore-prepull
rm "$root/packages/download"
files | diff "$scratch/before" - || die "$deb: a purge after a download leaves these"

say "$rpm_: installed, joined, upgraded, removed"
# It knows nothing of the shell that its scripts want, since dpkg has installed that.
rpm_inside=(rpm --force-debian --nodeps)
row "$rpm_" "installed in $(changed "${rpm_inside[@]}" --install "/packages/$rpm_")"
installed "$rpm_"
sed -i 's/^maxTasks: 1/maxTasks: 2/' "$root/$settings"
first=$(property MainPID)
quietly "${rpm_inside[@]}" --upgrade --replacepkgs "/packages/$rpm_"
grep --quiet '^maxTasks: 2' "$root/$settings" || die "$rpm_: an upgrade overwrites the settings"
serves "$rpm_, upgraded"
quietly "${rpm_inside[@]}" --erase edgecore-prepull
is "$rpm_, removed" ActiveState inactive
[[ -f $root/$state/pki/client.key && -f $root/$settings.rpmsave ]] || die "$rpm_: a removal takes more than a removal may"
rm -r "${root:?}/$state" "$root/etc/edgecore-prepull" "$root/root/.rpmdb"
files | diff "$scratch/before" - || die "$rpm_: a removal leaves these"

say "packages for $other: the same program inside"
machine=${target_of[$other]%%-*}
deb=edgecore-prepull_${version}_$other.deb rpm_=edgecore-prepull-$version-1.$machine.rpm
[[ $(dpkg-deb --field "$dist/$deb" Architecture) == "$other" ]] || die "$deb is for another machine"
[[ $(rpm --dbpath "$scratch/rpmdb" --query --package --queryformat '%{ARCH}' "$dist/$rpm_" 2>/dev/null) == "$machine" ]] || die "$rpm_ is for another machine"
dpkg-deb --fsys-tarfile "$dist/$deb" | tar --extract --to-stdout ./usr/bin/edgecore-prepull | cmp - "$dist/edgecore-prepull-linux-$other"
mkdir "$scratch/rpm"
(cd "$scratch/rpm" && rpm2cpio "$dist/$rpm_" | cpio --quiet --extract --make-directories)
cmp "$scratch/rpm/usr/bin/edgecore-prepull" "$dist/edgecore-prepull-linux-$other"
row "$deb" "-"
row "$rpm_" "-"
