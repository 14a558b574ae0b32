//! What an accepted upgrade survives, and what it says when it does not.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::time::Instant;

use scenarios::{Machine, Release, Server, hold, note, release, serve};
use serde_json::json;

const PLOYZD: &str = "/usr/local/bin/ployzd";
/// The process of the worker.
const WORKER: &str = "$(jq .pid /var/lib/ployz-install/admission.lock)";

/// A machine with 1.4.0, and 1.5.0 to be had.
fn prepared(name: &str, new: &Release) -> (Server, Machine) {
    let server = serve(name).release(&release("1.4.0")).release(new).start();
    let machine = Machine::named(name).served_by(&server).installed("1.4.0").boot();
    (server, machine)
}

#[test]
fn whatever_becomes_of_the_daemon_and_the_asker_it_reaches_its_outcome() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let (server, machine) = prepared("survives", &new);
    for (what, command) in [
        ("the daemon is killed", "systemctl kill -s KILL ployz.service"),
        ("the daemon is stopped, and its socket", "systemctl stop ployz.socket ployz.service"),
        ("the door is stopped", "systemctl stop ployz-upgrade.socket"),
        ("systemd executes itself anew", "systemctl daemon-reexec"),
        ("both installed executables are removed", "rm /usr/local/bin/ployzd /usr/local/bin/ployzd.previous"),
    ] {
        let id = machine.ask_and_hold(&server, "1.5.0");
        machine.run(command).ok();
        server.obey();
        let record = machine.assert_upgraded(&id, &new);
        note(&format!("{what}: succeeded; warnings {}", record["warnings"]));
        machine.install(&old).ok();
        // So that there is one to remove.
        machine.run(&format!("cp -p {PLOYZD} {PLOYZD}.previous")).ok();
    }
    // The asker: a client that is killed right after acceptance, and one whose session ends.
    let seen = machine.attempts();
    hold(&server);
    let mut login = machine.login(true, &format!("exec {PLOYZD} upgrade --version 1.5.0"));
    let mut id = None;
    machine.until("it is accepted", |machine| {
        id = machine.attempts().into_iter().find(|id| !seen.contains(id));
        id.is_some()
    });
    machine.run("pkill -KILL -f '[p]loyzd upgrade --version'").ok();
    login.cut();
    server.obey();
    machine.assert_upgraded(&id.unwrap(), &new);
}

#[test]
fn who_follows_sees_the_end_across_the_restart_and_who_leaves_is_told_how_to_come_back() {
    let new = release("1.5.0");
    let (server, machine) = prepared("followed", &new);
    hold(&server);
    let following = machine.start_run(&format!("exec {PLOYZD} upgrade --version 1.5.0"));
    machine.until("it is accepted", |machine| machine.attempts().len() == 2);
    let id = machine.run("jq -r .attempt /var/lib/ployz-install/admission.lock").expect(0).text().to_owned();
    machine.until("it is followed", |machine| machine.told(&id)["progress"]["bytes"].as_u64() > Some(0));
    let second = machine.start_run(&format!("exec {PLOYZD} attempt {id} --follow --json"));
    machine.run("pkill -INT -f '[p]loyzd upgrade --version'").ok();
    let left = following.end().expect(6);
    let _ = left.says(&["goes on", &format!("ployzd attempt {id} --follow")]);

    // The same request again is the same attempt, another one under its id is a conflict, another id is busy.
    let again = format!("{PLOYZD} upgrade --version 1.5.0 --attempt {id} --no-follow --json");
    assert_eq!(machine.run(&again).expect(0).last()["record"]["id"], id.as_str());
    let conflict = format!("{PLOYZD} upgrade --version 1.4.0 --attempt {id} --no-follow --json");
    assert_eq!(machine.run(&conflict).expect(4).last()["refused"]["reason"], "conflict");
    let busy = machine.run(&format!("{PLOYZD} upgrade --version 1.5.0")).expect(3);
    let _ = busy.says(&[&id, "upgrade", "at acquiring", "Nothing was accepted"]);
    let mutation = machine.run(&format!("{PLOYZD} machine initialize")).expect(3);
    let _ = mutation.says(&[&id, "at acquiring"]);
    let _ = machine.run(&format!("{PLOYZD} attempt {id}")).expect(0).says(&["running, at acquiring"]);

    server.obey();
    let run = second.end().expect(0);
    let stages: Vec<_> = run.events().iter().filter_map(|e| e["stage"].as_str().map(str::to_owned)).collect();
    assert!(stages.contains(&"acquiring".into()) && stages.contains(&"confirming".into()), "{stages:?}");
    assert!(run.events().iter().any(|event| event["event"] == "progress"), "{}", run.shown());
    assert_eq!(run.last()["record"]["outcome"]["succeeded"]["version"], "1.5.0", "{}", run.shown());
    machine.assert_upgraded(&id, &new);
    let list = machine.run(&format!("{PLOYZD} attempt --list")).expect(0);
    let _ = list.says(&[&id, "upgrade 1.4.0 → 1.5.0", "succeeded"]);
    assert_eq!(machine.attempts().len(), 2, "one attempt, however often it was asked for");
}

