//! Somebody else is at work on the Machine in the middle of an upgrade: the outcome is what can be seen, each time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Machine, Release, Server, note, release, serve};
use serde_json::{Value, json};

const PLOYZD: &str = "/usr/local/bin/ployzd";
const UNIT: &str = "/usr/local/lib/systemd/system/ployz.service";

/// When somebody interferes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// While the archive comes.
    Acquiring,
    /// When the new release is ready and is being watched.
    Watching,
}

/// What is expected of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Succeeded,
    /// At this stage, for this reason.
    Failed(&'static str, &'static str),
}

struct Row {
    what: &'static str,
    when: When,
    command: &'static str,
    end: End,
    /// What its warnings or error say.
    says: &'static str,
}

const fn row(what: &'static str, when: When, command: &'static str, end: End, says: &'static str) -> Row {
    Row { what, when, command, end, says }
}

const ROWS: [Row; 17] = [
    row(
        "the daemon is restarted while it comes",
        When::Acquiring,
        "systemctl restart ployz.service",
        End::Succeeded,
        "",
    ),
    row(
        "the daemon is restarted while it is watched",
        When::Watching,
        "systemctl restart ployz.service",
        End::Succeeded,
        "somebody restarted it",
    ),
    row(
        "services of replaced executables are restarted, as needrestart does",
        When::Watching,
        "for pid in $(ls -l /proc/[0-9]*/exe 2>/dev/null | grep '(deleted)' | sed 's#.*/proc/\\([0-9]*\\)/exe.*#\\1#'); do \
         unit=$(sed -n 's#^0::.*/\\([^/]*\\.service\\)$#\\1#p' /proc/$pid/cgroup); \
         case $unit in ployz-upgrade*|'') ;; *) systemctl restart $unit ;; esac; done; systemctl restart ployz.service",
        End::Succeeded,
        "somebody restarted it",
    ),
    row(
        "the daemon is stopped while it comes",
        When::Acquiring,
        "systemctl stop ployz.service",
        End::Succeeded,
        "",
    ),
    row(
        "the daemon and its socket are stopped while they are watched",
        When::Watching,
        "systemctl stop ployz.socket ployz.service",
        End::Failed("confirming", "unstable"),
        "ployz.service is inactive",
    ),
    row(
        "the daemon is masked while it comes",
        When::Acquiring,
        "systemctl mask --now ployz.service",
        End::Failed("preflight", "host"),
        "ployz.service is masked",
    ),
    row(
        "the daemon is masked and stopped while it is watched",
        When::Watching,
        "systemctl mask --now ployz.service; systemctl stop ployz.socket",
        End::Failed("confirming", "unstable"),
        "ployz.service",
    ),
    row(
        "an override of its command while it comes",
        When::Acquiring,
        "mkdir -p /etc/systemd/system/ployz.service.d; printf '[Service]\\nExecStart=\\nExecStart=/usr/bin/busybox sleep 99\\n' \
         >/etc/systemd/system/ployz.service.d/o.conf; systemctl daemon-reload",
        End::Failed("preflight", "host"),
        "starts /usr/bin/busybox",
    ),
    row(
        "an override of its environment, and a restart, while it is watched",
        When::Watching,
        "mkdir -p /etc/systemd/system/ployz.service.d; printf '[Service]\\nEnvironment=A=b\\n' \
         >/etc/systemd/system/ployz.service.d/o.conf; systemctl daemon-reload; systemctl restart ployz.service",
        End::Succeeded,
        "somebody restarted it",
    ),
    row(
        "all records are removed while it comes",
        When::Acquiring,
        "rm -r /var/lib/ployz-install/attempts",
        End::Succeeded,
        "",
    ),
    row(
        "all records are removed while it is watched",
        When::Watching,
        "rm -r /var/lib/ployz-install/attempts",
        End::Succeeded,
        "",
    ),
    row(
        "the lock file is removed while it comes",
        When::Acquiring,
        "rm /var/lib/ployz-install/admission.lock",
        End::Failed("acquiring", "admission_lost"),
        "was removed or replaced",
    ),
    row(
        "the old unit is put back while it is watched",
        When::Watching,
        "cp /root/old.service /usr/local/lib/systemd/system/ployz.service; systemctl daemon-reload",
        End::Succeeded,
        "is not what this release brings any more",
    ),
    row(
        "the old binary is put back while the new one is watched",
        When::Watching,
        "cp /root/old /usr/local/bin/x && mv /usr/local/bin/x /usr/local/bin/ployzd",
        End::Failed("confirming", "displaced"),
        "somebody changed it",
    ),
    row(
        "the daemon hangs for three seconds while it is watched",
        When::Watching,
        "systemctl kill -s STOP ployz.service; sleep 3; systemctl kill -s CONT ployz.service",
        End::Succeeded,
        "",
    ),
    row(
        "the daemon hangs for good while it is watched",
        When::Watching,
        "systemctl kill -s STOP ployz.service",
        End::Failed("confirming", "unstable"),
        "did not answer",
    ),
    row(
        "unit files are reloaded again and again while it is watched",
        When::Watching,
        "for i in 1 2 3 4 5 6 7 8; do systemctl daemon-reload; sleep 0.3; done",
        End::Succeeded,
        "",
    ),
];

