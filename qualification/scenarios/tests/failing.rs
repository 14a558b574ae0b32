//! Releases that do not work once they are in place: said as what was observed, nothing rolled back, a way back.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Machine, Release, release, serve};
use serde_json::json;

const UPGRADE: &str = "/usr/local/bin/ployzd install --version 1.5.0 --json";

/// A 1.5.0 that passes preflight and whose unit starts a verb that it does not know: it exits with status 2.
fn that_exits() -> Release {
    let (from, to) = ("ExecStart=/usr/local/bin/ployzd daemon\n", "ExecStart=/usr/local/bin/ployzd daemom\n");
    release("1.5.0").changed(from, to)
}

#[test]
fn a_release_that_exits_at_start_is_failed_and_replaced_and_the_previous_one_is_kept() {
    let (old, bad) = (release("1.4.0"), that_exits());
    let server = serve("exits").release(&old).release(&bad).start();
    let machine = Machine::named("exits").served_by(&server).installed("1.4.0").boot();

    let run = machine.run(UPGRADE).expect(5);
    let record = run.record();
    let failed = &record["outcome"]["failed"];
    assert_eq!((&failed["stage"], &failed["reason"]), (&"confirming".into(), &"crashed".into()), "{record}");
    assert!(failed["error"].to_string().contains("exited with status 2"), "{record}");
    let mut help = failed["help"].as_array().unwrap().iter().filter_map(|line| line.as_str());
    let way_back = help.find_map(|line| line.strip_prefix("put 1.4.0 back with: sudo "));
    let way_back = way_back.unwrap_or_else(|| panic!("no way back is named: {record}"));
    assert_eq!(record["installation"], "replaced", "{record}");
    machine.assert_nothing_left();

    // Nothing is rolled back by itself.
    assert_eq!(machine.sha256("/usr/local/bin/ployzd"), bad.sha256);
    assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), old.sha256);
    assert_eq!(machine.inventory()["current"]["confirmed"], false);
    let shown = machine.run("/usr/local/bin/ployzd status").expect(4);
    let _ =
        shown.says(&["1.5.0", "never confirmed", "previous    1.4.0", "failed at confirming", "replaced"]);

    // A second bad try replaces nothing, and does not push the good one out.
    let again = machine.run(UPGRADE).expect(4);
    assert_eq!(again.record()["installation"], "unchanged");
    assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), old.sha256);
    // The way that was named leads back, and the socket lives.
    machine.run(&format!("{way_back} --yes")).ok();
    machine.assert_runs("1.4.0", &old.sha256);
    assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), old.sha256, "a bad release is never kept");
    assert_eq!(machine.run("systemctl is-active ployz.socket").text(), "active");
}

#[test]
fn a_release_that_never_says_that_it_is_ready_is_told_from_one_that_crashes() {
    let old = release("1.4.0");
    let bad = release("1.5.0").changed("READY=1", "HELLO=1");
    let server = serve("hangs").release(&old).release(&bad).start();
    let machine = Machine::named("hangs").served_by(&server);
    let machine = machine.setting("deadlines", json!({"confirm": 4})).installed("1.4.0").boot();

    let run = machine.run(UPGRADE).expect(5);
    let record = run.record();
    let failed = &record["outcome"]["failed"];
    assert_eq!(
        (&failed["stage"], &failed["reason"]),
        (&"confirming".into(), &"not_ready".into()),
        "{record}"
    );
    assert_eq!(record["ready_observed_at"], serde_json::Value::Null, "{record}");
    machine.run("/usr/local/bin/ployzd install --version 1.4.0").ok();
    machine.assert_runs("1.4.0", &old.sha256);
}

#[test]
fn a_release_on_which_a_good_one_fails_is_never_kept_as_previous_after_a_power_loss() {
    let (old, bad) = (release("1.4.0"), that_exits());
    let server = serve("exits-power").release(&old).release(&bad).start();
    let machine = Machine::named("exits-power").served_by(&server).installed("1.4.0").boot();
    let running = machine.start_run(UPGRADE);
    machine.until("it is in place", |machine| machine.sha256("/usr/local/bin/ployzd") == bad.sha256);
    machine.lose_power();
    let _ = running.end();
    let shown = machine.run("/usr/local/bin/ployzd status").expect(4);
    let _ = shown.says(&["INTERRUPTED", "installation replaced", "restarted"]);
    machine.run("/usr/local/bin/ployzd install --version 1.4.0").ok();
    machine.assert_runs("1.4.0", &old.sha256);
    assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), old.sha256);
}
