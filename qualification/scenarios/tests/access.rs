//! Who may do what on a Machine: root, an operator in group `ployz`, anyone else.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Machine, release, serve};

const PLOYZD: &str = "/usr/local/bin/ployzd";

#[test]
fn a_named_operator_sees_everything_and_initializes_and_is_not_root() {
    let release = release("1.4.0");
    let server = serve("operator").release(&release).start();
    let machine = Machine::named("operator").served_by(&server).installed("1.4.0").boot();
    machine.run("useradd -m alice && useradd -m bob").ok();
    let run = machine.run(&format!("{PLOYZD} install --group-user alice --json")).expect(0);
    assert_eq!(run.outcome()["succeeded"]["nothing_was_needed"], true);
    assert_eq!(machine.run("getent group ployz").expect(0).text().split(':').next_back(), Some("alice"));
    let again = machine.run(&format!("{PLOYZD} install --group-user alice --json")).expect(0);
    assert!(!again.stdout.contains("is in group ployz ("), "she was added twice:\n{}", again.shown());

    let seen = machine.run_as("alice", &format!("{PLOYZD} status --json")).expect(0).json();
    assert_eq!(seen["unknown"].as_array().unwrap().len(), 0, "{seen}");
    assert_eq!(seen["findings"].as_array().unwrap().len(), 0, "{seen}");
    let shown = machine.run_as("alice", &format!("{PLOYZD} status")).expect(0);
    let _ =
        shown.says(&["1.4.0", "ready", "says it runs the installed file", "succeeded", "admission   free"]);

    machine.run_as("alice", &format!("{PLOYZD} machine initialize --name hers")).ok();
    let id = machine.api()["id"].clone();
    let refused = machine.run_as("alice", &format!("{PLOYZD} machine reset --yes")).expect(77);
    let _ = refused.says(&["only root", "nothing was changed"]);
    let _ = machine.run_as("alice", &format!("{PLOYZD} install --version 1.4.0")).expect(77).says(&["sudo"]);
    assert_eq!(machine.api()["id"], id);
    for path in ["/var/lib/ployz/identity.json", "/var/lib/ployz-install/admission.lock"] {
        let tried = machine.run_as("alice", &format!("cat {path}"));
        assert_ne!(tried.code, 0, "{path} is readable to operators");
    }
    let tried =
        machine.run_as("alice", "touch /var/lib/ployz-install/attempts/x /usr/local/bin/ployzd /run/ployz/x");
    assert_eq!(tried.both().matches("Permission denied").count(), 3, "{}", tried.shown());
}

#[test]
fn whoever_is_no_operator_is_told_what_is_not_known_and_nothing_false() {
    let machine = Machine::named("outsider").installed("1.4.0").boot();
    machine.run("useradd -m bob").ok();
    let tried = machine.run_as("bob", &format!("{PLOYZD} machine initialize")).expect(77);
    let _ = tried.says(&["usermod -a -G ployz"]);
    let _ = machine.run_as("bob", &format!("{PLOYZD} machine reset --yes")).expect(77);
    let _ = machine.run_as("bob", &format!("{PLOYZD} install")).expect(77).says(&["sudo"]);
    assert_eq!(machine.api()["phase"], "uninitialized");

    let shown = machine.run_as("bob", &format!("{PLOYZD} status")).expect(6);
    let shown = shown.says(&["sudo /usr/local/bin/ployzd status", "unknown", "1.4.0"]);
    for lie in ["no attempt", "admission   free", "differs"] {
        assert!(!shown.both().contains(lie), "{lie:?} is not known to bob:\n{}", shown.shown());
    }
    let refused =
        machine.run(&format!("{PLOYZD} install --group-user nobody-here --group-user bob")).expect(4);
    let _ = refused.says(&["nobody-here", "nothing was changed"]);
    assert_eq!(machine.run("getent group ployz | cut -d: -f4").text(), "", "half of it was done");
}
