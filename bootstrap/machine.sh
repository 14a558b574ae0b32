#!/bin/sh
# Ployz Machine bootstrap: fetches one release, checks its sha256, runs its `ployzd install`.
# One group of definitions, then one call: cut off anywhere, it does nothing.
{
say() { printf 'ployz: %s\n' "$*" >&2; }
die() { say "$*"; exit $code; }
have() { command -v "$1" >/dev/null; }
shown() { printf %.60s "$1" | tr -c ' -~' '?'; }

grammar() {
	n='(0|[1-9][0-9]*)'
	[ "$(printf 'v%s\n' "$1" | grep -Ex "v$n\.$n\.$n(-beta\.$n)?")" = "v$1" ] || die "not a version: $(shown "$1")"
}

mirror() {
	case $1 in
	*=) return ;;
	*[!!-~]*) ;;
	PLOYZ_????????=https://[!/]*) say "$1"; env="$env $1"; return ;;
	esac
	die "not an https address: $(shown "$1")"
}

platform() {
	case $(uname -sm) in
	'Linux x86_64') arch=amd64 ;;
	'Linux aarch64' | 'Linux arm64') arch=arm64 ;;
	*) die "no release for $(uname -sm)" ;;
	esac
	case " $* " in *' --installation-only '*) return ;; esac
	[ -d /run/systemd/system ] || die "no systemd here; for an image: --installation-only"
}

# Only a file that is this script goes on by sudo: after a pipe, a file named $0 may be anyone's.
root() {
	[ "$(id -u)" != 0 ] || return 0
	case $self in *.sh)
		if grep -Fqsx '{ main "$@"; }' "$self" && have sudo; then
			# shellcheck disable=SC2086
			exec sudo -- env $env sh "$(readlink -f "$self")" "$@"
		fi
	esac
	[ $# = 0 ] || set -- -s -- "$@"
	env="${env:+env$env }sh $*"
	code=77
	die "not root; type: curl -fsSL https://ployz.sh/machine | sudo ${env% }"
}

tools() {
	for tool in awk tar gzip; do have $tool || die "no $tool: install it"; done
	for sum in sha256sum 'shasum -a 256' 'openssl dgst -sha256 -r' ''; do ! have "${sum%% *}" || break; done
	[ "$sum" ] || die "no sha256sum: install it"
	client=curl
	! have curl || return 0
	# By path: busybox sh has its own.
	client=/usr/bin/wget
	case $($client --version 2>&1) in 'GNU Wget 1.'*) ;; *) die "no curl, and no wget that verifies TLS: install curl" ;; esac
}

stage() {
	for dir in "${base%/*}" "$base"; do
		[ "$(mkdir -p "$dir" && find "$dir" -prune -type d -user 0 ! -perm -20 ! -perm -2)" ] ||
			die "refusing $dir: not a directory that only root writes"
	done
	find "$base"/[0-9]*.?????? -prune -type d -mtime +0 -exec rm -rf {} + 2>/dev/null || :
	trap 'clean $?' EXIT
	trap 'exit 129' HUP
	trap 'exit 130' INT
	trap 'exit 141' PIPE
	trap 'exit 143' TERM
	dir=$(mktemp -d "$base/$$.XXXXXX") || die "cannot write $base"
	bin=$dir/ployzd log=$dir/log
}

# By number, as $dir may not be set yet.
# shellcheck disable=SC2317
clean() {
	trap '' HUP INT PIPE TERM
	set +eu
	{ [ -z "$child" ] || kill $!; wait; } 2>/dev/null || :
	rm -rf "$base/$$".??????
	return "$1"
}

