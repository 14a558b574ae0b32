//! Real power loss, and real want of memory, in an upgrade that was asked for through the daemon: a kernel and a disk of
//! its own, the worker in its shipped unit.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use scenarios::vm::Vm;
use scenarios::{Release, note, release, release_padded};
use serde_json::Value;

/// What the power is cut at: the record of that stage has its name, or the executable was renamed.
const MOMENTS: [&str; 7] =
    ["accepted", "preflight", "acquiring", "verifying", "renamed", "restarting", "confirming"];

const CUT_AT: &str = r#"
inotifywait -m -e moved_to --format '%w%f' /var/lib/ployz-install/attempts /usr/local/bin 2>/run/watching |
    while read -r path; do
        case $path in
            /usr/local/bin/ployzd) now=renamed ;;
            */attempts/*.json)
                [[ $(<"$path") =~ '"stage": "'([a-z]+) ]] || continue
                now=${BASH_REMATCH[1]} ;;
            *) continue ;;
        esac
        [ "$now" != "$1" ] || echo >/dev/ttyS1
    done
"#;

const LOOK: &str = r#"
    line() { printf '%s\t%s\n' "$1" "$2"; }
    ask() { curl -sS --max-time 40 --unix-socket /run/ployz/ployz.sock "$@"; }
    line installed "$(sha256sum </usr/local/bin/ployzd | cut -c-64)"
    line running "$(ask http://m/v1/machine | jq -r .executable_sha256)"
    line told "$(runuser -u alice -- curl -sS --max-time 40 --unix-socket /run/ployz/ployz.sock http://m/v1/upgrades/latest | tr -d '\n')"
    line hers "$(runuser -u alice -- ployzd attempt --json | tr -d '\n')"
    line mutation "$(ask -X POST http://m/v1/machine/initialize | tr -d '\n')"
    line failed "$(systemctl --failed --no-legend --plain | tr '\n' ' ')"
"#;

#[test]
fn power_lost_at_any_stage_of_an_upgrade_is_told_and_the_next_one_succeeds() {
    let (old, new, big) = (release("1.4.0"), release("1.5.0"), release_padded("1.6.0", 56));
    let started = Instant::now();
    let first = Vm::booted("worker-power");
    prepare(&first, &[&old, &new, &big]);
    first.snapshot("prepared");
    first.cut();
    let second = first.copy("worker-power-2");
    note(&format!("worker power loss: prepared after {:.0} s", started.elapsed().as_secs_f32()));
    let (moments, rows) = (Mutex::new(MOMENTS.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for vm in [&first, &second] {
            scope.spawn(|| {
                while let Some(moment) = { moments.lock().unwrap().next() } {
                    let row = cut_at(vm, moment, &old, &new);
                    rows.lock().unwrap().push(row);
                }
            });
        }
        // Meanwhile nothing else: two machines are what two cores carry.
    });
    let rows = rows.into_inner().unwrap();
    let table: Vec<String> = rows.iter().map(|(row, _)| row.clone()).collect();
    note(&format!(
        "power lost in an upgrade, {:.0} s:\n{}",
        started.elapsed().as_secs_f32(),
        table.join("\n")
    ));
    let stages = ["accepted", "acquiring", "activating", "confirming"];
    let hit = stages.iter().filter(|stage| table.iter().any(|row| row[13..].contains(*stage))).count();
    assert!(hit >= 3, "the cuts came at too few stages to show anything");
    let wrong: Vec<&String> = rows.iter().flat_map(|(_, wrong)| wrong).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    out_of_memory(&first, &old, &big);
    note(&format!("worker power loss and memory: {:.0} s", started.elapsed().as_secs_f32()));
}

/// The old release, confirmed and initialized, an operator, and a source of releases on the machine itself.
fn prepare(vm: &Vm, releases: &[&Release]) {
    for release in releases {
        vm.deliver(release);
        let to = format!("/srv/releases/download/v{}", release.version);
        vm.run(&format!("mkdir -p {to} && mv /root/{}/* {to}/", release.version)).ok();
    }
    let source = "http://127.0.0.1:8080/releases/download";
    vm.run(&format!(
        "set -e
         printf '[Service]\\nExecStart=/bin/busybox httpd -f -p 127.0.0.1:8080 -h /srv\\n[Install]\\nWantedBy=multi-user.target\\n' \
             >/etc/systemd/system/source.service
         systemctl enable --now source.service
         mkdir -p /etc/ployz
         echo '{{\"schema\": 1, \"confirm_window\": 2, \"allow_http\": true, \"releases\": \"{source}\"}}' >/etc/ployz/install.json
         cd /srv/releases/download/v1.4.0
         tar -C /run -xzf ployzd_linux_amd64.tar.gz ployzd
         /run/ployzd install --version 1.4.0 --archive $PWD/ployzd_linux_amd64.tar.gz --checksums $PWD/checksums.txt --docker none
         ployzd machine initialize
         useradd -m alice && usermod -a -G ployz alice
         sync"
    ))
    .ok();
    vm.write("/root/cut-at", CUT_AT);
}

fn facts(vm: &Vm) -> BTreeMap<String, String> {
    let run = vm.run(LOOK).expect(0);
    let lines = run.stdout.lines().filter_map(|line| line.split_once('\t'));
    lines.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// One cut: what it came to, in a line, and what is wrong.
fn cut_at(vm: &Vm, moment: &str, old: &Release, new: &Release) -> (String, Vec<String>) {
    vm.restore("prepared");
    let run = vm.run(&format!(
        "bash /root/cut-at {moment} >/dev/null 2>&1 &
         until grep -qs established /run/watching; do sleep 0.05; done
         ployzd upgrade --version 1.5.0 --json"
    ));
    assert_eq!(run.code, 255, "the power was not cut at {moment}:\n{}", run.shown());
    vm.cut();
    vm.boot();
    let seen = facts(vm);
    let again = vm.run("ployzd upgrade --version 1.5.0 --json");
    let after = facts(vm);
    let mut wrong = Vec::new();
    let mut unless = |good: bool, text: String| {
        if !good {
            wrong.push(format!("cut at {moment}: {text}"));
        }
    };
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_default();
    let told = json(&seen["told"]);
    let stage = told["record"]["stage"].as_str().unwrap_or_default().to_owned();
    if moment == "accepted" && told["record"]["kind"] == "install" {
        // Its record is gone, and nobody was told that it was accepted.
        return (format!("  {moment:<11} was not accepted"), wrong);
    }
    // What watches is a little late, and a name that was seen is durable only a moment later: the stage before or after
    // the one that was meant is as true. But the record is never behind what was done, nor ahead of it.
    let expected: &[&str] = if seen["installed"] == old.sha256 {
        &["accepted", "preflight", "acquiring", "verifying", "activating"]
    } else {
        &["activating", "restarting", "confirming"]
    };
    unless(expected.contains(&stage.as_str()), format!("the record says {stage}"));
    unless(told["state"] == "interrupted", format!("state {}", told["state"]));
    let evidence = told["evidence"].as_str().unwrap_or_default().to_owned();
    unless(evidence.contains("restarted"), format!("evidence {evidence:?}"));
    unless(json(&seen["hers"])["state"] == "interrupted", format!("an operator sees {}", seen["hers"]));
    let place = match &seen["installed"] {
        digest if *digest == old.sha256 => ("before", "unchanged"),
        digest if *digest == new.sha256 => ("target", "replaced"),
        _ => ("BROKEN", "BROKEN"),
    };
    unless(told["in_place"] == place.0, format!("in place {}, and it is {}", told["in_place"], place.0));
    unless(told["record"]["installation"] == place.1, format!("it says {}", told["record"]["installation"]));
    unless(seen["running"] == seen["installed"], "what is selected does not run".to_owned());
    // Admitted, and refused for what it is: it is initialized already.
    unless(seen["mutation"].contains("problem:initialized"), format!("mutations: {}", seen["mutation"]));
    unless(seen["failed"].trim().is_empty(), format!("failed: {}", seen["failed"]));
    let next = again.last();
    unless(next["record"]["outcome"]["succeeded"]["version"] == "1.5.0", format!("again: {}", again.shown()));
    unless(next["record"]["id"] != told["record"]["id"], "it was resumed".to_owned());
    unless(
        after["running"] == new.sha256 && after["installed"] == new.sha256,
        "1.5.0 does not run".to_owned(),
    );
    (format!("  {moment:<11} {stage:<11} {:<10} {evidence}", place.0), wrong)
}

/// A worker that loses its memory in the middle, and one that has what its unit says, with a release of 60 MiB.
fn out_of_memory(vm: &Vm, old: &Release, big: &Release) {
    vm.restore("prepared");
    vm.run(
        "set -e
         source=/sys/fs/cgroup/system.slice/source.service/cgroup.freeze
         ployzd upgrade --version 1.6.0 --no-follow
         echo 1 >$source
         until grep -q '\"acquiring\"' $(ls -t /var/lib/ployz-install/attempts/*.json | head -n 1); do sleep 0.05; done
         worker=$(systemctl list-units --no-legend --plain 'ployz-upgrade@*' | cut -d' ' -f1)
         # A moment with less than it has: long enough for the kernel to choose, and over for what is run after it.
         memory=/sys/fs/cgroup$(systemctl show -P ControlGroup $worker)/memory.max
         kept=$(cat $memory)
         echo 1M >$memory
         echo $kept >$memory
         echo 0 >$source
         while [ -n \"$(systemctl list-units --all --no-legend 'ployz-upgrade@*')\" ]; do sleep 0.1; done",
    )
    .ok();
    let seen = facts(vm);
    let told: Value = serde_json::from_str(&seen["told"]).unwrap();
    note(&format!(
        "out of memory: {} at {}: {} / {}",
        told["state"], told["record"]["stage"], told["evidence"], told["unit_ended"]
    ));
    assert_eq!((&seen["installed"], &seen["running"]), (&old.sha256, &old.sha256));
    assert!(seen["failed"].trim().is_empty() && seen["mutation"].contains("problem:initialized"), "{seen:?}");
    // Whichever process the kernel chose: the worker, which says nothing then, or its child, and systemd stops the worker.
    let interrupted = told["state"] == "interrupted" || told["record"]["outcome"]["interrupted"].is_object();
    assert!(interrupted && told["in_place"] == "before", "{told}");
    assert!(told["unit_ended"].to_string().contains("oom-kill"), "{told}");
    let run = vm.run("ployzd upgrade --version 1.6.0 --json").expect(0);
    assert_eq!(run.record()["outcome"]["succeeded"]["sha256"], big.sha256.as_str());
}
