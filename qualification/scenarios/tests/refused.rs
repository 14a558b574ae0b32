//! What does not happen: releases that are not there, two installers at once, installers that are ended half-way.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Background, Machine, Server, release, serve};
use serde_json::{Value, json};

const PLOYZD: &str = "/usr/local/bin/ployzd";
const UPGRADE: &str = "/usr/local/bin/ployzd install --version 1.5.0 --json";

#[test]
fn no_such_release_is_refused_before_anything() {
    let release = release("1.4.0");
    let mut server = serve("no-such").release(&release).start();
    let machine = Machine::named("no-such").served_by(&server);
    let machine = machine.setting("deadlines", json!({"pointer": 3})).installed("1.4.0").boot();
    let (before, attempts) = (machine.watch(), machine.attempts());
    let unchanged = || {
        before.assert_same(&machine.watch());
        assert_eq!(machine.attempts(), attempts, "something was accepted");
        machine.assert_nothing_left();
        machine.assert_runs("1.4.0", &release.sha256);
    };

    let run = machine.run(&format!("{PLOYZD} install --version 1.9.9")).expect(4);
    let _ = run.says(&["404", "no such release", "nothing was changed"]);
    unchanged();
    let run = machine.run(&format!("{PLOYZD} install --channel beta --json")).expect(4);
    assert_eq!(run.last()["record"], Value::Null);
    unchanged();
    server.stop();
    let run = machine.run(&format!("{PLOYZD} install --version 1.5.0")).expect(4);
    let run = run.says(&["releases.ployz.test", "try again later"]);
    assert!(!run.both().contains("no such release"), "unreachable is not absent:\n{}", run.shown());
    assert!(run.took.as_secs() < 10, "it took {:?}", run.took);
    unchanged();
}

/// A machine with 1.4.0, and an upgrade that has come to the middle of its download.
fn in_the_middle(name: &str, installer: &str) -> (Server, Machine, Background, String) {
    let server = serve(name).release(&release("1.4.0")).release(&release("1.5.0")).start();
    let machine = Machine::named(name).served_by(&server).installed("1.4.0").boot();
    server.drip_archives();
    let running = machine.start_run(installer);
    machine.until("an archive is being fetched", |machine| {
        machine.run("find /usr/local/lib/ployz/staging -name '*.tar.gz' -size +1 | grep -q .").code == 0
    });
    let id = machine.run("jq -r .attempt /var/lib/ployz-install/admission.lock").expect(0).text().to_owned();
    (server, machine, running, id)
}

/// The process of whoever installs.
const INSTALLER: &str = "$(jq .pid /var/lib/ployz-install/admission.lock)";

#[test]
fn busy_names_who_is_at_it_and_nothing_else_is_changed_meanwhile() {
    let (server, machine, mut running, id) = in_the_middle("busy", UPGRADE);
    let before = machine.watch();

    let refused = machine.run(UPGRADE).expect(3);
    assert_eq!(refused.last()["refused"]["reason"], "busy");
    let _ = refused.says(&[&id]);
    let _ = machine.run(&format!("{PLOYZD} install")).expect(3).says(&[&id, "busy", "pid "]);
    let _ =
        machine.run(&format!("{PLOYZD} machine initialize")).expect(3).says(&[&id, "nothing was changed"]);
    let _ = machine.run(&format!("{PLOYZD} machine reset --yes")).expect(3).says(&[&id]);
    let shown = machine.run(&format!("{PLOYZD} status")).expect(0);
    let _ = shown.says(&["running, at acquiring", &id[..8]]);
    let status = machine.status();
    assert_eq!(status["admission"]["holder"]["attempt"], id.as_str(), "{status}");
    assert_eq!(machine.api()["admission"]["state"], "installing");
    machine.run("useradd -m alice && usermod -a -G ployz alice").ok();
    let hers = machine.run_as("alice", &format!("{PLOYZD} status")).expect(0);
    let _ = hers.says(&["running, at acquiring"]);
    assert_eq!(machine.attempts().len(), 2, "only the first was accepted");
    assert!(running.runs(), "the first installer was disturbed");
    let daemon = machine.daemon();

    machine.run(&format!("kill -INT {INSTALLER}")).ok();
    let _ = running.end().expect(4);
    assert_eq!(machine.daemon(), daemon);
    drop(before);
    machine.run(&format!("{PLOYZD} machine initialize")).ok();
    server.obey();
    machine.run(UPGRADE).ok();
    machine.assert_runs("1.5.0", &release("1.5.0").sha256);
}

