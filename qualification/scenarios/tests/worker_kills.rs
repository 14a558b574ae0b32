//! The worker killed at every call by which it changes a file: in its shipped unit, under its shipped sandbox, with a
//! drop-in that only puts strace in front of it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use scenarios::crash::{Call, calls, each};
use scenarios::{Machine, Release, Server, note, release, serve};
use serde_json::Value;

/// Of the writes that move the content of one file, so many are disturbed.
const BULK: usize = 4;

/// What goes in front of the worker. The tracer is no parent of it, so that the unit's main process is the worker; it
/// needs what traces, and a place for its log, and nothing else is loosened.
const DROP_IN: &str = "[Service]
ExecStart=
ExecStart=/usr/bin/strace -D -y -s 0 -o /run/ployz-trace/log -e trace=write,pwrite64,open,openat,mkdir,mkdirat,rename,\
renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir,chmod,fchmod,fchmodat,fchown,truncate,ftruncate,\
fsync,fdatasync $INJECT /usr/local/bin/ployzd upgrade-worker
EnvironmentFile=/etc/ployz-inject
SystemCallFilter=@debug
RuntimeDirectory=ployz-trace
RuntimeDirectoryPreserve=yes
";

/// One trial: `$1` what is injected, `$2` the version. One line a fact.
const TRIAL: &str = r#"
    line() { printf '%s\t%s\n' "$1" "$2"; }
    ask() { curl -sS -m 40 --unix-socket /run/ployz/ployz.sock "$@"; }
    quiet() {
        for _ in $(seq 300); do
            [ -n "$(systemctl list-units --all --no-legend 'ployz-upgrade@*')" ] || return 0
            sleep 0.05
        done
    }
    look() {
        line "$1-installed" "$(sha256sum </usr/local/bin/ployzd | cut -c-64)"
        line "$1-running" "$(sha256sum </proc/$(systemctl show -P MainPID ployz.service)/exe | cut -c-64)"
        line "$1-system" "$(systemctl is-system-running)"
        line "$1-status" "$(ployzd status --json | tr -d '\n')"
    }
    [ -z "$1" ] && echo "INJECT=" >/etc/ployz-inject || echo "INJECT=-e inject=$1" >/etc/ployz-inject
    id=$(od -An -tx1 -N16 /dev/urandom | tr -d ' \n')
    line id "$id"
    line answer "$(ask -d "{\"attempt\":\"$id\",\"release\":{\"exact\":\"$2\"}}" -w '%{http_code}' -o /root/answer http://m/v1/upgrades)"
    line said "$(tr -d '\n' </root/answer)"
    quiet
    line told "$(ask http://m/v1/upgrades/$id | tr -d '\n')"
    line mutation "$(ask -X POST http://m/v1/machine/initialize | tr -d '\n')"
    look cut
    [ -n "$1" ] || exit 0
    echo "INJECT=" >/etc/ployz-inject
    line again "$(ployzd upgrade --version $2 --json | tail -n 1)"
    quiet
    look again
    cd /usr/local
    line left "$(find lib/ployz/staging lib/ployz/self -mindepth 1 2>/dev/null; find bin lib/ployz lib/systemd \
        /var/lib/ployz-install -name '.*' ! -name .; find /var/lib/ployz-install -name '*.progress.json')"
"#;

struct Bench {
    machine: Machine,
    _server: Server,
}

/// What one trial came to.
struct Outcome {
    what: String,
    /// `interrupted at acquiring`, `refused`, `succeeded`.
    how: String,
    wrong: Vec<String>,
}

#[test]
fn killed_at_any_call_the_attempt_is_interrupted_and_the_next_one_succeeds() {
    let started = Instant::now();
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let benches: Vec<Bench> =
        ["kills-1", "kills-2"].iter().map(|name| Bench::prepared(name, &old, &new)).collect();
    // What the worker does when nothing disturbs it, seen once.
    let machine = &benches[0].machine;
    assert_eq!(facts(machine, "", "1.5.0")["cut-installed"], new.sha256, "nothing disturbed it");
    let chosen = each(&calls(&machine.read("/run/ployz-trace/log")), BULK);
    assert!(chosen.len() > 60, "it was seen to change so little: {chosen:?}");
    assert_eq!(facts(machine, "", "1.4.0")["cut-installed"], old.sha256);
    note(&format!(
        "worker kills: {} calls, prepared after {:.0} s",
        chosen.len(),
        started.elapsed().as_secs_f32()
    ));

    let (acts, results) = (Mutex::new(chosen.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for bench in &benches {
            scope.spawn(|| {
                let (mut from, mut to) = (&old, &new);
                while let Some(call) = { acts.lock().unwrap().next() } {
                    let client = bench.machine.client();
                    let mut outcome = trial(&bench.machine, call, from, to);
                    let heard = client.stop();
                    if !heard.failures.is_empty() {
                        outcome.wrong.push(format!("requests failed: {:?}", heard.failures));
                    }
                    results.lock().unwrap().push(outcome);
                    std::mem::swap(&mut from, &mut to);
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    let mut counts = BTreeMap::new();
    for result in &results {
        *counts.entry(result.how.clone()).or_insert(0) += 1;
    }
    let took = started.elapsed().as_secs();
    note(&format!("worker killed at {} calls, after {took} s: {counts:?}", results.len()));
    let wrong: Vec<String> = results
        .iter()
        .flat_map(|result| {
            result.wrong.iter().map(|text| format!("{} ({}): {text}", result.what, result.how))
        })
        .collect();
    assert!(wrong.is_empty(), "{} things are wrong:\n  {}", wrong.len(), wrong.join("\n  "));
    let interrupted: usize =
        counts.iter().filter(|(how, _)| how.starts_with("interrupted")).map(|(_, n)| *n).sum();
    assert!(interrupted * 2 > results.len(), "too few were interrupted, so this shows little: {counts:?}");
}

impl Bench {
    fn prepared(name: &str, old: &Release, new: &Release) -> Self {
        let server = serve(name).release(old).release(new).start();
        let machine = Machine::named(name).served_by(&server).setting("confirm_window", 0.into());
        let machine = machine.installed("1.4.0").boot();
        machine.run("/usr/local/bin/ployzd machine initialize").ok();
        machine.run("echo INJECT= >/etc/ployz-inject").ok();
        machine.write("/etc/systemd/system/ployz-upgrade@.service.d/inject.conf", DROP_IN);
        machine.run("systemctl daemon-reload").ok();
        Self { machine, _server: server }
    }
}

fn facts(machine: &Machine, inject: &str, version: &str) -> BTreeMap<String, String> {
    let run = machine.run(&format!("set -- '{inject}' {version}\n{TRIAL}"));
    let lines = run.stdout.lines().filter_map(|line| line.split_once('\t'));
    let mut facts: BTreeMap<String, String> = BTreeMap::new();
    for (name, value) in lines {
        facts.insert(name.to_owned(), value.to_owned());
    }
    assert!(facts.contains_key("cut-status"), "half a trial:\n{}", run.shown());
    facts
}

fn trial(machine: &Machine, call: &Call, from: &Release, to: &Release) -> Outcome {
    let facts = facts(machine, &call.inject("signal=KILL"), &to.version);
    let one = |name: &str| facts.get(name).map_or("", String::as_str);
    let json = |name: &str| serde_json::from_str::<Value>(one(name)).unwrap_or_default();
    let mut wrong = Vec::new();
    let mut unless = |good: bool, text: String| {
        if !good {
            wrong.push(text);
        }
    };
    let told = json("told");
    let (record, state) = (&told["record"], told["state"].as_str().unwrap_or("no record"));
    let accepted = matches!(one("answer"), "200" | "202");
    let (installed, running) = (one("cut-installed"), one("cut-running"));
    unless([&from.sha256, &to.sha256].contains(&&installed.to_owned()), format!("torn: {installed}"));
    unless([&from.sha256, &to.sha256].contains(&&running.to_owned()), format!("not running: {running}"));
    unless(one("cut-system") == "running", format!("the system is {}", one("cut-system")));
    unless(!one("mutation").contains("busy"), format!("mutations: {}", one("mutation")));
    unless(
        json("cut-status")["admission"]["state"] == "free",
        format!("admission: {}", json("cut-status")["admission"]),
    );
    unless(
        accepted != (state == "no record"),
        format!("answered {} {}, and {state}", one("answer"), one("said")),
    );
    let stage = record["stage"].as_str().unwrap_or_default();
    let how = match state {
        "no record" => "refused".to_owned(),
        "interrupted" => {
            let evidence = told["evidence"].as_str().unwrap_or_default();
            unless(evidence.contains("signal killed KILL"), format!("evidence: {evidence:?}"));
            let (place, installation) =
                if installed == to.sha256 { ("target", "replaced") } else { ("before", "unchanged") };
            // Before the target's digest is known the record can only say that it is what was there.
            unless(told["in_place"] == place, format!("in place: {}, and it is {place}", told["in_place"]));
            unless(record["installation"] == installation, format!("it says {}", record["installation"]));
            format!("interrupted at {stage}")
        }
        "ended" => {
            let version = &record["outcome"]["succeeded"]["version"];
            unless(*version == to.version.as_str(), format!("ended as {}", record["outcome"]));
            unless(running == to.sha256, "FALSE SUCCESS: it does not run".to_owned());
            "succeeded".to_owned()
        }
        other => {
            unless(false, format!("state {other}: {told}"));
            other.to_owned()
        }
    };
    let again = json("again");
    unless(
        again["record"]["outcome"]["succeeded"]["version"] == to.version.as_str(),
        format!("again: {again}"),
    );
    for (name, digest) in [("again-installed", &to.sha256), ("again-running", &to.sha256)] {
        unless(one(name) == digest, format!("{name}: {}", one(name)));
    }
    unless(one("again-system") == "running", format!("afterwards the system is {}", one("again-system")));
    unless(one("left").is_empty(), format!("left: {}", one("left")));
    Outcome { what: call.shown(), how, wrong }
}
