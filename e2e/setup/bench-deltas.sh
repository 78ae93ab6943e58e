#!/usr/bin/env bash
# Deltas between real releases, for docs/deltas.md: packages of PyPI, npm, Maven Central and Debian, made into layers as people
# do, one patch apart. Prints a table. Needs pip, npm, mvn, apt-get, go, zstd and gzip; it downloads some hundred MB, into target/deltas,
# where it finds them the next time. CASES="go rust" runs only these.
set -euo pipefail
setup=$(cd "$(dirname "$0")" && pwd)
root=$(realpath -m "$setup/../..")
work=${CARGO_TARGET_DIR:-$root/target}/deltas
mkdir -p "$work"

nice -n 15 cargo build --quiet --release -p prepull-delta --features make --example measure
measure=$(realpath "${CARGO_TARGET_DIR:-$root/target}/release/examples/measure")
# zstd:chunked, by the library of podman and CRI-O.
(cd "$setup/chunked" && CGO_ENABLED=0 GOFLAGS=-modcacherw go build -o "$work/chunked" .)

# An app on Django and pandas, with what they need.
python_app() { # DIRECTORY PANDAS DJANGO
  pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$1/app/lib" \
    "pandas==$2" "django==$3" numpy==2.2.6 psycopg2-binary==2.9.10 gunicorn==23.0.0 celery==5.4.0 requests==2.32.3
}
# A site on Next.js with all of node_modules.
node_app() { # DIRECTORY NEXT
  mkdir -p "$1/app"
  npm install --silent --no-audit --no-fund --prefix "$1/app" "next@$2" react@19.1.0 react-dom@19.1.0 typescript@5.6.3
}
# A program of a package of npm that only has that.
npm_program() { # DIRECTORY PACKAGE@VERSION PATH
  local packed=$work/packed
  rm -rf "$packed" && mkdir -p "$packed" "$1/usr/local/bin"
  (cd "$packed" && npm pack --silent "$2" >/dev/null && tar xzf ./*.tgz)
  cp "$packed/package/$3" "$1/usr/local/bin/"
}
# Packages of Debian, of the given versions.
debian_packages() { # DIRECTORY PACKAGE[=VERSION]…
  local into=$1 packed=$work/packed
  shift
  rm -rf "$packed" && mkdir -p "$packed" "$into"
  (cd "$packed" && apt-get download -qq "$@" 2>/dev/null)
  for package in "$packed"/*.deb; do dpkg-deb -x "$package" "$into"; done
}
# The jars that a Spring Boot service has beside its own.
java_app() { # DIRECTORY SPRING-BOOT
  mkdir -p "$1/app" "$work/pom"
  cat > "$work/pom/pom.xml" <<POM
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<parent><groupId>org.springframework.boot</groupId><artifactId>spring-boot-starter-parent</artifactId><version>$2</version></parent>
<groupId>x</groupId><artifactId>x</artifactId><version>1</version><dependencies>
<dependency><groupId>org.springframework.boot</groupId><artifactId>spring-boot-starter-web</artifactId></dependency>
<dependency><groupId>org.springframework.boot</groupId><artifactId>spring-boot-starter-data-jpa</artifactId></dependency>
</dependencies></project>
POM
  mvn --quiet --batch-mode -Dstyle.color=never --file "$work/pom/pom.xml" dependency:copy-dependencies "-DoutputDirectory=$1/app/lib"
}
# The two newest versions of a package that apt knows, older one last.
versions() { apt-cache madison "$1" | awk '{ print $3 }' | uniq | head -2; }
debian_image() { # old|new DIRECTORY PACKAGE…: the packages as released, or with all updates
  local which=$1 into=$2 wanted=()
  shift 2
  for package in "$@"; do
    local two
    mapfile -t two < <(versions "$package")
    if [ "$which" = new ]; then wanted+=("$package=${two[0]}"); else wanted+=("$package=${two[-1]}"); fi
  done
  debian_packages "$into" "${wanted[@]}"
}
base=(base-files bash coreutils dash dpkg libc6 libc-bin libcurl4 curl libssl3 openssl libsystemd0 libudev1 perl-base libexpat1
  tzdata libgnutls30 libxml2 libsqlite3-0 zlib1g apt libapt-pkg6.0 login passwd tar gzip git python3.11-minimal libpython3.11-stdlib)
tomcat=(libtomcat10-java tomcat10-common)

make_case() { # NAME old|new DIRECTORY
  case $1-$2 in
    python-old) python_app "$3" 2.3.1 5.2.5 ;;
    python-new) python_app "$3" 2.3.2 5.2.6 ;;
    node-old) node_app "$3" 15.5.2 ;;
    node-new) node_app "$3" 15.5.3 ;;
    go-old) npm_program "$3" @esbuild/linux-x64@0.25.8 bin/esbuild ;;
    go-new) npm_program "$3" @esbuild/linux-x64@0.25.9 bin/esbuild ;;
    rust-old) npm_program "$3" @biomejs/cli-linux-x64@2.2.2 biome ;;
    rust-new) npm_program "$3" @biomejs/cli-linux-x64@2.2.3 biome ;;
    debian-*) debian_image "$2" "$3" "${base[@]}" ;;
    tomcat-*) debian_image "$2" "$3" "${tomcat[@]}" ;;
    java-old) java_app "$3" 3.5.4 ;;
    java-new) java_app "$3" 3.5.5 ;;
  esac
}

printf '| layer | tar | gzip -6 | zstd -3 | zstd:chunked, and its layer | zstd -9 --patch-from | delta | made: time, CPU, memory | applied: MB/s, memory |\n|---|---|---|---|---|---|---|---|---|\n'
mb() { awk -v bytes="$1" 'BEGIN { printf bytes < 9.95e6 ? "%.2f" : "%.1f", bytes / 1e6 }'; }
for name in ${CASES:-python node go rust debian tomcat java}; do
  dir=$work/$name
  for which in old new; do
    if [ ! -e "$dir/$which.tar" ]; then
      rm -rf "${dir:?}/$which" && mkdir -p "$dir/$which"
      make_case "$name" "$which" "$dir/$which"
      # Another build has other times.
      tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="2026-01-0$([ $which = old ] && echo 1 || echo 2)" \
        -C "$dir/$which" -cf "$dir/$which.tar" .
    fi
  done
  gzip -6 -c "$dir/new.tar" > "$dir/new.tar.gz"
  zstd -q -f -3 "$dir/new.tar" -o "$dir/new.tar.zst"
  zstd -q -f -9 --long=31 --patch-from="$dir/old.tar" "$dir/new.tar" -o "$dir/new.patch"
  read -r chunks chunked < <("$work/chunked" "$dir/old.tar" "$dir/new.tar")
  read -r size seconds cpu peak < <("$measure" make "$dir/old.tar" "$dir/new.tar" "$dir/diff")
  read -r written _ apply_cpu apply_peak digest < <("$measure" apply "$dir/old" "$dir/diff")
  [ "$digest" = "$(sha256sum < "$dir/new.tar" | cut -d' ' -f1)" ] || { echo "$name: another tar" >&2; exit 1; }
  rate=$(awk -v bytes="$written" -v seconds="$apply_cpu" 'BEGIN { printf "%.0f", bytes / 1e6 / (seconds + 0.005) }')
  printf '| %s | %s | %s | %s | %s of %s | %s | **%s** | %s s, %s s, %s MiB | %s, %s MiB |\n' "$name" "$(mb "$written")" \
    "$(mb "$(stat -c %s "$dir/new.tar.gz")")" "$(mb "$(stat -c %s "$dir/new.tar.zst")")" \
    "$(mb "$chunks")" "$(mb "$chunked")" "$(mb "$(stat -c %s "$dir/new.patch")")" \
    "$(mb "$size")" "$seconds" "$cpu" "$peak" "$rate" "$apply_peak"
done
