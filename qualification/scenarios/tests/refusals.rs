//! Refusals, as one table: every fault of a network, a `checksums.txt`, an archive, a binary and a host, each against
//! a Machine that serves, each told by its own words, within its own time, with nothing touched.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a failed assumption fails the test, and a table is there to be seen"
)]

#[path = "refusals/hosts.rs"]
mod hosts;
#[path = "refusals/networks.rs"]
mod networks;
#[path = "refusals/releases.rs"]
mod releases;
#[path = "refusals/table.rs"]
mod table;

use scenarios::{Machine, release, serve};
use serde_json::json;

use table::{PLOYZD, Table, UPGRADE};

/// Short, so that a fault that is only ended by a deadline does not take long.
fn deadlines() -> serde_json::Value {
    json!({"pointer": 3, "stall": 1, "acquire": 4, "preflight": 2})
}

#[test]
fn every_refusal_has_its_own_words_and_touches_nothing() {
    let server = serve("refusals").release(&release("1.4.0")).release(&release("1.5.0")).start();
    let machine = Machine::named("refusals").served_by(&server);
    let machine = machine.setting("deadlines", deadlines()).installed("1.4.0").boot();
    let client = machine.client();
    let daemon = machine.daemon();

    let mut table = Table::new(&machine, &server);
    networks::rows(&mut table);
    releases::checksums(&mut table);
    releases::archives(&mut table);
    releases::binaries(&mut table);
    hosts::rows(&mut table);
    table.print();

    let heard = client.stop();
    assert_eq!(heard.failures, Vec::<String>::new(), "a client was refused");
    assert_eq!(heard.versions, ["1.4.0"]);
    assert_eq!(machine.daemon(), daemon, "it is another process");
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
    table.assert_good(80);
    // The table is no proof if nothing could have succeeded.
    server.obey();
    table::deadline_for_good(&machine);
    machine.run(UPGRADE).ok();
    machine.assert_runs("1.5.0", &release("1.5.0").sha256);
}

#[test]
fn a_source_that_asks_to_wait_is_waited_for() {
    let server = serve("retry-after").release(&release("1.4.0")).release(&release("1.5.0")).start();
    let machine = Machine::named("retry-after").served_by(&server).installed("1.4.0").boot();
    server.rules(&json!([{"path": "*", "times": 2, "status": 429, "headers": {"Retry-After": "2"}}]));
    let run = machine.run(&format!("{PLOYZD} install --version 1.5.0 --json")).expect(0);
    assert!(run.took.as_secs() >= 4, "twice it was asked to wait for 2 s, and it took {:?}", run.took);
    machine.assert_runs("1.5.0", &release("1.5.0").sha256);
    machine.assert_nothing_left();
}
