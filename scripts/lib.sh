# shellcheck shell=bash
# Sourced by the other scripts. Finds or gets the parts that the tests and the demonstration run against (a Postgres
# server, PgBouncer and two versions of OpenFGA), and starts private ones. The tests look in the same places, see
# tests/it/support/parts.rs.

set -euo pipefail

openfga_version=v1.18.1
# The last version without on_duplicate and on_missing.
openfga_old_version=v1.9.5
# What openfga_version needs to build. Since 1.21, Go can get a newer toolchain by itself.
go_version=1.25.7
go_version_with_toolchains=1.21

cache=${FGA_OUTBOX_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fga-outbox}

say() {
    printf '%s\n' "$*" >&2
}

die() {
    say "error: $*"
    exit 1
}

have() {
    command -v "$1" >/dev/null 2>&1
}

is_root() {
    [ "$(id -u)" -eq 0 ]
}

# --- Parts ------------------------------------------------------------------------------------------------------------

# Exports PG_BIN, PGBOUNCER_BIN, OPENFGA_BIN and OPENFGA_OLD_BIN, getting what is missing.
fetch_parts() {
    need_cargo
    need_postgres
    need_pgbouncer
    need_openfga
    need_openfga_old
}

need_cargo() {
    if ! have cargo && [ -x "$HOME/.cargo/bin/cargo" ]; then
        export PATH="$HOME/.cargo/bin:$PATH"
    fi
    have cargo || die "cargo not found: install Rust with rustup, then run this again"
}

need_postgres() {
    if [ -n "${PG_BIN:-}" ]; then
        has_postgres "$PG_BIN" || die "PG_BIN=$PG_BIN holds no postgres and initdb"
    elif ! PG_BIN=$(find_postgres); then
        can_apt || die "Postgres's server binaries not found: install them (Debian and Ubuntu: apt-get install" \
            "postgresql; Fedora: dnf install postgresql-server; macOS: brew install postgresql@17), or set PG_BIN to" \
            "the folder that holds postgres and initdb"
        say "installing Postgres"
        apt_install_stopped postgresql
        PG_BIN=$(find_postgres) || die "apt-get installed postgresql, but not where it was looked for: set PG_BIN"
    fi
    export PG_BIN
    if is_root; then
        need_postgres_user
    fi
}

find_postgres() {
    local bin
    if have pg_config && bin=$(pg_config --bindir) && has_postgres "$bin"; then
        echo "$bin"
    elif bin=$(command -v postgres) && has_postgres "${bin%/*}"; then
        echo "${bin%/*}"
    else
        newest_postgres /usr/lib/postgresql/*/bin || newest_postgres /opt/homebrew/opt/postgresql@*/bin ||
            newest_postgres /usr/local/opt/postgresql@*/bin
    fi
}