fn prepared(name: &str) -> (Server, Machine, Release, Release) {
    let old = release("1.4.0");
    // With a unit that differs, so that units are switched too.
    let new =
        release("1.5.0").changed("Description=Ployz Machine daemon\n", "Description=Ployz Machine Daemon\n");
    let server = serve(name).release(&old).release(&new).start();
    let machine =
        Machine::named(name).served_by(&server).setting("confirm_window", json!(4)).installed("1.4.0").boot();
    machine.run(&format!("cp {PLOYZD} /root/old; cp {UNIT} /root/old.service")).ok();
    (server, machine, old, new)
}

/// What a record says against what is so.
fn assert_true(machine: &Machine, row: &Row, record: &Value, old: &Release, new: &Release) {
    let what = row.what;
    let all = record.to_string();
    match row.end {
        End::Succeeded => {
            assert_eq!(record["outcome"]["succeeded"]["version"], "1.5.0", "{what}: {record}");
            let facts = machine.assert_runs("1.5.0", &new.sha256);
            assert_eq!(record["outcome"]["succeeded"]["pid"], facts.pid, "{what}: another process runs");
        }
        End::Failed(stage, reason) => {
            let failed = &record["outcome"]["failed"];
            assert_eq!(
                (&failed["stage"], &failed["reason"]),
                (&stage.into(), &reason.into()),
                "{what}: {record}"
            );
            let in_place = machine.sha256(PLOYZD);
            let is_old = record["installation"] == "unchanged" || reason == "displaced";
            assert_eq!(in_place, if is_old { &*old.sha256 } else { &*new.sha256 }, "{what}");
        }
    }
    assert!(all.contains(row.says), "{what}: {all}");
}

#[test]
fn whoever_else_is_at_work_on_the_machine_the_outcome_is_what_can_be_seen() {
    let (server, machine, old, new) = prepared("interference");
    let mut table = Vec::new();
    for row in &ROWS {
        let id = match row.when {
            When::Acquiring => machine.ask_and_hold(&server, "1.5.0"),
            When::Watching => {
                let id = machine.ask_for("1.5.0");
                machine.until("it is watched", |machine| {
                    machine
                        .run(&format!("jq -e .ready_observed_at /var/lib/ployz-install/attempts/{id}.json"))
                        .code
                        == 0
                });
                id
            }
        };
        let ran = machine.run(row.command);
        assert_eq!(ran.code, 0, "{}: {}", row.what, ran.shown());
        server.obey();
        machine.until("its record is there", |machine| machine.attempts().contains(&id));
        let record = machine.outcome_of(&id);
        assert_true(&machine, row, &record, &old, &new);
        let outcome = record["outcome"].as_object().and_then(|o| o.iter().next()).unwrap();
        let reason = outcome.1["reason"].as_str().unwrap_or_default();
        table.push(format!(
            "{:<70} {} {reason} ({})",
            row.what,
            outcome.0,
            record["installation"].as_str().unwrap()
        ));
        // Whatever happened, the Machine comes back: what was put there is taken away, and the old release installed.
        machine.run("systemctl unmask ployz.service; rm -rf /etc/systemd/system/ployz.service.d; systemctl daemon-reload; \
            systemctl kill -s CONT ployz.service; true").ok();
        machine.install(&old).ok();
        machine.assert_runs("1.4.0", &old.sha256);
        machine.assert_healthy();
        machine.assert_nothing_left();
    }
    note(&format!("interference:\n  {}", table.join("\n  ")));
}

