//! Rows of the network and of what a source answers: of the archive, which an accepted attempt acquires, and of
//! `checksums.txt`, without which nothing is accepted.

use scenarios::{release, serve};
use serde_json::json;

use crate::table::{ACQUIRING, At, Table, UPGRADE};

pub(crate) fn rows(table: &mut Table<'_>) {
    let archive = "*.tar.gz";
    let sums = "*/checksums.txt";
    let length = std::fs::metadata(release("1.5.0").archive()).unwrap().len();
    let mut of_archive = |name: &str, mut rule: serde_json::Value, says: &str, within: u64| {
        rule["path"] = archive.into();
        table.source(name, &rule, ACQUIRING, says, within);
    };
    of_archive("archive: missing", json!({"status": 404}), "does not exist (status 404)", 5);
    of_archive("archive: gone", json!({"status": 410}), "does not exist (status 410)", 5);
    of_archive("archive: forbidden", json!({"status": 403}), "answered 403", 5);
    of_archive("archive: 500 for ever", json!({"status": 500}), "answered 500", 8);
    of_archive("archive: 503 for ever", json!({"status": 503}), "answered 503", 8);
    let later = json!({"Retry-After": "600"});
    of_archive("archive: 429, far too long", json!({"status": 429, "headers": later}), "answered 429", 5);
    let cut = |how: &str| json!({"after": 100_000, "how": how});
    // Each resumed try brings more: from the start again and again, it comes to an end by its deadline.
    let short = json!({"cut": cut("close"), "range": "ignore", "headers": {"ETag": ""}});
    of_archive("archive: shorter than its length", short, "fetching", 8);
    let chunked = json!({"cut": cut("abrupt"), "announce": "chunked", "range": "ignore"});
    of_archive("archive: chunks that break off", chunked, "fetching", 8);
    let reset = json!({"cut": cut("reset"), "range": "ignore"});
    of_archive("archive: reset in the middle", reset, "reset", 8);
    let stall = json!({"cut": cut("stall"), "range": "ignore"});
    of_archive("archive: stalls", stall, "not complete (100000 bytes came)", 8);
    let drip = json!({"drip": {"bytes": 100, "every_ms": 100}});
    of_archive("archive: drips", drip, "it was not complete", 8);
    of_archive("archive: without end", json!({"endless": true}), "sent more than 67108864 bytes", 8);
    let huge = json!({"announce": {"length": 80_000_000}});
    of_archive("archive: announced over the bound", huge, "announces 80000000 bytes", 5);
    of_archive(
        "archive: to http",
        json!({"redirect": {"to": "http://releases.ployz.test/x"}}),
        "is not https",
        5,
    );
    of_archive("archive: six redirects", json!({"redirect": {"chain": 6}}), "more than 5 redirects", 5);
    of_archive("archive: to nowhere", json!({"status": 302, "headers": {"Location": ""}}), "answered 302", 5);
    of_archive(
        "archive: encoded",
        json!({"headers": {"Content-Encoding": "gzip"}}),
        "encoded the content",
        5,
    );
    of_archive("archive: no HTTP", json!({"raw": "good morning\r\n\r\n"}), "invalid HTTP", 8);
    let verifying = crate::table::VERIFYING;
    let flip = json!({"path": archive, "flip": 1000});
    table.source("archive: one byte is another", &flip, verifying, "and checksums.txt says", 5);
    let extra = json!({"path": archive, "extra": 10, "announce": "nothing"});
    table.source("archive: more than was published", &extra, verifying, "and checksums.txt says", 5);
    let less = json!({"path": archive, "announce": "nothing", "cut": {"after": length - 1, "how": "close"}});
    table.source("archive: less than was published", &less, verifying, "and checksums.txt says", 5);

    let mut of_sums = |name: &str, mut rule: serde_json::Value, says: &str, within: u64| {
        rule["path"] = sums.into();
        table.source(name, &rule, At::Nothing, says, within);
    };
    of_sums("sums: missing", json!({"status": 404}), "does not exist (status 404)", 5);
    of_sums("sums: forbidden", json!({"status": 403}), "answered 403", 5);
    of_sums("sums: 503 for ever", json!({"status": 503}), "answered 503", 6);
    of_sums("sums: redirects in a circle", json!({"redirect": "loop"}), "more than 5 redirects", 5);
    let long = json!({"extra": 300_000, "announce": "chunked"});
    of_sums("sums: more than 256 KiB", long, "sent more than 262144 bytes", 5);
    of_sums("sums: announced as more", json!({"announce": {"length": 300_000}}), "announces 300000 bytes", 5);

    connections(table);
}

/// Faults before a request.
fn connections(table: &mut Table<'_>) {
    for (how, says) in [("reset", "reset"), ("close", "eof"), ("garbage", "corrupt message")] {
        let name = format!("connection: {how}");
        table.source(&name, &json!({"accept": how}), At::Nothing, says, 6);
    }
    // Told alike, since the same is observed: for so long nothing came that could be read.
    for (name, rule) in [
        ("sums: never answered", json!({"path": "*/checksums.txt", "delay_ms": 60_000})),
        (
            "sums: a head that drips",
            json!({"path": "*/checksums.txt", "drip": {"bytes": 1, "every_ms": 200, "head": true}}),
        ),
        ("connection: hangs", json!({"accept": "hang"})),
    ] {
        table.server.rules(&json!([rule]));
        table.also(name, UPGRADE, At::Nothing, "operation timed out", 7);
        table.server.obey();
    }
    for (certificate, says) in [
        ("unknown-issuer", "UnknownIssuer"),
        ("expired", "certificate expired"),
        ("wrong-name", "not valid for name"),
    ] {
        let server = serve(certificate).release(&release("1.5.0")).certificate(certificate).start();
        let to = |from: &str, to: &str| format!("sed -i s,{from},{to},g /etc/ployz/install.json");
        let (there, back) = (to(&table.server.url(), &server.url()), to(&server.url(), &table.server.url()));
        table.host(&format!("TLS: {certificate}"), [&there, &back], At::Nothing, says, 5);
    }
    let name = "releases.ployz.test";
    let there = format!("sed -i s,{name},nowhere.invalid,g /etc/ployz/install.json");
    let back = format!("sed -i s,nowhere.invalid,{name},g /etc/ployz/install.json");
    table.host("no such host", [&there, &back], At::Nothing, "nowhere.invalid", 8);
    table.refused("no such release", &UPGRADE.replace("1.5.0", "1.9.9"), At::Nothing, "v1.9.9", 5);
}
