//! The end of whoever started an installation: a session that is cut, a unit that is stopped.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::ssh::Login;
use scenarios::{Background, Machine, Server, note, release, serve};
use serde_json::{Value, json};

const UPGRADE: &str = "/usr/local/bin/ployzd install --version 1.5.0";
/// The process of whoever installs.
const INSTALLER: &str = "$(jq .pid /var/lib/ployz-install/admission.lock)";
/// What is in a session and ends with it, where logind is told so; its parent is nobody's.
const WITNESS: &str = "setsid --fork sleep 4242 </dev/null >/dev/null 2>&1";

/// How a session ends.
#[derive(Debug, Clone, Copy)]
enum End {
    /// The client is gone; there was no terminal.
    Pipe,
    /// The client is gone, and with it the terminal.
    Terminal,
    /// `loginctl terminate-session`.
    Terminated,
}

const ENDS: [End; 3] = [End::Pipe, End::Terminal, End::Terminated];

#[test]
fn a_session_that_ends_in_the_download_cancels_the_installation_and_leaves_nothing() {
    let (server, machine) = prepared("session-before");
    let before = machine.watch();
    for end in ENDS {
        drip(&server);
        let seen = machine.attempts();
        let login = logged_in(&machine, end);
        let id = reached(&machine, &seen, "acquiring");
        ended(&machine, login, end);
        let record = outcome(&machine, &id);
        assert_eq!(record["outcome"]["failed"]["reason"], "cancelled", "{end:?}: {record}");
        assert_eq!(record["installation"], "unchanged", "{end:?}: {record}");
        in_own_scope(&record);
        machine.assert_nothing_left();
        before.assert_same(&machine.watch());
        note(&format!("session ended in the download ({end:?}): {}", record["outcome"]["failed"]["error"]));
    }
    server.obey();
    machine.run(UPGRADE).ok();
    machine.assert_runs("1.5.0", &release("1.5.0").sha256);
}

#[test]
fn a_session_that_ends_after_activation_changes_nothing_about_it() {
    let (_server, machine) = prepared("session-after");
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    for end in ENDS {
        let seen = machine.attempts();
        let login = logged_in(&machine, end);
        let id = reached(&machine, &seen, "confirming");
        ended(&machine, login, end);
        let open = machine.attempt(&id)["outcome"].is_null();
        let record = outcome(&machine, &id);
        assert_eq!(record["outcome"]["succeeded"]["version"], "1.5.0", "{end:?}: {record}");
        in_own_scope(&record);
        machine.assert_runs("1.5.0", &new.sha256);
        machine.assert_nothing_left();
        assert!(open, "{end:?}: it had ended before the session: {record}");
        note(&format!("session ended in confirmation ({end:?}): {}", record["warnings"]));
        machine.install(&old).ok();
    }
}

#[test]
fn stopping_its_scope_in_the_download_cancels_it() {
    let (server, machine) = prepared("scope-before");
    let before = machine.watch();
    let (running, id) = dripping(&server, &machine);
    machine.run("systemctl stop 'ployz-install-*.scope'").ok();
    let run = running.end().expect(4);
    assert_eq!(run.outcome()["failed"]["reason"], "cancelled");
    assert_eq!(machine.attempt(&id)["outcome"], run.outcome());
    machine.assert_nothing_left();
    before.assert_same(&machine.watch());
}

#[test]
fn stopping_its_scope_after_the_first_rename_restarts_nothing_and_says_so() {
    let (server, machine) = prepared("scope-after");
    let (running, id) = dripping(&server, &machine);
    // The rename of the executable is not left for four seconds.
    let path = format!("/usr/local/bin/.ployzd.{id}");
    let renaming = format!("-e trace=rename -P {path} -e inject=rename:delay_exit=4000000");
    let watching = machine.start_run(&format!("exec strace -o /run/renaming -p {INSTALLER} {renaming}"));
    stop_when_in_place(&machine, "true");
    interrupted(&machine, running, &id);
    drop(watching);
}

#[test]
fn stopping_its_scope_while_it_has_a_child_of_systemd_is_the_same() {
    let (server, machine) = prepared("scope-child");
    machine.run("echo '# another line' >>/usr/local/lib/systemd/system/ployz.service").ok();
    machine.run("systemctl daemon-reload && systemctl restart ployz.service").ok();
    let (running, id) = dripping(&server, &machine);
    // Each systemctl takes four seconds to begin: the one that is to reload is there to be hit.
    let starting = "-e trace=execve -P /usr/bin/systemctl -e inject=execve:delay_exit=4000000";
    let watching = machine.start_run(&format!("exec strace -f -o /run/starting -p {INSTALLER} {starting}"));
    stop_when_in_place(&machine, "grep -qx systemctl /proc/[0-9]*/comm");
    interrupted(&machine, running, &id);
    drop(watching);
}

