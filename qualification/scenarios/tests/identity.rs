//! The Machine's identity: only `initialize` makes it, only root's `reset` removes it, nothing else touches it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Machine, release, serve};

const PLOYZD: &str = "/usr/local/bin/ployzd";
/// Names, owners, modes, times and contents.
const STATE: &str =
    "find /var/lib/ployz -printf '%p %y %u:%g %m %T@ %i\n' | sort; sha256sum /var/lib/ployz/*";

#[test]
fn identity_survives_an_upgrade_byte_for_byte_and_goes_with_a_reset() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let server = serve("identity").release(&old).release(&new).start();
    let machine = Machine::named("identity").served_by(&server).installed("1.4.0").boot();
    assert_eq!(machine.api()["phase"], "uninitialized");

    let made = machine.run(&format!("{PLOYZD} machine initialize --name web-1 --json")).expect(0).json();
    assert_eq!((&made["phase"], &made["name"]), (&"initialized".into(), &"web-1".into()), "{made}");
    machine.assert_modes(&[("/var/lib/ployz", "directory ployz:ployz 750")]);
    machine.assert_modes(&[("/var/lib/ployz/identity.json", "file ployz:ployz 600")]);
    let state = machine.run(STATE).expect(0);
    let again = machine.run(&format!("{PLOYZD} machine initialize")).expect(4);
    let _ = again.says(&["web-1 already", "nothing was changed"]);

    machine.run(&format!("{PLOYZD} install --version 1.5.0")).ok();
    machine.assert_runs("1.5.0", &new.sha256);
    assert_eq!(machine.run(STATE).stdout, state.stdout, "the upgrade touched the state");
    assert_eq!(machine.api()["id"], made["id"]);
    machine.lose_power();
    assert_eq!(machine.run(STATE).stdout, state.stdout, "the power loss touched the state");
    assert_eq!(machine.api()["id"], made["id"]);

    // Without a terminal nobody can be asked, and without an answer nothing is removed.
    let _ = machine.run(&format!("{PLOYZD} machine reset")).expect(4).says(&["--yes"]);
    assert_eq!(machine.run(STATE).stdout, state.stdout);
    machine.run(&format!("{PLOYZD} machine reset --yes")).ok();
    assert_eq!(machine.api()["phase"], "uninitialized");
    assert_eq!(machine.run("find /var/lib/ployz -mindepth 1").text(), "");
    machine.assert_runs("1.5.0", &new.sha256);
    let second = machine.run(&format!("{PLOYZD} machine initialize --json")).expect(0).json();
    assert_ne!(second["id"], made["id"], "a Machine that was reset is another one");
}

#[test]
fn a_damaged_identity_is_reported_and_left_alone() {
    let machine = Machine::named("damaged").installed("1.4.0").boot();
    machine.run(&format!("{PLOYZD} machine initialize")).ok();
    for damage in [
        "head -c 40 identity.json >x; cat x >identity.json; rm x",
        ": >identity.json",
        "echo '{}' >identity.json",
    ] {
        machine.run(&format!("cd /var/lib/ployz && {damage}")).ok();
        let state = machine.run(STATE).expect(0).stdout;
        machine.run("systemctl restart ployz.service").ok();

        let api = machine.api();
        assert_eq!((&api["phase"], &api["ready"]), (&"damaged".into(), &false.into()), "{damage}: {api}");
        let _ = machine.run(&format!("{PLOYZD} status")).expect(4).says(&["identity", "damaged"]);
        let _ = machine.run(&format!("{PLOYZD} machine initialize")).expect(4).says(&["damaged", "reset"]);
        assert_eq!(machine.run(STATE).stdout, state, "{damage}: the file was touched");
        assert_eq!(machine.daemon().restarts, 0);
    }
    machine.run(&format!("{PLOYZD} machine reset --yes")).ok();
    machine.run(&format!("{PLOYZD} machine initialize")).ok();
    machine.run(&format!("{PLOYZD} status")).ok();
}