# URL, bytes, seconds. In the background: a signal ends it at once.
fetch() {
	to=$dir/${1##*/} rc=0 child=1
	(
		ulimit -f $(($2 / 512))
		[ $client != curl ] || exec curl -fsSLg --no-insecure --proto '=https' --tlsv1.2 --max-redirs 5 \
			--connect-timeout 15 -m "$3" -y 30 -Y 1 --max-filesize "$2" --retry 3 --retry-max-time "$3" -o "$to" "$1" 2>"$log"
		exec timeout "$3" $client -v --no-quiet --check-certificate --secure-protocol=TLSv1_2 --no-hsts --max-redirect=5 \
			-T 30 -t 4 --retry-on-http-error=429,500,502,503,504 -o "$log" -O "$to" "$1"
	) &
	wait $! || rc=$?
	child=''
	# wget follows a redirect to http, even with --https-only; its log has each address.
	! grep -q '^--[0-9: -]*  [a-z]*[^s]:' "$log" || die "redirected off https: $1"
	if [ $rc = 0 ] && size=$(wc -c <"$to") && [ "$size" -le "$2" ]; then return; fi
	tail -n 3 "$log" >&2
	die "cannot fetch $1 ($client $rc; limits $2 bytes, $3 s)"
}

resolve() {
	channel=${channel:-stable}
	fetch "$channels/v1/$channel" 65536 30
	version=$(tr -s '\t\r\n\0' '   ?' <"$to")
	version=${version# }
	version=${version% }
	version=${version#v}
	grammar "$version"
	case $channel-$version in
	stable-*-*) ;;
	*-1.*) say "$channel is $version"; return ;;
	esac
	die "refusing $version as $channel of major 1"
}

acquire() {
	name=ployzd_linux_$arch.tar.gz from=$releases/v$version
	fetch "$from/checksums.txt" 65536 30
	want=$(awk -v n=$name '{f=$NF; gsub(/[*\r]/, "", f)} f==n {c++; l=$0}
		END {h=substr(l, 1, 64); if (c==1 && l==h "  " n && h !~ /[^0-9a-f]/) print h}' "$to")
	[ "$want" ] || die "checksums.txt: not one line of 64 hex digits, two spaces, $name"
	fetch "$from/$name" 67108864 300
	got=$($sum <"$to")
	got=${got%% *}
	[ "$got" = "$want" ] || die "deleted $name: sha256 is $got, checksums.txt says $want"
	say "$name  $((size/1000000)).$((size/100000%10)) MB  sha256 ok"
	# By stdout: whatever the archive holds, one regular file is written.
	(ulimit -f 262144 && tar -xzOf "$to" ployzd >"$bin" && [ -s "$bin" ]) || die "$name holds no file ployzd"
	chmod 755 "$bin"
}

main() {
	[ -z "${ZSH_VERSION-}" ] || emulate sh
	set -eu
	umask 022
	export LC_ALL=C
	self=${ZSH_ARGZERO-$0} base=/usr/local/lib/ployz/bootstrap code=4 key='' version='' channel='' child='' env=''
	case " $* " in *' --help '*)
		echo 'usage: sh machine.sh [--version X.Y.Z | --channel stable|beta] [install option]...'
		exit
	esac
	mirror "PLOYZ_RELEASES=${PLOYZ_RELEASES-}"
	mirror "PLOYZ_CHANNELS=${PLOYZ_CHANNELS-}"
	releases=${PLOYZ_RELEASES:-https://github.com/getployz/ployz/releases/download}
	channels=${PLOYZ_CHANNELS:-https://ployz.sh}
	platform "$@"
	root "$@"
	code=2
	for arg; do
		shift
		arg=$key$arg key=''
		case $arg in
		--version | --channel) key=$arg= ;;
		--version=*) version=${arg#*=}; grammar "$version" ;;
		--channel=stable | --channel=beta) channel=${arg#*=} ;;
		--channel=*) die "no channel $(shown "${arg#*=}"): stable or beta" ;;
		*) set -- "$@" "$arg" ;;
		esac
	done
	[ -z "$key" ] || die "no value: $key"
	[ -z "$version" ] || [ -z "$channel" ] || die "both --version and --channel"
	code=4
	tools
	stage
	if [ -z "$version" ]; then
		resolve
		set -- --channel "$channel" "$@"
	fi
	acquire
	# Signals are ployzd's now.
	trap : HUP INT TERM
	rc=0
	"$bin" install --version "$version" --archive "$to" --checksums "$dir/checksums.txt" "$@" </dev/null || rc=$?
	[ $rc != 126 ] || die "cannot run $bin: is $(df -P "$base" | awk 'END { print $6 }') mounted noexec?"
	exit $((rc > 255 ? rc - 128 : rc)) # 256 + N in ksh
}
}
{ main "$@"; }
