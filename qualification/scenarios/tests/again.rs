//! Installing what is there: nothing is replaced or restarted that is in place and running, and what differs from it
//! in the least is.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Image, Machine, Run, release, release_padded, serve};
use serde_json::json;

#[test]
fn second_run_replaces_and_restarts_nothing_on_trixie() {
    second_run_replaces_and_restarts_nothing(Image::Trixie);
}

#[test]
fn second_run_replaces_and_restarts_nothing_on_bookworm() {
    second_run_replaces_and_restarts_nothing(Image::Bookworm);
}

fn second_run_replaces_and_restarts_nothing(image: Image) {
    let release = release("1.4.0");
    let name = format!("second-run-{image}");
    let server = serve(&name).release(&release).channel("stable", "1.4.0").start();
    let machine = Machine::named(&name).image(image).served_by(&server).installed("1.4.0").boot();
    let before = machine.watch();
    let nothing_was_needed = |how: &str, run: Run| {
        let run = run.expect(0);
        let record = run.record();
        assert_eq!(record["outcome"]["succeeded"]["nothing_was_needed"], true, "{how}: {record}");
        assert_eq!(record["installation"], "unchanged", "{how}: {record}");
        assert_eq!(record["switched"].as_array().unwrap().len(), 0, "{how}: {record}");
        before.assert_same(&machine.watch());
        machine.assert_nothing_left();
    };

    let url = server.url();
    let sources = format!("PLOYZ_RELEASES={url}/releases/download PLOYZ_CHANNELS={url}");
    let bootstrap = format!("curl -fsSL {url}/machine | {sources} sh -s -- --docker none --json");
    nothing_was_needed("bootstrap", machine.run(&bootstrap));

    server.forget();
    nothing_was_needed("network", machine.run("/usr/local/bin/ployzd install --version 1.4.0 --json"));
    assert_eq!(
        server.asked(),
        ["/releases/download/v1.4.0/checksums.txt"],
        "the archive is not fetched again"
    );

    server.forget();
    nothing_was_needed("channel", machine.run("/usr/local/bin/ployzd install --channel stable --json"));
    assert_eq!(server.asked(), ["/v1/stable", "/releases/download/v1.4.0/checksums.txt"]);

    let from = machine.deliver(&release);
    nothing_was_needed("archive", machine.run(&format!("/usr/local/bin/ployzd install {from} --json")));
    nothing_was_needed("itself", machine.run("/usr/local/bin/ployzd install --json"));
    machine.assert_runs("1.4.0", &release.sha256);

    // For people, too.
    let told = machine.run("/usr/local/bin/ployzd install").expect(0);
    let _ = told.says(&["Nothing was needed"]);
}

#[test]
fn a_stale_process_is_restarted_and_confirmed_when_the_file_was_exchanged_for_the_same() {
    let release = release("1.4.0");
    let machine = Machine::named("stale-same").installed("1.4.0").boot();
    let before = machine.daemon();
    // The same bytes as another file: what runs is no longer what is installed.
    machine.run("cd /usr/local/bin && cp -p ployzd .copy && mv .copy ployzd").ok();
    assert!(!machine.daemon().runs_installed);
    let _ = machine.run("/usr/local/bin/ployzd status").expect(4).says(&["does not run the installed file"]);

    let run = machine.run("/usr/local/bin/ployzd install --json").expect(0);
    let after = machine.assert_runs("1.4.0", &release.sha256);
    assert_ne!(before.pid, after.pid);
    let record = run.record();
    assert_eq!(record["outcome"]["succeeded"]["nothing_was_needed"], false, "{record}");
    assert_eq!(record["outcome"]["succeeded"]["pid"], after.pid, "{record}");
    assert_eq!(record["installation"], "unchanged", "{record}");
    machine.assert_nothing_left();
}

#[test]
fn a_stale_process_is_restarted_and_confirmed_when_the_new_release_is_already_in_place() {
    let new = release("1.5.0");
    let server = serve("stale-new").release(&new).start();
    let machine = Machine::named("stale-new").served_by(&server).installed("1.4.0").boot();
    // As after a crash between the renames and the restart: file and description are new, the process is old.
    let _ = machine.deliver(&new);
    let description = json!({"version": "1.5.0", "sha256": new.sha256, "archive_sha256": new.archive_sha256(),
        "confirmed": false, "installed_at": "2026-01-01T00:00:00Z", "attempt": "0123456789abcdef0123456789abcdef"});
    let mut inventory = machine.inventory();
    inventory["previous"] = inventory["current"].clone();
    inventory["current"] = description;
    machine.write("/usr/local/lib/ployz/installed.json", &inventory.to_string());
    machine.run(&format!("mv /root/1.5.0-{}/ployzd /usr/local/bin/ployzd", &new.sha256[..8])).ok();
    let before = machine.daemon();
    assert!(!before.runs_installed);
    let told = machine.run("/usr/local/bin/ployzd status").expect(4);
    let _ = told.says(&["1.4.0 is running, and 1.5.0 is installed"]);

    let run = machine.run("/usr/local/bin/ployzd install --version 1.5.0 --json").expect(0);
    let after = machine.assert_runs("1.5.0", &new.sha256);
    assert_ne!(before.pid, after.pid);
    assert_eq!(run.outcome()["succeeded"]["nothing_was_needed"], false);
    assert_eq!(
        server.asked(),
        ["/releases/download/v1.5.0/checksums.txt"],
        "the archive is not fetched again"
    );
    machine.assert_nothing_left();
}

#[test]
fn same_version_with_other_bytes_is_replaced() {
    let (first, other) = (release("1.4.0"), release_padded("1.4.0", 1));
    assert_ne!(first.sha256, other.sha256);
    let server = serve("other-bytes").release(&other).start();
    let machine = Machine::named("other-bytes").served_by(&server).installed("1.4.0").boot();

    let run = machine.run("/usr/local/bin/ployzd install --version 1.4.0 --json").expect(0);
    machine.assert_runs("1.4.0", &other.sha256);
    assert_eq!(run.outcome()["succeeded"]["sha256"], other.sha256.as_str());
    assert_eq!(run.record()["installation"], "replaced");
    assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), first.sha256);
    let inventory = machine.inventory();
    assert_eq!(inventory["previous"]["sha256"], first.sha256.as_str(), "{inventory}");
    assert_eq!(inventory["current"]["archive_sha256"], other.archive_sha256().as_str(), "{inventory}");
    machine.assert_nothing_left();
}