/// 1.4.0, with a confirmation that takes a while, on a machine whose logind ends what a session leaves; root, too.
fn prepared(name: &str) -> (Server, Machine) {
    let server = serve(name).release(&release("1.4.0")).release(&release("1.5.0")).start();
    let machine = Machine::named(name).served_by(&server).setting("confirm_window", 6.into());
    let machine = machine.installed("1.4.0").boot();
    let settings = "[Login]\nKillUserProcesses=yes\nKillExcludeUsers=nobody\n";
    machine.write("/etc/systemd/logind.conf.d/kill.conf", settings);
    machine.run("systemctl restart systemd-logind.service").ok();
    (server, machine)
}

/// A session in which an upgrade and a witness were started.
fn logged_in(machine: &Machine, end: End) -> Login {
    let login = machine.login(matches!(end, End::Terminal), &format!("{WITNESS}; exec {UPGRADE}"));
    machine.until("the session has its witness", |machine| machine.run("pgrep -xf 'sleep 4242'").code == 0);
    login
}

/// Ends the session, and sees that it has ended what was left in it: else nothing would be shown.
fn ended(machine: &Machine, mut login: Login, end: End) {
    match end {
        End::Pipe | End::Terminal => login.cut(),
        End::Terminated => {
            let sessions = "loginctl list-sessions --no-legend | awk '{ print $1 }'";
            machine.run(&format!("loginctl terminate-session $({sessions})")).ok();
        }
    }
    machine.until("the session is gone", |machine| machine.run("pgrep -xf 'sleep 4242'").code != 0);
    drop(login);
}

/// The new attempt, when it has come to a stage.
fn reached(machine: &Machine, seen: &[String], stage: &str) -> String {
    let mut id = None;
    machine.until(&format!("the attempt is {stage}"), |machine| {
        id = machine.attempts().into_iter().find(|id| !seen.contains(id));
        id.as_ref().is_some_and(|id| machine.attempt(id)["stage"] == stage)
    });
    id.unwrap()
}

/// The record of the attempt, when it has an outcome.
fn outcome(machine: &Machine, id: &str) -> Value {
    machine.until("it has an outcome", |machine| machine.attempt(id)["outcome"].is_object());
    machine.until("its scope is gone", |machine| {
        machine.run("systemctl list-units --all --no-legend 'ployz-install-*'").text().is_empty()
    });
    machine.attempt(id)
}

fn in_own_scope(record: &Value) {
    let unit = record["unit"].as_str().unwrap();
    assert!(unit.starts_with("ployz-install-") && unit.ends_with(".scope"), "it ran in {unit}");
}

/// Sends archives slowly, and fast enough to end: without a terminal it is noticed when there is something to tell.
fn drip(server: &Server) {
    server.rules(&json!([{"path": "*.tar.gz", "drip": {"bytes": 10_000, "every_ms": 50}}]));
}

/// An upgrade that has come to the middle of its download.
fn dripping(server: &Server, machine: &Machine) -> (Background, String) {
    drip(server);
    let seen = machine.attempts();
    let running = machine.start_run(&format!("{UPGRADE} --json"));
    let id = reached(machine, &seen, "acquiring");
    (running, id)
}

/// Stops the scope as soon as the new executable is in place and a condition holds.
fn stop_when_in_place(machine: &Machine, condition: &str) {
    let new = release("1.5.0").sha256;
    machine
        .run(&format!(
            "until sha256sum /usr/local/bin/ployzd | grep -q ^{new} && {condition}; do sleep 0.1; done
             systemctl stop 'ployz-install-*.scope'"
        ))
        .ok();
}

/// It ended as interrupted, with everything in place and nothing restarted; and the next one finishes.
fn interrupted(machine: &Machine, running: Background, id: &str) {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let run = running.end().expect(6);
    let record = machine.attempt(id);
    assert_eq!(record["outcome"], run.outcome());
    assert!(record["outcome"]["interrupted"]["evidence"].to_string().contains("SIGTERM"), "{record}");
    assert_eq!(record["installation"], "replaced", "{record}");
    assert_eq!(machine.sha256("/usr/local/bin/ployzd"), new.sha256);
    let daemon = machine.daemon();
    assert_eq!((daemon.sha256, daemon.runs_installed), (old.sha256.clone(), false), "nothing was restarted");
    machine.assert_nothing_left();
    let shown = machine.run("/usr/local/bin/ployzd status").expect(4);
    let _ = shown.says(&["interrupted", "replaced"]);

    machine.run(UPGRADE).ok();
    machine.assert_runs("1.5.0", &new.sha256);
    assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), old.sha256);
}
