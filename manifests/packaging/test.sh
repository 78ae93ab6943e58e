#!/usr/bin/env bash
# Starts everything that `make dist` has made: `make test-dist`. Programs and images of the other architecture run under
# qemu. Needs root. At the end it prints the size of each artefact, and how long it takes to start.
#
# Nothing is left behind: everything is in one directory, mounts are in namespaces that end with their process, and
# containers are deleted at the end, however it ends.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=manifests/packaging/names.sh
. "$here/names.sh"
PATH=$PATH:/usr/sbin:/sbin

die() { say "$*" >&2 && exit 1; }

[[ -f $dist/SHA256SUMS ]] || die "nothing in $dist: make dist makes it"
SOURCE_DATE_EPOCH=$(stat --format %Y "$dist/SHA256SUMS")
((EUID == 0)) || die "packages and containers are tried as root: sudo make test-dist"
e2e/setup/packages.sh "${dist_packages[@]}" "${test_packages[@]}"

scratch=$(mktemp -d /tmp/prepull-dist.XXXXXX)
cleanup() {
  local container
  for container in "$scratch"/runc/*; do
    [[ ! -d $container ]] || runc --root "$scratch/runc" delete --force "${container##*/}" || true
  done
  rm -rf --one-file-system "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

case $(uname -m) in
  x86_64) own=amd64 other=arm64 qemu=$(command -v qemu-aarch64-static) ;;
  aarch64) own=arm64 other=amd64 qemu=$(command -v qemu-x86_64-static) ;;
  *) die "this machine is neither x86_64 nor aarch64" ;;
esac
table=()
# Milliseconds of the fastest of some runs: the others are the machine's noise.
fastest() { # RUNS COMMAND...
  local runs=$1 began took least=
  shift
  while ((runs-- > 0)); do
    began=${EPOCHREALTIME/[.,]/}
    "$@" >/dev/null
    took=$((${EPOCHREALTIME/[.,]/} - began))
    if [[ -z $least ]] || ((took < least)); then least=$took; fi
  done
  printf '%d.%d ms' $((least / 1000)) $((least % 1000 / 100))
}
row() { # FILE START
  table+=("$(printf '%-42s %6d KiB  %s' "$1" $(($(stat --format %s "$dist/$1") / 1024)) "$2")")
}

say "checksums: of every file, and right"
(cd "$dist" && sha256sum --check --quiet SHA256SUMS)
diff <(cd "$dist" && find . -type f ! -name 'SHA256SUMS*' -printf '%P\n' | LC_ALL=C sort) \
  <(sed 's/^[^ ]*  //' "$dist/SHA256SUMS") || die "SHA256SUMS is not a list of what is there"

[[ ! -f $dist/SHA256SUMS.sig ]] || say "signed, by a key that is not checked here"