# The folder with the highest version in its path, of those given that hold a server.
newest_postgres() {
    local bin version newest='' newest_version=-1
    for bin in "$@"; do
        version=${bin%/bin}
        version=${version##*[/@]}
        if has_postgres "$bin" && version_at_least "$version" "$newest_version"; then
            newest=$bin
            newest_version=$version
        fi
    done
    [ -n "$newest" ] && echo "$newest"
}

has_postgres() {
    [ -x "$1/postgres" ] && [ -x "$1/initdb" ]
}

# Postgres refuses to run as root.
need_postgres_user() {
    if id postgres >/dev/null 2>&1; then
        return
    fi
    if have useradd; then
        useradd --system --user-group --no-create-home --shell /bin/sh postgres
    elif have adduser; then
        adduser -S -D -H postgres
    else
        die "Postgres does not run as root: create a user named postgres"
    fi
}

need_pgbouncer() {
    if [ -z "${PGBOUNCER_BIN:-}" ] && ! PGBOUNCER_BIN=$(find_pgbouncer); then
        can_apt || die "pgbouncer not found: install it (Debian and Ubuntu: apt-get install pgbouncer; Fedora: dnf" \
            "install pgbouncer; macOS: brew install pgbouncer), or set PGBOUNCER_BIN to the program"
        say "installing PgBouncer"
        apt_install_stopped pgbouncer
        PGBOUNCER_BIN=$(find_pgbouncer) || die "apt-get installed pgbouncer, but not where it was looked for: set" \
            "PGBOUNCER_BIN"
    fi
    [ -x "$PGBOUNCER_BIN" ] || die "PGBOUNCER_BIN=$PGBOUNCER_BIN is not a program"
    export PGBOUNCER_BIN
}

# Debian puts it where only root's PATH leads.
find_pgbouncer() {
    command -v pgbouncer || (PATH=/usr/sbin command -v pgbouncer)
}

need_openfga() {
    if [ -z "${OPENFGA_BIN:-}" ]; then
        OPENFGA_BIN=$(command -v openfga) || OPENFGA_BIN=$(build_openfga "$openfga_version")
    fi
    [ -x "$OPENFGA_BIN" ] || die "OPENFGA_BIN=$OPENFGA_BIN is not a program"
    export OPENFGA_BIN
}

need_openfga_old() {
    if [ -z "${OPENFGA_OLD_BIN:-}" ]; then
        OPENFGA_OLD_BIN=$(build_openfga "$openfga_old_version")
    fi
    [ -x "$OPENFGA_OLD_BIN" ] || die "OPENFGA_OLD_BIN=$OPENFGA_OLD_BIN is not a program"
    export OPENFGA_OLD_BIN
}

# Prints the path of that version in the cache, after building it if it is not there. In a subshell, for the trap.
build_openfga() (
    version=$1
    binary=$cache/bin/openfga-$version
    if [ ! -x "$binary" ]; then
        need_go
        say "building OpenFGA $version, once; this takes some minutes"
        mkdir -p "$cache/bin" || die "cannot write to $cache"
        build=$(mktemp -d "$cache/build.XXXXXX") || die "cannot write to $cache"
        trap 'rm -rf "$build"' EXIT
        GOBIN="$build" CGO_ENABLED=0 go install "github.com/openfga/openfga/cmd/openfga@$version" >&2 ||
            die "go could not build OpenFGA $version; its reason is above"
        # In one step, so that nobody ever finds half a program there.
        mv -f "$build/openfga" "$binary" || die "cannot write to $cache/bin"
    fi
    echo "$binary"
)

need_go() {
    local go_needed="Go $go_version or newer builds OpenFGA: install it, or set OPENFGA_BIN to an OpenFGA"
    go_needed+=" $openfga_version and OPENFGA_OLD_BIN to a $openfga_old_version"
    if ! have go; then
        can_apt || die "go not found. $go_needed"
        apt-get update -qq >&2
        version_at_least "$(apt_candidate golang)" "$go_version_with_toolchains" ||
            die "go not found, and this system's package is too old. $go_needed"
        say "installing Go"
        apt_install golang
    fi
    local version
    version=$(go env GOVERSION)
    version=${version#go}
    if ! version_at_least "$version" "$go_version"; then
        version_at_least "$version" "$go_version_with_toolchains" || die "Go $version is too old. $go_needed"
        export GOTOOLCHAIN=auto
    fi
}

# Whether dotted version $1 is not below $2.
version_at_least() {
    awk -v a="$1" -v b="$2" 'BEGIN {
        split(a, x, "."); split(b, y, ".")
        for (i = 1; i <= 3; i++) if (x[i] + 0 != y[i] + 0) exit x[i] + 0 < y[i] + 0
    }'
}

can_apt() {
    is_root && have apt-get
}

apt_candidate() {
    # The epoch in front is not part of the version, nor is the revision behind.
    apt-cache policy "$1" | sed -n 's/^ *Candidate: \([0-9]*:\)\{0,1\}\([0-9.]*\).*/\2/p'
}

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@" >&2
}

# Debian's packages start their servers; only the programs are wanted here.
apt_install_stopped() {
    local policy=/usr/sbin/policy-rc.d status=0
    apt-get update -qq >&2
    if [ -e "$policy" ]; then
        apt_install "$@"
        return
    fi
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    apt_install "$@" || status=$?
    rm -f "$policy"
    [ "$status" -eq 0 ] || die "apt-get could not install $*"
}

# --- Private servers --------------------------------------------------------------------------------------------------

servers=''
openfga_pid=''

