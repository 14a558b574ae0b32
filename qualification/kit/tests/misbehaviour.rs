//! Each way to answer wrongly, as curl or a bare socket sees it.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{Curl, big, raw, raw_and_end, site, tls_and_end};
use kit::{Accept, Announce, Event, How, Options, Rule, Server, Tls};

const STABLE: &str = "GET /v1/stable HTTP/1.1\r\n\r\n";
const LAST: &str = "GET /v1/stable HTTP/1.1\r\nConnection: close\r\n\r\n";

/// A server with a rule, and the site that it serves.
fn server(tls: Tls, rule: Rule) -> (Server, tempfile::TempDir) {
    let site = site();
    let server = Server::start(Options::new(site.path()).tls(tls)).unwrap();
    server.rule(rule);
    (server, site)
}

fn body_of(answer: &[u8]) -> &[u8] {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("a head");
    &answer[end + 4..]
}

#[test]
fn another_status_twice_then_good() {
    let rule = Rule::new("/v1/*").times(2).status(503).header("Retry-After", "1");
    let (server, _site) = server(Tls::Good, rule.clone());
    for _ in 0..2 {
        let answer = Curl::of(&server).get("/v1/stable");
        assert_eq!((answer.status, answer.header("Retry-After")), (503, Some("1")));
        assert!(String::from_utf8_lossy(&answer.body).contains("<h1>503 Service Unavailable</h1>"));
    }
    assert_eq!(Curl::of(&server).get("/v1/stable").body, b"v1.4.0\n");
    let records = server.settled();
    assert_eq!(records.iter().map(|record| record.status).collect::<Vec<_>>(), [503, 503, 200]);
    assert_eq!((records[0].rule.as_ref(), records[2].rule.as_ref()), (Some(&rule), None));
    assert_eq!(server.rules(), [(rule, 2)]);
}

#[test]
fn another_body() {
    let (server, _site) = server(Tls::Good, Rule::new("*").body("<html>").header("Last-Modified", ""));
    let answer = Curl::of(&server).get("/nothing");
    assert_eq!((answer.status, answer.body.as_slice()), (200, b"<html>".as_slice()));
}

#[test]
fn delays() {
    let (server, _site) = server(Tls::Good, Rule::new("*").delay(Duration::from_millis(300)));
    let start = Instant::now();
    assert_eq!(Curl::of(&server).get("/v1/stable").status, 200);
    assert!(start.elapsed() >= Duration::from_millis(300));
}

#[test]
fn stalls_and_notices_that_the_client_went() {
    let (server, _site) = server(Tls::Good, Rule::new("*").cut(1000, How::Stall));
    let answer = Curl::of(&server).with(["--max-time", "1"]).get("/big");
    assert_eq!((answer.exit, answer.body.len()), (28, 1000));
    let record = &server.settled()[0];
    assert_eq!((record.sent, record.finished), (1000, true));
}

#[test]
fn what_is_stalled_is_in_the_log_already() {
    let (server, _site) = server(Tls::Plain, Rule::new("*").cut(0, How::Stall));
    let mut socket = TcpStream::connect(server.address()).unwrap();
    socket.write_all(STABLE.as_bytes()).unwrap();
    assert!(socket.read(&mut [0; 100]).unwrap() > 0);
    let record = &server.requests()[0];
    assert_eq!((record.path.as_str(), record.status, record.finished), ("/v1/stable", 200, false));
}

#[test]
fn drips() {
    let (server, _site) = server(Tls::Good, Rule::new("*").drip(2, Duration::from_millis(50)));
    let start = Instant::now();
    assert_eq!(Curl::of(&server).get("/v1/stable").body, b"v1.4.0\n");
    assert!(start.elapsed() >= Duration::from_millis(150));
}

#[test]
fn drips_the_head() {
    let (server, _site) = server(Tls::Plain, Rule::new("*").drip_head(10, Duration::from_millis(10)));
    let start = Instant::now();
    assert_eq!(body_of(&raw(&server, LAST)), b"v1.4.0\n");
    assert!(start.elapsed() >= Duration::from_millis(100));
}