#[test]
fn a_target_that_can_not_start_is_told_by_the_record_when_no_daemon_tells() {
    let bad = release("1.5.0")
        .changed("ExecStart=/usr/local/bin/ployzd daemon\n", "ExecStart=/usr/local/bin/ployzd daemom\n");
    let (_server, machine) = prepared("start-failing", &bad);
    machine.run("useradd -m alice && usermod -a -G ployz alice").ok();
    let run = machine.run_as("alice", &format!("{PLOYZD} upgrade --version 1.5.0")).expect(5);
    let _ = run.says(&[
        "FAILED at confirming, installation replaced",
        "exited with status 2",
        "ployzd.previous recover",
    ]);
    let id = machine.attempts().into_iter().find(|id| machine.attempt(id)["kind"] == "upgrade").unwrap();
    let shown = machine.run_as("alice", &format!("{PLOYZD} attempt {id} --json")).expect(5).last();
    assert_eq!(shown["in_place"], "target", "{shown}");
    // A daemon that does not answer can't be asked: the way without it is named.
    let asked = machine.run_as("alice", &format!("{PLOYZD} upgrade --version 1.4.0")).expect(6);
    let _ = asked.says(&["sudo /usr/local/bin/ployzd install --version 1.4.0", "Nothing was accepted"]);
    machine.run("/usr/local/bin/ployzd.previous recover --yes").ok();
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
}

#[test]
fn units_of_the_door_and_the_worker_are_replaced_under_the_worker_that_does_it() {
    let new = release("1.5.0")
        .changed("RuntimeMaxSec=15min\n", "RuntimeMaxSec=1s   \n")
        .changed("MaxConnections=4\n", "MaxConnections=3\n");
    let server = serve("own-units").release(&release("1.4.0")).release(&new).start();
    let machine = Machine::named("own-units").served_by(&server).setting("confirm_window", 3.into());
    let machine = machine.installed("1.4.0").boot();
    let id = machine.ask_for("1.5.0");
    let record = machine.assert_upgraded(&id, &new);
    let switched = record["switched"].as_array().unwrap();
    assert_eq!(switched.last().unwrap(), "/usr/local/lib/systemd/system/ployz-upgrade@.service", "{record}");
    assert!(
        record["warnings"].to_string().contains("ployz-upgrade.socket was closed and opened"),
        "{record}"
    );
    assert_eq!(machine.run("systemctl show -P MaxConnections ployz-upgrade.socket").text(), "3");

    // The next worker is bounded by what the release says: it is ended by systemd, and that is told.
    let id = machine.ask_and_hold(&server, "1.4.0");
    let record = machine.outcome_of(&id);
    assert!(record["outcome"]["interrupted"]["evidence"].to_string().contains("SIGTERM"), "{record}");
    let told = machine.told(&id);
    assert!(told["unit_ended"].to_string().contains("timeout"), "{told}");
    assert_eq!((&told["record"]["installation"], &told["in_place"]), (&json!("unchanged"), &json!("before")));
    server.obey();
    machine.run(&format!("{PLOYZD} install --version 1.4.0")).ok();
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
    machine.assert_healthy();
}