# The servers end with the script, whatever way it ends but SIGKILL: these functions set the traps for EXIT, HUP, INT
# and TERM.

# After need_postgres. Starts a Postgres cluster in a temporary folder, on a free port of the loopback address. Sets
# postgres_url, the URL of its server without a database; the user is postgres, a superuser without a password.
start_postgres() {
    local port
    make_servers_folder
    port=$(free_port)
    postgres_url=postgres://postgres@127.0.0.1:$port
    mkdir "$servers/postgres"
    if is_root; then
        chown postgres "$servers/postgres"
    fi
    as_postgres "$PG_BIN/initdb" --pgdata="$servers/postgres/data" --username=postgres --auth=trust --encoding=UTF8 \
        --no-sync >"$servers/initdb.log" || die "initdb failed"
    as_postgres "$PG_BIN/pg_ctl" start --pgdata="$servers/postgres/data" --log="$servers/postgres/log" --silent --wait \
        --options="-p $port -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off" ||
        die "Postgres does not start: $(cat "$servers/postgres/log")"
}

# Creates a database in the cluster, and prints its URL.
create_database() {
    "$PG_BIN/createdb" --maintenance-db="$postgres_url/postgres" "$1"
    echo "$postgres_url/$1"
}

# After need_openfga. Starts an OpenFGA server on free ports of the loopback address, with its tuples in memory or, if
# $1 is postgres, in the cluster. Sets openfga_url.
start_openfga() {
    local port
    have curl || die "curl not found: install it, then run this again"
    make_servers_folder
    export OPENFGA_DATASTORE_ENGINE=${1:-memory}
    if [ "$OPENFGA_DATASTORE_ENGINE" = postgres ]; then
        OPENFGA_DATASTORE_URI=$(create_database openfga)
        export OPENFGA_DATASTORE_URI
        "$OPENFGA_BIN" migrate >"$servers/openfga.log" 2>&1 || die "openfga migrate: $(cat "$servers/openfga.log")"
    fi
    port=$(free_port)
    openfga_url=http://127.0.0.1:$port
    "$OPENFGA_BIN" run --http-addr "127.0.0.1:$port" --grpc-addr "127.0.0.1:$(free_port)" --playground-enabled=false \
        --metrics-enabled=false --log-level none >"$servers/openfga.log" 2>&1 </dev/null &
    openfga_pid=$!
    until curl --silent --fail --noproxy '*' --output /dev/null "$openfga_url/healthz"; do
        kill -0 "$openfga_pid" 2>/dev/null || die "OpenFGA does not start: $(cat "$servers/openfga.log")"
        sleep 0.05
    done
}

make_servers_folder() {
    if [ -z "$servers" ]; then
        servers=$(mktemp -d "${TMPDIR:-/tmp}/fga-outbox.XXXXXX")
        trap stop_servers EXIT
        trap 'exit 129' HUP
        trap 'exit 130' INT
        trap 'exit 143' TERM
        # The user postgres has to reach its folder.
        chmod 755 "$servers"
    fi
}

stop_servers() {
    trap '' HUP INT TERM
    if [ -n "$openfga_pid" ]; then
        kill -KILL "$openfga_pid" 2>/dev/null || true
        wait "$openfga_pid" 2>/dev/null || true
    fi
    if [ -e "$servers/postgres/data/postmaster.pid" ]; then
        as_postgres "$PG_BIN/pg_ctl" stop --pgdata="$servers/postgres/data" --mode=immediate --silent || true
    fi
    rm -rf "$servers"
}

# Runs a program of Postgres's as the user postgres if this is root, in a folder that the user can enter.
as_postgres() {
    (
        cd "$servers/postgres"
        if ! is_root; then
            "$@"
        elif have runuser; then
            runuser -u postgres -- "$@"
        elif have setpriv; then
            setpriv --reuid=postgres --regid=postgres --init-groups "$@"
        else
            # shellcheck disable=SC2016 # The shell that su starts expands these.
            su -s /bin/sh -c '"$0" "$@"' -- postgres "$@"
        fi
    )
}

# A port that nobody listens on, below the range that outgoing connections take theirs from.
free_port() {
    local port
    while port=$((10000 + RANDOM % 20000)); do
        if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            echo "$port"
            return
        fi
    done
}