#[test]
fn stops_too_early() {
    // 18: closed with bytes missing. 56: the connection broke.
    for (tls, how, exit) in [
        (Tls::Good, How::Close, 18),
        (Tls::Good, How::Abrupt, 18),
        (Tls::Good, How::Reset, 56),
        (Tls::Plain, How::Close, 18),
        (Tls::Plain, How::Abrupt, 18),
        (Tls::Plain, How::Reset, 56),
    ] {
        let (server, _site) = server(tls, Rule::new("*").cut(1000, how));
        let answer = Curl::of(&server).get("/big");
        assert_eq!(answer.exit, exit, "{tls:?} {how:?}: {}", answer.says);
        assert_eq!(answer.header("Content-Length"), Some("1000000"));
        assert_eq!(answer.body, big()[..1000]);
    }
}

#[test]
fn ends_with_close_notify_or_without() {
    for (how, seen) in [
        (How::Close, None),
        (How::Abrupt, Some(ErrorKind::UnexpectedEof)),
        (How::Reset, Some(ErrorKind::ConnectionReset)),
    ] {
        let (server, _site) = server(Tls::Good, Rule::new("*").cut(3, how));
        let (bytes, end) = tls_and_end(&server, STABLE);
        assert_eq!((body_of(&bytes), end), (b"v1.".as_slice(), seen), "{how:?}");
    }
}

#[test]
fn resets() {
    let (server, _site) = server(Tls::Plain, Rule::new("*").cut(3, How::Reset));
    let (bytes, end) = raw_and_end(&server, STABLE);
    assert_eq!((body_of(&bytes), end), (b"v1.".as_slice(), Some(ErrorKind::ConnectionReset)));
}

#[test]
fn sends_more_than_it_announced() {
    let (server, _site) = server(Tls::Plain, Rule::new("*").extra(3));
    let answer = raw(&server, STABLE);
    assert!(String::from_utf8_lossy(&answer).contains("\r\nContent-Length: 7\r\n"));
    assert_eq!(body_of(&answer), b"v1.4.0\n\0\0\0");
}

#[test]
fn announces_another_length() {
    let (server, _site) = server(Tls::Plain, Rule::new("*").announce(Announce::Length(3)));
    let answer = raw(&server, STABLE);
    assert!(String::from_utf8_lossy(&answer).contains("\r\nContent-Length: 3\r\n"));
    assert_eq!(body_of(&answer), b"v1.4.0\n");
    server.set_rules(vec![Rule::new("*").announce(Announce::Length(9))]);
    assert_eq!(Curl::of(&server).get("/v1/stable").exit, 18);
}

#[test]
fn announces_no_length() {
    let (server, _site) = server(Tls::Good, Rule::new("*").announce(Announce::Nothing));
    let answer = Curl::of(&server).get("/v1/stable");
    assert_eq!((answer.exit, answer.header("Content-Length")), (0, None));
    assert_eq!(answer.body, b"v1.4.0\n");
}

#[test]
fn never_ends() {
    let (server, _site) = server(Tls::Plain, Rule::new("*").endless());
    let mut socket = TcpStream::connect(server.address()).unwrap();
    socket.write_all(STABLE.as_bytes()).unwrap();
    let mut bytes = vec![0; 10_000_000];
    socket.read_exact(&mut bytes).unwrap();
    assert!(!String::from_utf8_lossy(&bytes[..500]).contains("Content-Length"));
    drop(socket);
    assert!(server.settled()[0].sent >= 9_999_000);
}

#[test]
fn sends_chunks() {
    let (server, _site) = server(Tls::Good, Rule::new("*").announce(Announce::Chunked));
    let answer = Curl::of(&server).get("/big");
    assert_eq!((answer.exit, answer.header("Transfer-Encoding")), (0, Some("chunked")));
    assert_eq!(answer.header("Content-Length"), None);
    assert_eq!(answer.body, big());
    server.set_rules(vec![Rule::new("*").announce(Announce::Chunked).cut(10, How::Close)]);
    assert_eq!(Curl::of(&server).get("/big").exit, 18);
}