say "CA roots: Mozilla's, and none that this machine trusts beside"
for ca in /usr/local/share/ca-certificates/*.crt; do
  [[ ! -f $ca ]] || ! grep --quiet --fixed-strings "$(sed -n 2p "$ca")" "$dist/ca-certificates.crt" || die "$ca is among them"
done

say "images, packages and archives: made again, they are the same"
mkdir "$scratch/again"
"$here/images.sh" "$dist" "$scratch/again" >/dev/null
"$here/packages.sh" "$dist" "$scratch/again" >/dev/null
# The manifest of krew names where its archives will be, which only its maker knows.
DIST_URL=$(sed -n 's|^ *uri: \(.*\)/[^/]*$|\1|p' "$dist/kubectl-prepull.krew.yaml" | head -n 1) "$here/plugin.sh" "$dist" "$scratch/again" >/dev/null
"$here/chart.sh" "$scratch/again" >/dev/null
"$here/notes.sh" >"$scratch/again/RELEASE-NOTES.md"
for file in "$scratch/again"/*; do
  cmp "$file" "$dist/${file##*/}" || die "${file##*/} is another one each time"
done

say "chart: what the archive renders is what its folder does"
helm=$(e2e/setup/helm.sh)
render() { "$helm" template prepull "$1" --namespace prepull-system --set 'advertise={cloudcore.example}' --set agents.enabled=true 2>/dev/null; }
diff <(render "$dist/image-prepull-$version.tgz") <(render manifests/chart) || die "the archive of the chart is not its folder"

# What runs a program, in front of its command.
declare -A runner=([$own]='' [$other]=$qemu)
for arch in "$own" "$other"; do
  for program in "${programs[@]}"; do
    file=$program-linux-$arch
    say "$file: static, and runs${runner[$arch]:+ under ${qemu##*/}}"
    ! readelf --program-headers --dynamic --wide "$dist/$file" | grep -E 'INTERP|NEEDED' || die "$file is not static"
    readelf --file-header "$dist/$file" | grep --quiet 'Type: *DYN' || die "$file is loaded at the same address each time"
    # shellcheck disable=SC2086 # empty, or one word
    answer=$(${runner[$arch]} "$dist/$file" --version)
    [[ $answer == "$program $version" ]] || die "$file --version says: $answer"
    # shellcheck disable=SC2086
    row "$file" "$(fastest 10 ${runner[$arch]} "$dist/$file" --version)${runner[$arch]:+ under qemu}"
    jq --exit-status --arg name "$program" '.metadata.component.name | startswith($name)' "$dist/$file.cdx.json" >/dev/null ||
      die "$file.cdx.json is not about $program"
  done
done

say "kubectl-prepull.krew.yaml: what it names is here, whole, and the program that was started"
krew=$dist/kubectl-prepull.krew.yaml
! grep '@' "$krew" | grep -v '^#' || die "something in $krew was not filled in"
python3 -c 'import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)' <"$krew" >"$scratch/krew.json"
jq --exit-status --arg version "v$version" '.kind == "Plugin" and .metadata.name == "prepull" and .spec.version == $version and
  ([.spec.platforms[].selector.matchLabels | .os + "/" + .arch] | sort) == ["linux/amd64", "linux/arm64"]' "$scratch/krew.json" >/dev/null ||
  die "$krew is not about both architectures of prepull $version"
while read -r arch uri sum bin; do
  archive=${uri##*/}
  [[ $sum == "$(sha256sum "$dist/$archive" | cut -d ' ' -f 1)" ]] || die "$krew has another checksum than $archive"
  mkdir "$scratch/krew-$arch"
  tar --extract --gzip --file "$dist/$archive" --directory "$scratch/krew-$arch"
  diff <(cd "$scratch/krew-$arch" && find . -type f -printf '%m %P\n' | LC_ALL=C sort) - <<END || die "$archive has something else in it"
644 LICENSE
755 $bin
END
  cmp "$scratch/krew-$arch/$bin" "$dist/kubectl-prepull-linux-$arch"
  row "$archive" "-"
done < <(jq --raw-output '.spec.platforms[] | [.selector.matchLabels.arch, .uri, .sha256, .bin] | join(" ")' "$scratch/krew.json")

# As a pod of our manifests has it: read-only, without capabilities, and without a network of its own.
bundle() { # PROGRAM ARCH: makes $scratch/PROGRAM-ARCH
  local dir=$scratch/$1-$2
  skopeo copy --quiet --override-arch "$2" "oci-archive:$dist/$1-image.tar" "oci:$dir.oci:one"
  umoci unpack --image "$dir.oci:one" "$dir" 2>"$scratch/log" || { cat "$scratch/log" >&2 && exit 1; }
  # What is in it, but for directories.
  diff <(cd "$dir/rootfs" && find . -not -type d -printf '%m %U:%G %P\n' | LC_ALL=C sort) - <<END || die "the image of $1 has something else in it"
644 0:0 etc/ssl/certs/ca-certificates.crt
755 0:0 usr/local/bin/$1
END
  cmp "$dir/rootfs/usr/local/bin/$1" "$dist/$1-linux-$2"
  jq '.process.terminal = false | .process.capabilities = {} | .process.noNewPrivileges = true | .root.readonly = true |
      del(.linux.resources)' "$dir/config.json" >"$dir/spec.json"
  mv "$dir/spec.json" "$dir/config.json"
  if [[ -n ${runner[$2]} ]]; then
    # Mounted from this machine; the place for it is made beforehand, the root being read-only.
    touch "$dir/rootfs/qemu"
    jq --arg qemu "$qemu" '.process.args |= ["/qemu"] + . |
      .mounts += [{destination: "/qemu", type: "bind", source: $qemu, options: ["bind", "ro"]}]' \
      "$dir/config.json" >"$dir/spec.json"
    mv "$dir/spec.json" "$dir/config.json"
  fi
}
# The bundle, for a container that runs `run`, the image's own command, with arguments and a directory of this machine.
prepare_run() { # PROGRAM ARCH PATH ARGUMENT...
  local dir=$scratch/$1-$2 path=$3
  shift 3
  jq --arg from "$scratch/mounted" --arg to "$path" '.process.args += $ARGS.positional |
    .mounts += [{destination: $to, type: "bind", source: $from, options: ["rbind", "rw"]}]' \
    "$dir/config.json" --args -- "$@" >"$dir/spec.json"
  mv "$dir/spec.json" "$dir/config.json"
}
# Until it answers; the network is a loopback of its own.
answers() { # PROGRAM ARCH PORT
  local name=$1-$2 pid tries
  runc --root "$scratch/runc" run --detach --bundle "$scratch/$name" "$name" >"$scratch/$name.log" 2>&1 </dev/null
  pid=$(runc --root "$scratch/runc" state "$name" | jq .pid)
  for ((tries = 0; tries < 1000; tries++)); do
    ! nsenter --net="/proc/$pid/ns/net" curl --silent --fail --output /dev/null "http://127.0.0.1:$3/healthz" || break
    sleep 0.01
  done
  # By its name alone, as `kubectl exec … -- cloudcore-prepull token create` has it.
  [[ $2 != "$own" ]] || runc --root "$scratch/runc" exec "$name" "$1" --version >/dev/null || die "in the image, $1 is not in PATH"
  runc --root "$scratch/runc" delete --force "$name"
  ((tries < 1000)) || { cat "$scratch/$name.log" >&2 && die "the image of $1 for $2 does not answer at /healthz"; }
}

# What both find where they run: the identity of a node, as `join` leaves it, of a cloud that is not there; and the way to
# an API server that is not there.
mkdir -p "$scratch/mounted/pki"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj '/O=prepull:nodes/CN=prepull:node:edge-1' \
  -keyout "$scratch/mounted/pki/client.key" -out "$scratch/mounted/pki/client.crt" 2>/dev/null
cp "$scratch/mounted/pki/client.crt" "$scratch/mounted/pki/ca.crt"
echo '{"tunnelUrls": ["wss://127.0.0.1:10000/v1/edge"], "enrollUrls": ["https://127.0.0.1:10002"], "nodeName": "edge-1"}' \
  >"$scratch/mounted/connection.json"
cat >"$scratch/mounted/kubeconfig" <<'END'
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: none, user: {token: none}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
current-context: none
END
for program in "${images[@]}"; do
  for arch in "$own" "$other"; do
    say "$program-image.tar: starts as $arch"
    bundle "$program" "$arch"
    case $program in
      cloudcore-prepull)
        user=65532:65532 port=10003
        prepare_run "$program" "$arch" /etc/prepull --kubeconfig /etc/prepull/kubeconfig --advertise localhost --metrics-listen 127.0.0.1:10003
        ;;
      edgecore-prepull)
        user=0:0 port=10004
        prepare_run "$program" "$arch" /var/lib/edgecore-prepull
        ;;
    esac
    [[ $(jq --raw-output '.process.user | "\(.uid):\(.gid)"' "$scratch/$program-$arch/config.json") == "$user" ]] ||
      die "the image of $program does not run as $user"
    if [[ $arch == "$own" ]]; then start=$(fastest 3 answers "$program" "$arch" "$port"); else answers "$program" "$arch" "$port"; fi
  done
  row "$program-image.tar" "$start from runc to /healthz"
done

# shellcheck source=manifests/packaging/test-packages.sh
. "$here/test-packages.sh"

printf '%s\n' "${table[@]}"
say "everything starts (after $SECONDS s)"