#[test]
fn a_worker_that_is_stopped_says_how_far_it_came() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let (server, machine) = prepared("stopped", &new);
    let daemon = machine.daemon();
    let id = machine.ask_and_hold(&server, "1.5.0");
    let started = Instant::now();
    machine.run("systemctl stop 'ployz-upgrade@*'").ok();
    note(&format!("the worker was stopped in the download after {:?}", started.elapsed()));
    let record = machine.outcome_of(&id);
    let interrupted = &record["outcome"]["interrupted"];
    assert_eq!(
        (&interrupted["stage"], &record["installation"]),
        (&json!("acquiring"), &json!("unchanged")),
        "{record}"
    );
    assert!(interrupted["evidence"].to_string().contains("SIGTERM"), "{record}");
    assert_eq!(machine.daemon(), daemon);
    machine.assert_nothing_left();
    machine.assert_healthy();
    server.obey();

    // After the first rename: the rename of the executable is not left for three seconds.
    let id = machine.ask_and_hold(&server, "1.5.0");
    let path = format!("/usr/local/bin/.ployzd.{id}");
    let renaming = format!("-e trace=rename -P {path} -e inject=rename:delay_exit=3000000");
    let watching = machine.start_run(&format!("exec strace -o /run/renaming -p {WORKER} {renaming}"));
    server.obey();
    machine
        .run(&format!(
            "until sha256sum {PLOYZD} | grep -q ^{}; do sleep 0.1; done; systemctl stop 'ployz-upgrade@*'",
            new.sha256
        ))
        .ok();
    let record = machine.outcome_of(&id);
    assert!(record["outcome"]["interrupted"]["evidence"].to_string().contains("SIGTERM"), "{record}");
    assert_eq!(record["installation"], "replaced", "{record}");
    let now = machine.daemon();
    assert_eq!(
        (now.pid, now.sha256, now.runs_installed),
        (daemon.pid, old.sha256.clone(), false),
        "nothing was restarted"
    );
    machine.assert_nothing_left();
    drop(watching);
    let shown = machine.run(&format!("{PLOYZD} attempt {id}")).expect(6);
    let _ = shown.says(&["INTERRUPTED", "installation replaced", "the target"]);
    let id = machine.ask_for("1.5.0");
    machine.assert_upgraded(&id, &new);
}

#[test]
fn a_reboot_in_the_middle_is_not_delayed_and_is_told_afterwards() {
    let new = release("1.5.0");
    let server = serve("rebooted").release(&release("1.4.0")).release(&new).start();
    let machine = Machine::named("rebooted").served_by(&server).setting("confirm_window", 20.into()).boot();
    machine.install(&release("1.4.0")).ok();
    for (stage, installation, runs) in
        [("acquiring", "unchanged", "1.4.0"), ("confirming", "replaced", "1.5.0")]
    {
        let id = if stage == "acquiring" {
            machine.ask_and_hold(&server, "1.5.0")
        } else {
            machine.ask_for("1.5.0")
        };
        machine.until("it has come there", |machine| machine.attempt(&id)["stage"] == stage);
        let started = Instant::now();
        machine.reboot();
        let took = started.elapsed();
        server.obey();
        let told = machine.told(&id);
        note(&format!("rebooted at {stage} in {took:?}: {} {}", told["state"], told["record"]["outcome"]));
        assert!(took.as_secs() < 20, "the shutdown was delayed: {took:?}");
        let record = machine.attempt(&id);
        assert_eq!(record["outcome"]["interrupted"]["stage"], stage, "{record}");
        assert_eq!(record["installation"], installation, "{record}");
        assert_eq!(machine.api()["version"], runs, "nothing is rolled back or resumed");
        machine.assert_nothing_left();
        machine.assert_healthy();
    }
}
