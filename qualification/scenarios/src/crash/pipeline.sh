#!/bin/sh
# The other way, for comparison: what install scripts do, done with care. Fetched, checked, unpacked beside, moved into
# place, restarted; ends at the first error.
#
#   pipeline.sh DIR     DIR holds the archive and checksums.txt
#
# The command named $watched is run behind the words in $watch.
set -eu
: "${watched:=}" "${watch:=}"

run() { # COMMAND...
    if [ "$1" = "$watched" ]; then
        # shellcheck disable=SC2086 # one word each
        $watch "$@"
    else
        "$@"
    fi
}

work=$(run mktemp -d)
cd "$work"
run curl -fsSLO "file://$1/ployzd_linux_amd64.tar.gz"
curl -fsSL "file://$1/checksums.txt" | grep ' ployzd_linux_amd64' | run sha256sum -c - >/dev/null
run tar -xzf ployzd_linux_amd64.tar.gz ployzd
run chmod 755 ployzd
run mv ployzd /usr/local/bin/ployzd
run systemctl restart ployz.service
cd /
run rm -rf "$work"
echo installed
