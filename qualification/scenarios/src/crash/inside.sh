#!/bin/bash
# One trial of the crash matrix, inside of a machine. Prints one fact a line: a name, a tab, a value.
#
#   inside.sh keep              what is on this machine now is what each trial begins with
#   inside.sh look              how it is now
#   inside.sh record WHAT       an installation that nothing disturbs; the log of strace is in /root/crash/trace
#   inside.sh trial WHAT INJECTION [EARLIER]
#                               puts the machine back, disturbs one call of an installation, looks, and does the same
#                               installation again with nothing cleaned up; with EARLIER, one was disturbed before
#
# WHAT is `ployzd`, or the command of the shell pipeline that is watched. /root/crash/from has the arguments that install
# the release, /root/crash/new the directory that it is in.
set -u
here=/root/crash
kept=(usr/local/bin usr/local/lib/ployz usr/local/lib/systemd usr/local/lib/sysusers.d var/lib/ployz-install/attempts)
calls=write,pwrite64,copy_file_range,sendfile,open,openat,fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink
calls+=,unlinkat,rmdir,chmod,fchmod,fchmodat,chown,fchown,fchownat,symlink,symlinkat,mkdir,mkdirat,ftruncate

line() { printf '%s\t%s\n' "$1" "$2"; }
digest() { sha256sum 2>/dev/null <"$1" | cut -c-64; }

keep() {
    mkdir -p $here/kept
    (cd / && cp -a --parents "${kept[@]}" $here/kept)
}

put_back() {
    rm -rf /usr/local/bin/.ployzd* /usr/local/bin/ployzd.previous /usr/local/lib/{ployz,systemd,sysusers.d} /tmp/tmp.*
    rm -rf /var/lib/ployz-install/attempts
    cp -a --remove-destination $here/kept/. /
    : >/var/lib/ployz-install/admission.lock
    systemctl daemon-reload
    systemctl restart ployz.service
}

look() {
    cd /usr/local || exit
    line installed "$(digest bin/ployzd)"
    line mode "$(stat -c '%U:%G %a' bin/ployzd 2>/dev/null)"
    [ ! -e bin/ployzd.previous ] || line previous "$(digest bin/ployzd.previous)"
    for unit in lib/systemd/system/ployz*; do line unit "${unit##*/} $(digest "$unit")"; done
    line sysusers "$(digest lib/sysusers.d/ployz.conf)"
    line inventory "$(jq -c . lib/ployz/installed.json 2>&1)"
    attempts
    pid=$(systemctl show -P MainPID ployz.service)
    line running "$(digest "/proc/$pid/exe")"
    line api "$(curl -sS --max-time 20 --unix-socket /run/ployz/ployz.sock http://machine/v1/machine 2>&1)"
    status=$(bin/ployzd status --json 2>&1)
    line code $?
    line status "$status"
    # but for workers by which a daemon looks at Docker, which come and go
    line units "$(systemctl list-units --all --plain --no-legend 'ployz*' |
        awk '$1 !~ /^ployz-deploy@/ { printf "%s %s ", $1, $3 }')"
    left
}

# Those of this scenario; what was here before is only read.
attempts() {
    cd /var/lib/ployz-install/attempts || return
    records=$(jq -c 'select(.id | startswith("0000") | not)' -- *.json 2>&1)
    line readable $?
    while IFS= read -r record; do line record "$record"; done <<<"$records"
    set -- *.json
    line count $#
    cd /usr/local || exit
}

left() {
    find lib/ployz/staging lib/ployz/self -mindepth 1 2>/dev/null |
        cat - <(find bin lib/ployz lib/systemd lib/sysusers.d /var/lib/ployz-install /tmp -name '.?*') \
            <(find /tmp -mindepth 1 -maxdepth 1 -name 'tmp.*') |
        grep -vE '^/tmp/\.(X11|ICE|XIM|font)-unix$' | while IFS= read -r path; do line left "$path"; done
}

# Under strace, where words for it are given: only the process itself is watched, through every exec, not its children.
install() { # WHAT [STRACE...]
    if [ "$1" = ployzd ]; then
        read -ra from <$here/from
        "${@:2}" /usr/local/bin/ployzd install "${from[@]}" --json </dev/null >$here/out 2>$here/err
    else
        watched=$1 watch="${*:2}" sh $here/pipeline.sh "$(<$here/new)" </dev/null >$here/out 2>$here/err
    fi
    line exit $?
    line out "$(tail -n 1 $here/out)"
    line err "$(tr '\n\t' '  ' <$here/err)"
}

watch=(strace -y -s 0 -o "$here/trace" -e "trace=$calls")
case $1 in
    keep) keep ;;
    look) look ;;
    record) put_back; install "$2" "${watch[@]}"; look ;;
    trial)
        put_back
        [ $# -lt 4 ] || install "$2" "${watch[@]}" -e "inject=$4" >/dev/null
        rm -f $here/trace
        install "$2" "${watch[@]}" -e "inject=$3"
        line at "$(grep -E '= \?$|\(INJECTED\)$' $here/trace | tail -n 1)"
        look
        line again ''
        install "$2"
        look ;;
    *) echo "inside.sh: $1 is not known" >&2; exit 2 ;;
esac
