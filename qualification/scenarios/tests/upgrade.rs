//! From one release to another and back.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::time::Duration;

use scenarios::{Machine, note, release, serve};

const INSTALL: &str = "/usr/local/bin/ployzd install";

#[test]
fn upgrade_over_the_network_keeps_the_previous_release_and_every_client() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let server = serve("upgrade").release(&old).release(&new).start();
    let machine = Machine::named("upgrade").served_by(&server).installed("1.4.0").boot();
    let before = machine.daemon();

    let client = machine.client();
    let run = machine.run(&format!("{INSTALL} --version 1.5.0 --json")).expect(0);
    let heard = client.stop();

    let after = machine.assert_runs("1.5.0", &new.sha256);
    assert_ne!(before.pid, after.pid);
    assert_eq!(after.restarts, 0);
    assert_eq!(run.record()["from"], "1.4.0");
    assert_eq!(run.outcome()["succeeded"]["pid"], after.pid);
    machine.assert_modes(&[("/usr/local/bin/ployzd.previous", "file root:root 755")]);
    assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), old.sha256);
    assert_eq!(machine.inventory()["previous"]["version"], "1.4.0");
    machine.assert_nothing_left();

    note(&format!(
        "upgrade: {} answers of the Machine API, {} failures, longest wait {} ms",
        heard.answers,
        heard.failures.len(),
        heard.longest.as_millis()
    ));
    assert_eq!(heard.failures, Vec::<String>::new(), "requests were refused or failed during the upgrade");
    assert_eq!(heard.versions, ["1.4.0", "1.5.0"]);
    assert!(heard.answers > 20, "only {} answers", heard.answers);
    // The budget is the benchmark's matter; this is far beyond it, and still no client's deadline.
    assert!(heard.longest < Duration::from_secs(2), "a client waited for {:?}", heard.longest);
}

#[test]
fn an_older_release_is_installed_when_it_is_asked_for_exactly_and_a_channel_never_goes_back() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let server = serve("downgrade").release(&old).release(&new).channel("stable", "1.4.0").start();
    let machine = Machine::named("downgrade").served_by(&server).installed("1.5.0").boot();
    let before = machine.watch();

    let refused = machine.run(&format!("{INSTALL} --channel stable --json")).expect(4);
    assert_eq!(refused.last()["record"], serde_json::Value::Null);
    let _ = refused.says(&["1.4.0", "1.5.0"]);
    before.assert_same(&machine.watch());
    assert_eq!(machine.attempts().len(), 1, "what was refused before acceptance has no record");
    machine.assert_runs("1.5.0", &new.sha256);

    let run = machine.run(&format!("{INSTALL} --version 1.4.0 --json")).expect(0);
    let warnings = run.record()["warnings"].to_string();
    assert!(warnings.contains("1.4.0 is older than 1.5.0"), "{warnings}");
    machine.assert_runs("1.4.0", &old.sha256);
    assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), new.sha256);
}