#[test]
fn with_the_state_directory_gone_the_journal_still_tells_and_the_next_installation_is_whole() {
    let (server, machine, _old, new) = prepared("state-gone");
    let id = machine.ask_and_hold(&server, "1.5.0");
    machine.run("rm -rf /var/lib/ployz-install").ok();
    server.obey();
    machine.until("its worker is gone", |machine| {
        machine.run("systemctl list-units --all --no-legend 'ployz-upgrade@*'").text().is_empty()
    });
    let told = machine.run(&format!("journalctl _UID=0 PLOYZ_ATTEMPT={id} -o cat")).expect(0);
    note(&format!("the state directory is removed: {}", told.text().lines().last().unwrap_or_default()));
    let failed = told.both().contains("failed at");
    let version = if failed { "1.4.0" } else { "1.5.0" };
    assert_eq!(machine.api()["version"], version, "{}", told.shown());
    machine.install(&new).ok();
    machine.assert_runs("1.5.0", &new.sha256);
    machine.assert_healthy();
}

#[test]
fn a_disk_that_others_fill_is_named_and_never_ends_in_half_a_release() {
    let (server, machine, old, new) = prepared("disk-full");
    // The state of attempts on a small filesystem of its own, which somebody fills.
    machine.run("mkdir /var/lib/keep && cp -a /var/lib/ployz-install/. /var/lib/keep && \
        mount -t tmpfs -o size=400k tmpfs /var/lib/ployz-install && cp -a /var/lib/keep/. /var/lib/ployz-install/").ok();
    machine.install(&old).ok();
    let fill = "dd if=/dev/zero of=/var/lib/ployz-install/full bs=1k 2>/dev/null; true";
    let id = machine.ask_and_hold(&server, "1.5.0");
    machine.run(fill).ok();
    server.obey();
    machine.until("its worker is gone", |machine| {
        machine.run("systemctl list-units --all --no-legend 'ployz-upgrade@*'").text().is_empty()
    });
    let told = machine.run(&format!("journalctl _UID=0 PLOYZ_ATTEMPT={id} -o cat")).expect(0);
    note(&format!("full while it comes: {}", told.text().lines().last().unwrap_or_default()));
    assert_eq!(
        (machine.api()["version"].clone(), machine.sha256(PLOYZD)),
        (json!("1.4.0"), old.sha256.clone())
    );
    let seen = machine.told(&id);
    assert_ne!(seen["record"]["outcome"]["succeeded"]["version"], "1.5.0", "{seen}");
    assert_ne!(seen["state"], "running", "{seen}");
    let refused = machine.run(&format!("{PLOYZD} upgrade --version 1.5.0"));
    let _ = refused.says(&["No space left", "df -h"]);
    machine.run("rm /var/lib/ployz-install/full").ok();
    // While it is watched: what is done is done, and whoever looks is not told otherwise.
    let id = machine.ask_for("1.5.0");
    machine.until("it is watched", |machine| {
        machine.run(&format!("jq -e .ready_observed_at /var/lib/ployz-install/attempts/{id}.json")).code == 0
    });
    machine.run(fill).ok();
    machine.until("its worker is gone", |machine| {
        machine.run("systemctl list-units --all --no-legend 'ployz-upgrade@*'").text().is_empty()
    });
    assert_eq!(
        (machine.api()["version"].clone(), machine.sha256(PLOYZD)),
        (json!("1.5.0"), new.sha256.clone())
    );
    let seen = machine.told(&id);
    note(&format!("full while it is watched: {} {}", seen["state"], seen["record"]["installation"]));
    assert_eq!(seen["record"]["installation"], "replaced", "{seen}");
    let told = machine.run(&format!("journalctl _UID=0 PLOYZ_ATTEMPT={id} -o cat")).expect(0);
    let _ = told.says(&["succeeded: 1.5.0 is running"]);
    machine.run("rm /var/lib/ployz-install/full").ok();
    machine.install(&new).ok();
    machine.assert_healthy();
}