#[test]
fn an_installer_that_is_killed_is_interrupted_and_the_next_one_closes_its_record() {
    let (server, machine, running, id) = in_the_middle("killed", UPGRADE);
    machine.run(&format!("kill -KILL {INSTALLER}")).ok();
    let _ = running.end().expect(137);
    machine.run("systemctl is-active ployz.service").ok();

    let shown = machine.run(&format!("{PLOYZD} status")).expect(4);
    let _ = shown.says(&["INTERRUPTED at acquiring", "installation unchanged", "admission   free", &id[..8]]);
    assert_eq!(machine.attempt(&id)["outcome"], Value::Null, "a reader wrote");
    let left = machine.run("ls /usr/local/lib/ployz/staging").expect(0);
    assert_eq!(left.text(), id, "what it left is in its own staging");

    server.obey();
    let run = machine.run(UPGRADE).expect(0);
    let record = run.record();
    assert!(record["warnings"].to_string().contains(&id), "the closed attempt is told: {record}");
    assert_eq!(machine.attempt(&id)["outcome"]["interrupted"]["stage"], "acquiring");
    machine.assert_runs("1.5.0", &release("1.5.0").sha256);
    machine.assert_nothing_left();
}

#[test]
fn a_power_loss_in_the_download_is_interrupted_with_the_boot_as_evidence() {
    let (server, machine, running, id) = in_the_middle("power", UPGRADE);
    machine.lose_power();
    let _ = running.end();
    let shown = machine.run(&format!("{PLOYZD} status")).expect(4);
    let _ = shown.says(&["INTERRUPTED at acquiring", "restarted", "ready", "1.4.0"]);
    server.obey();
    machine.run(UPGRADE).ok();
    let closed = machine.attempt(&id);
    assert!(closed["outcome"]["interrupted"]["evidence"].to_string().contains("restarted"), "{closed}");
    machine.assert_runs("1.5.0", &release("1.5.0").sha256);
    machine.assert_nothing_left();
}

#[test]
fn ctrl_c_hangup_and_a_closed_pipe_in_the_download_leave_nothing() {
    let (server, machine, running, id) = in_the_middle("cancelled", UPGRADE);
    let before = machine.watch();
    let cancelled = |machine: &Machine, id: &str| {
        let record = machine.attempt(id);
        assert_eq!(record["outcome"]["failed"]["reason"], "cancelled", "{record}");
        assert_eq!(record["outcome"]["failed"]["stage"], "acquiring", "{record}");
        assert_eq!(record["installation"], "unchanged", "{record}");
        machine.assert_nothing_left();
        machine.assert_runs("1.4.0", &release("1.4.0").sha256);
    };
    machine.run(&format!("kill -INT {INSTALLER}")).ok();
    let run = running.end().expect(4);
    assert_eq!(run.outcome()["failed"]["reason"], "cancelled");
    assert!(run.took.as_secs() < 20, "it took {:?}", run.took);
    cancelled(&machine, &id);

    for end in ["kill -HUP", "kill -TERM", "pipe"] {
        let seen = machine.attempts();
        if end == "pipe" {
            // It is noticed when there is something to tell: each 256 KiB.
            server.rules(&json!([{"path": "*.tar.gz", "drip": {"bytes": 20_000, "every_ms": 50}}]));
        }
        let reader = if end == "pipe" { "head -n 4 >/dev/null" } else { "cat" };
        let running = machine.start_run(&format!("{UPGRADE} | {reader}"));
        machine.until("it is accepted", |machine| machine.attempts().len() > seen.len());
        let id = machine.attempts().into_iter().find(|id| !seen.contains(id)).unwrap();
        if end != "pipe" {
            machine.until("it acquires", |machine| machine.attempt(&id)["stage"] == "acquiring");
            machine.run(&format!("{end} {INSTALLER}")).ok();
        }
        drop(running.end());
        machine.until("it has ended", |machine| machine.attempt(&id)["outcome"].is_object());
        cancelled(&machine, &id);
    }
    before.assert_same(&machine.watch());
}