#[test]
fn flips_a_byte_of_the_file_in_a_range_too() {
    let (server, _site) = server(Tls::Good, Rule::new("*").flip(100));
    let mut wrong = big();
    wrong[100] ^= 0xff;
    assert_eq!(Curl::of(&server).get("/big").body, wrong);
    assert_eq!(Curl::of(&server).with(["-r", "90-109"]).get("/big").body, wrong[90..110]);
    assert_eq!(Curl::of(&server).with(["-r", "200-209"]).get("/big").body, big()[200..210]);
}

#[test]
fn redirects() {
    let (plain, _other) = server(Tls::Plain, Rule::new("/unused"));
    let (server, _site) = server(Tls::Good, Rule::new("/v1/stable").redirect(plain.url() + "/v1/stable"));
    let answer = Curl::of(&server).get("/v1/stable");
    assert_eq!(
        (answer.status, answer.header("Location")),
        (302, Some((plain.url() + "/v1/stable").as_str()))
    );
    assert_eq!(Curl::of(&server).with(["-L"]).get("/v1/stable").body, b"v1.4.0\n");

    server.set_rules(vec![Rule::new("*").redirect_loop().status(307)]);
    let answer = Curl::of(&server).with(["-L", "--max-redirs", "5"]).get("/v1/stable");
    assert_eq!((answer.exit, answer.status), (47, 307));

    server.forget();
    server.set_rules(vec![Rule::new("*").redirect_chain(3)]);
    let answer = Curl::of(&server).with(["-L"]).get("/v1/stable");
    assert_eq!(answer.body, b"v1.4.0\n");
    assert_eq!(server.settled().iter().map(|record| record.status).collect::<Vec<_>>(), [302, 302, 302, 200]);
}

#[test]
fn is_no_http_at_all() {
    let (server, _site) = server(Tls::Good, Rule::new("*").garbage());
    let answer = Curl::of(&server).get("/v1/stable");
    assert_eq!(answer.exit, 1, "{}", answer.says);
    server.set_rules(vec![Rule::new("*").raw("HTTP/1.1 200 OK\r\nContent-Le")]);
    assert_eq!(Curl::of(&server).get("/v1/stable").body, b"");
    server.set_rules(vec![Rule::new("*").raw("")]);
    assert_eq!(Curl::of(&server).get("/v1/stable").exit, 52, "an empty reply");
}

#[test]
fn has_a_huge_head() {
    let (server, _site) = server(Tls::Plain, Rule::new("*").huge_header(1_000_000));
    assert!(raw(&server, LAST).len() > 1_000_000);
    assert_ne!(Curl::of(&server).get("/v1/stable").exit, 0);
    server.set_rules(vec![Rule::new("*").interim(1000)]);
    let answer = raw(&server, LAST);
    assert_eq!(String::from_utf8_lossy(&answer).matches("HTTP/1.1 103 Early Hints").count(), 1000);
    assert!(answer.ends_with(b"v1.4.0\n"));
}

#[test]
fn lies_about_its_coding() {
    let (server, _site) = server(Tls::Good, Rule::new("*").gzip_lie());
    let answer = Curl::of(&server).with(["--compressed"]).get("/big");
    assert_eq!((answer.exit, answer.header("Content-Encoding")), (61, Some("gzip")));
}

#[test]
fn turns_connections_away() {
    for tls in [Tls::Good, Tls::Plain] {
        for (accept, exits) in [
            (Accept::Hang, [28, 28]),
            (Accept::Close, [35, 52]),
            (Accept::Reset, [35, 56]),
            (Accept::Garbage, [35, 1]),
        ] {
            let (server, _site) = server(tls, Rule::at_accept(accept).times(1));
            let answer = Curl::of(&server).with(["--max-time", "1"]).get("/v1/stable");
            assert!(exits.contains(&answer.exit), "{tls:?} {accept:?}: {} {}", answer.exit, answer.says);
            assert!(server.requests().is_empty());
            assert_eq!(server.records()[0].event, Event::Accept);
            assert_eq!(Curl::of(&server).get("/v1/stable").status, 200, "then good again");
        }
    }
}

#[test]
fn a_failed_handshake_is_in_the_log() {
    let (server, _site) = server(Tls::Good, Rule::new("*"));
    let _ = raw(&server, STABLE);
    let _ = server.settled();
    assert_eq!(server.records()[0].event, Event::Handshake);
    assert!(server.records()[0].problem.is_some());
}
