//! Each way to answer a `Range` request wrongly.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Answer, Curl, big, site};
use kit::{Options, RangeLie, Rule, Server};

/// What a client sees that asks for the bytes from 100 to 199, if the file is still what it knows.
fn asked(lie: RangeLie, condition: Option<&str>) -> Answer {
    let site = site();
    let server = Server::start(Options::new(site.path())).unwrap();
    server.rule(Rule::new("*").range(lie));
    let curl = Curl::of(&server).with(["-r", "100-199"]);
    match condition {
        Some(etag) => curl.with(["-H", &format!("If-Range: {etag}")]).get("/big"),
        None => curl.get("/big"),
    }
}

#[test]
fn ignored() {
    let answer = asked(RangeLie::Ignore, None);
    assert_eq!((answer.status, answer.header("Accept-Ranges")), (200, None));
    assert_eq!(answer.body, big());
}

#[test]
fn shifted() {
    let answer = asked(RangeLie::Shifted, None);
    assert_eq!((answer.status, answer.header("Content-Range")), (206, Some("bytes 99-199/1000000")));
    assert_eq!(answer.body, big()[99..200]);
}

#[test]
fn mislabelled() {
    let answer = asked(RangeLie::Mislabelled, None);
    assert_eq!((answer.status, answer.header("Content-Range")), (206, Some("bytes 100-199/1000000")));
    assert_eq!(answer.body, big()[..100]);
}

#[test]
fn with_an_etag_that_changes() {
    let answer = asked(RangeLie::ChangedEtag, Some("\"known\""));
    assert_eq!(answer.status, 206);
    assert_ne!(answer.header("ETag"), asked(RangeLie::Ignore, None).header("ETag"));
}

#[test]
fn of_a_file_that_is_replaced_all_the_time() {
    assert_eq!(asked(RangeLie::Replaced, None).status, 206);
    let answer = asked(RangeLie::Replaced, Some("\"known\""));
    assert_eq!((answer.status, answer.body.len()), (200, 1_000_000));
}

#[test]
fn refused() {
    let answer = asked(RangeLie::Refuse, None);
    assert_eq!((answer.status, answer.header("Content-Range")), (416, Some("bytes */1000000")));
}
