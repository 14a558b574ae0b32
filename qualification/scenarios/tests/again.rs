//! Installing what is there: nothing is replaced or restarted that is in place and running, and what differs from it
//! in the least is.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Image, Machine, Run, release, serve};

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
